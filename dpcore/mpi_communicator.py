"""The public path of ``MpiCommunicator``."""

from dpcore.communicators.mpi.communicator import MpiCommunicator

__all__ = ["MpiCommunicator"]
