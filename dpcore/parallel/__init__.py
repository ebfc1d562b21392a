"""Beyond data parallel: tensor, sequence and pipeline parallel models over dpcore's communicators.

``mesh``            ``dp.mesh(comm, data=2, tensor=2)``: a communicator for each axis of a grid
``functional``      collectives that autograd can go through
``attention``       attention over a sequence that ranks share: ring and Ulysses
``pipeline_plans``  ``dp.pipeline_plan("1F1B", stages=4, microbatches=8)``: who computes what when

Nothing here is global: every function is given the communicator that it works over.
docs/parallel.md says what each costs and when it loses.
"""
