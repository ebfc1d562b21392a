"""How tests in several processes share the machine: those of `pytest -n`, and other terminals.

It has five shares. A test takes one; a test that is marked `hurried`, two; `alone`, all of them;
`quiet`, all of them together with others that are quiet. A share is a lock on a byte of this file,
which belongs to the open file and not to the process: what a test forks does not matter, and the
locks of a process that is killed are gone.
"""

import contextlib
import fcntl
import os
import struct
import time

SHARES = 5
_GATE = SHARES  # the byte behind them: whoever takes shares, one after the other
_SECONDS_BETWEEN_LOOKS = 0.01


def open_here():
    """What the locks belong to, until the process ends."""
    return os.open(__file__, os.O_RDWR)


def _change(file, kind, byte, wait=False):
    command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
    fcntl.fcntl(file, command, struct.pack("hhlli4x", kind, os.SEEK_SET, byte, 1, 0))


def _is_taken(file, kind, byte):
    try:
        _change(file, kind, byte)
    except (BlockingIOError, PermissionError):
        return False
    return True


@contextlib.contextmanager
def taken(file, count, together=False):
    """Waits for so many shares and holds them, ``together`` with whoever holds them so, too. Those
    who come later wait behind."""
    held, kind = set(), fcntl.F_RDLCK if together else fcntl.F_WRLCK
    _change(file, fcntl.F_WRLCK, _GATE, wait=True)
    try:
        try:
            while True:
                for byte in set(range(SHARES)) - held:
                    if len(held) < count and _is_taken(file, kind, byte):
                        held.add(byte)
                if len(held) == count:
                    break
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        finally:
            _change(file, fcntl.F_UNLCK, _GATE)
        yield
    finally:
        for byte in held:
            _change(file, fcntl.F_UNLCK, byte)
