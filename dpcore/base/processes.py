"""Processes that must not outlive the one that has started them."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # opened here, since between fork and exec is no place for it


def end_with_parent(parent: int) -> None:
    """From now on the kernel kills this process when the thread that has started it is gone,
    however that ends: by SIGKILL too, after which nobody could tell it. A program that this process
    becomes by exec keeps that. ``parent`` may be gone already: then this ends at once."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
