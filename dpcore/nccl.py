"""The public path of ``nccl_library``."""

from dpcore.communicators.nccl import nccl_library

__all__ = ["nccl_library"]
