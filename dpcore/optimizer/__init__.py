"""``DistributedOptimizer``: an optimizer whose step goes on under the next forward."""
