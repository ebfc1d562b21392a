"""What a process holds, as the kernel counts it."""

from __future__ import annotations

import ctypes
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _KEPT_BYTES = -1, -3, 256 << 10  # of glibc's mallopt


def proportional_bytes() -> int:
    """The memory of this process without the files it maps, its libraries above all: their pages
    count for less, the more programs run. A page that several processes map is divided among
    them."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    counts = dict(line.split(":") for line in lines[1:])
    return sum(int(counts[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem")) * 1024


def give_back_at_once() -> None:
    """What is freed goes to the kernel, now and from now on. Else malloc keeps some 100 MB for
    reuse, more or less by chance, which would count as used. It makes steps slower."""
    libc = ctypes.CDLL(None)
    for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
        libc.mallopt(option, _KEPT_BYTES)
    libc.malloc_trim(0)
