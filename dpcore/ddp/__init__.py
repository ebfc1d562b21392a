"""``dpcore.DataParallel`` and its parts, one module per job.

Only the names that ``dpcore`` itself offers are public.
"""
