"""What ``DataParallel`` does besides averaging gradients, one module per job.

Nothing here is public: ``dpcore.DataParallel`` is the face of all of it.
"""
