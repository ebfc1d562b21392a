"""Speaks PMIx for one rank, in a process of its own: ``dpcore/comm/launch/pmix.py`` runs this file.

Questions come as lines on stdin, answers go as lines to stdout; the end of stdin ends it. The
library is the launcher's own, called by ctypes: a few structures and functions, whose layout is
part of PMIx's standard. This file imports nothing of dpcore, so that it starts at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys

_KEY_LENGTH = 512
_GLOBAL = 3  # readable by all ranks of the job
_STRING, _INT = 3, 6  # types of a value
_TIMEOUT = -24
_PR_SET_PDEATHSIG = 1


class _Rank(ctypes.Structure):
    _fields_ = [("job", ctypes.c_char * 256), ("rank", ctypes.c_uint32)]


class _Content(ctypes.Union):
    # The largest member of PMIx's union is smaller than the room that is kept here.
    _fields_ = [("text", ctypes.c_char_p), ("number", ctypes.c_int), ("_", ctypes.c_char * 64)]


class _Value(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint16), ("content", _Content)]


class _Option(ctypes.Structure):
    _fields_ = [("key", ctypes.c_char * _KEY_LENGTH), ("flags", ctypes.c_uint32), ("value", _Value)]


class Client:
    """This rank, as the launcher's daemon knows it. Failures are RuntimeErrors."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._me = _Rank()
        library.PMIx_Error_string.restype = ctypes.c_char_p
        self._check(
            library.PMIx_Init(ctypes.byref(self._me), None, ctypes.c_size_t(0)), "PMIx_Init"
        )

    def publish(self, key: str, value: str) -> str:
        text = _Value(_STRING, _Content(text=value.encode()))
        put = self._library.PMIx_Put(ctypes.c_uint8(_GLOBAL), _name(key), ctypes.byref(text))
        self._check(put, "PMIx_Put")
        self._check(self._library.PMIx_Commit(), "PMIx_Commit")
        return ""

    def read(self, key: str, seconds: str) -> str:
        patience = _Option(b"pmix.timeout", 0, _Value(_INT, _Content(number=int(seconds))))
        rank_0 = _Rank(self._me.job, 0)
        found = ctypes.POINTER(_Value)()
        code = self._library.PMIx_Get(
            ctypes.byref(rank_0), _name(key), ctypes.byref(patience), ctypes.c_size_t(1),
            ctypes.byref(found),
        )  # fmt: skip
        if code == _TIMEOUT:
            raise RuntimeError(
                f"rank 0 did not publish its address through PMIx in {seconds} s; is it running?"
            )
        self._check(code, "PMIx_Get")
        return bytes(found.contents.content.text).decode()

    def leave(self) -> None:
        self._library.PMIx_Finalize(None, ctypes.c_size_t(0))

    def _check(self, code: int, what: str) -> None:
        if code != 0:
            reason = self._library.PMIx_Error_string(ctypes.c_int(code)).decode()
            raise RuntimeError(f"{what} of the launcher's PMIx failed: {reason} ({code})")


def _name(key: str) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(key.encode(), _KEY_LENGTH)


def _answer(word: str, text: str = "") -> None:
    sys.stdout.write(f"{word} {text}\n")
    sys.stdout.flush()


def main(paths: list[str]) -> None:
    """Enters through the first library of ``paths`` that is there, and answers until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank ends it
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    library = None
    for path in paths:
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(path)
            break
    if library is None:
        _answer("missing")
        return
    try:
        client = Client(library)
    except RuntimeError as error:
        _answer("failed", str(error))
        return
    _answer("done")
    for line in sys.stdin:
        verb, key, value = line.split()
        try:
            _answer("done", (client.publish if verb == "publish" else client.read)(key, value))
        except RuntimeError as error:
            _answer("failed", str(error))
    client.leave()


if __name__ == "__main__":
    main(sys.argv[1:])
