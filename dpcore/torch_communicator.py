"""The public path of ``TorchCommunicator``."""

from dpcore.communicators.torch_group import TorchCommunicator

__all__ = ["TorchCommunicator"]
