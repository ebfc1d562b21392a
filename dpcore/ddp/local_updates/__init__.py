"""Local updates: each rank trains by itself, and the ranks agree every n steps.

``DataParallel`` agrees in every step. docs/local_updates.md describes both classes and their cost.
"""

from dpcore.ddp.local_updates.diloco import DiLoCo
from dpcore.ddp.local_updates.local_sgd import LocalSGD

__all__ = ["DiLoCo", "LocalSGD"]
