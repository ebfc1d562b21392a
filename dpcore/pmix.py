"""The little of PMIx that a rendezvous needs: what Open MPI's mpirun and srun offer to each rank.

Rank 0 puts its address under a key, the others get it. The library is the launcher's own, called
by ctypes: a few structures and functions, whose layout is part of PMIx's standard. A program that
also uses MPI imports ``mpi4py.MPI`` before ``dpcore.init()``: Open MPI does not start where another
has entered PMIx before it. It is left only when the process ends, because a library that
everybody has left cannot be entered again.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping

from dpcore.errors import RendezvousError

_KEY_LENGTH = 512
_GLOBAL = 3  # readable by all ranks of the job
_STRING, _INT = 3, 6  # types of a value
_TIMEOUT = -24


class _Rank(ctypes.Structure):
    _fields_ = [("job", ctypes.c_char * 256), ("rank", ctypes.c_uint32)]


class _Content(ctypes.Union):
    # The largest member of PMIx's union is smaller than the room that is kept here.
    _fields_ = [("text", ctypes.c_char_p), ("number", ctypes.c_int), ("_", ctypes.c_char * 64)]


class _Value(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint16), ("content", _Content)]


class _Option(ctypes.Structure):
    _fields_ = [("key", ctypes.c_char * _KEY_LENGTH), ("flags", ctypes.c_uint32), ("value", _Value)]


class Pmix:
    """The line to the launcher's daemon. One per process, see :func:`connect`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._me = _Rank()
        library.PMIx_Error_string.restype = ctypes.c_char_p
        self._check(
            library.PMIx_Init(ctypes.byref(self._me), None, ctypes.c_size_t(0)), "PMIx_Init"
        )

    @contextlib.contextmanager
    def publish(self, key: str, value: str) -> Iterator[None]:
        text = _Value(_STRING, _Content(text=value.encode()))
        put = self._library.PMIx_Put(ctypes.c_uint8(_GLOBAL), _name(key), ctypes.byref(text))
        self._check(put, "PMIx_Put")
        self._check(self._library.PMIx_Commit(), "PMIx_Commit")
        yield

    def read(self, key: str, deadline: float) -> str:
        seconds = max(1, math.ceil(deadline - time.monotonic()))
        patience = _Option(b"pmix.timeout", 0, _Value(_INT, _Content(number=seconds)))
        rank_0 = _Rank(self._me.job, 0)
        found = ctypes.POINTER(_Value)()
        code = self._library.PMIx_Get(
            ctypes.byref(rank_0), _name(key), ctypes.byref(patience), ctypes.c_size_t(1),
            ctypes.byref(found),
        )  # fmt: skip
        if code == _TIMEOUT:
            raise RendezvousError(
                f"rank 0 did not publish its address through PMIx in {seconds} s; is it running?"
            )
        self._check(code, "PMIx_Get")
        return bytes(found.contents.content.text).decode()

    def leave(self) -> None:
        """The launcher takes a rank that ends without a word for one that crashed."""
        self._library.PMIx_Finalize(None, ctypes.c_size_t(0))

    def _check(self, code: int, what: str) -> None:
        if code != 0:
            reason = self._library.PMIx_Error_string(ctypes.c_int(code)).decode()
            raise RendezvousError(f"{what} of the launcher's PMIx failed: {reason} ({code})")


def _name(key: str) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(key.encode(), _KEY_LENGTH)


_of_process: Pmix | None = None
_one_at_a_time = threading.Lock()


def connect(environment: Mapping[str, str]) -> Pmix | None:
    """The line to the launcher, if it speaks PMIx and its library is found."""
    global _of_process
    with _one_at_a_time:
        if _of_process is None and "PMIX_NAMESPACE" in environment:
            library = _load(environment)
            if library is not None:
                _of_process = Pmix(library)
                atexit.register(_of_process.leave)
        return _of_process


def _load(environment: Mapping[str, str]) -> ctypes.CDLL | None:
    """The launcher's own copy first: another version may not understand its daemon."""
    folders = []
    for name in ("PMIX_PREFIX", "OPAL_PREFIX"):
        if prefix := environment.get(name):
            folders += [os.path.join(prefix, "lib", "openmpi"), os.path.join(prefix, "lib")]
    for path in [*(os.path.join(folder, "libpmix.so.2") for folder in folders), "libpmix.so.2"]:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(path)
    return None
