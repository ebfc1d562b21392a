"""The threads that torch computes with in a rank: how many, and that their first results are right.

By itself torch takes as many threads as there are processors, in every rank. Ranks that share
processors then wait for each other's threads, and a step takes several times as long.

MKL, from which torch has its sine, exponential and so on, chooses a kernel when each function is
called for the first time. If several threads make that call together, one of them may compute its
part with a kernel of low accuracy, in silence (pytorch#188792): in 3 of 700 processes on a busy
machine, half of `x.sin()` was wrong by up to 2e-4. The same training then ends with other bits.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence

from dpcore.comm.launch.rendezvous import this_host

_HOST_BYTES, _MASK_BYTES = 16, 128  # of what ranks of MPI tell each other

_OF_MKL = (
    "acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "log", "log10",
    "log1p", "log2", "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip
_has_chosen = False
_choosing = threading.Lock()  # ranks may be threads

_before: int | None = None  # what torch had when it was given something else
_given: int | None = None


def choose_kernels() -> None:
    """Makes the first call of each of MKL's functions on this thread alone."""
    global _has_chosen
    import torch

    with _choosing:
        if _has_chosen or not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
            return
        for dtype in (torch.float32, torch.float64):
            value = torch.full((1,), 0.5, dtype=dtype, device="cpu")
            for name in _OF_MKL:
                getattr(torch, name)(value)
        _has_chosen = True


def share_processors(sharers: int) -> None:
    """``sharers`` ranks may run on the processors of this one. Gives torch fewer threads where
    those of all are more than there are processors, and what it had where they no longer are. What
    the environment says stands; a program that wants another number sets it afterwards."""
    global _before, _given
    if os.environ.get("OMP_NUM_THREADS") or os.environ.get("MKL_NUM_THREADS"):
        return
    import torch

    now = torch.get_num_threads()
    if _before is None or now != _given:
        _before = now
    share = max(1, len(os.sched_getaffinity(0)) // sharers)
    _given = _before if sharers == 1 else min(_before, share)
    if _given != now:
        torch.set_num_threads(_given)


def are_chosen() -> bool:
    """Whether the program or its environment says how many threads torch has, as far as can be
    seen, or else the number of processors and of the ranks that share them."""
    if os.environ.get("OMP_NUM_THREADS") or os.environ.get("MKL_NUM_THREADS"):
        return True
    import torch

    now = torch.get_num_threads()
    return now == 1 or now not in (_before, _given)


def heed_environment() -> None:
    """For a process forked off one that had loaded torch with other variables."""
    import torch

    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if threads.isdecimal() and int(threads) > 0:
        torch.set_num_threads(int(threads))


def usable_processors() -> bytes:
    """Those of this process, and of which host."""
    host = hashlib.blake2b(this_host().encode(), digest_size=_HOST_BYTES).digest()
    told = (one for one in os.sched_getaffinity(0) if one < 8 * _MASK_BYTES)
    mask = sum(1 << processor for processor in told)
    return host + mask.to_bytes(_MASK_BYTES, "little")


def sharers_among(ranks: Sequence[bytes], rank: int) -> int:
    """How many may run on the processors of one of them, itself among them. ``ranks``: what
    ``usable_processors`` says on each.

    >>> host = bytes(16)
    >>> sharers_among([host + bytes([3]), host + bytes([2]), host + bytes([4])], rank=0)
    2
    """
    of_ranks = [(one[:_HOST_BYTES], int.from_bytes(one[_HOST_BYTES:], "little")) for one in ranks]
    own_host, own = of_ranks[rank]
    return sum(host == own_host and bool(usable & own) for host, usable in of_ranks)
