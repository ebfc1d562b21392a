"""Where wrapped models that were pickled by an earlier version look for their class."""

from dpcore.ddp.data_parallel import DataParallel

__all__ = ["DataParallel"]
