"""The little of PMI-1 that a rendezvous needs: what MPICH's mpiexec offers to each rank on PMI_FD.

Lines of ``cmd=... key=value``, a question and an answer each. A program that also uses MPI must
give dpcore another meeting place (MASTER_ADDR and MASTER_PORT): the descriptor has one user.
"""

from __future__ import annotations

import atexit
import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping

from dpcore.errors import RendezvousError

_ANSWER_SECONDS = 60.0


class Pmi:
    """The line to mpiexec. One per process, see :func:`connect`."""

    def __init__(self, descriptor: int) -> None:
        self._line = socket.socket(fileno=descriptor)
        self._line.settimeout(_ANSWER_SECONDS)
        self._unread = b""
        self._ask("cmd=init pmi_version=1 pmi_subversion=1")
        self.name = self._ask("cmd=get_my_kvsname")["kvsname"]

    @contextlib.contextmanager
    def publish(self, key: str, value: str) -> Iterator[None]:
        self._ask(f"cmd=put kvsname={self.name} key={key} value={value}")
        self._ask("cmd=barrier_in")
        yield

    def read(self, key: str, deadline: float) -> str:
        self._ask("cmd=barrier_in")
        return self._ask(f"cmd=get kvsname={self.name} key={key}")["value"]

    def leave(self) -> None:
        """mpiexec takes a rank that ends without a word for one that crashed."""
        with contextlib.suppress(RendezvousError):
            self._ask("cmd=finalize")

    def _ask(self, question: str) -> dict[str, str]:
        try:
            self._line.sendall(question.encode() + b"\n")
            while b"\n" not in self._unread:
                more = self._line.recv(4096)
                if not more:
                    raise OSError("it hung up")
                self._unread += more
        except OSError as error:
            raise RendezvousError(f"mpiexec does not answer {question!r}: {error}") from error
        answer, _, self._unread = self._unread.partition(b"\n")
        words = dict(word.partition("=")[::2] for word in answer.decode().split())
        if words.get("rc", "0") != "0":
            raise RendezvousError(f"mpiexec answers {question!r} with {answer.decode()!r}")
        return words


_of_process: Pmi | None = None
_one_at_a_time = threading.Lock()


def connect(environment: Mapping[str, str]) -> Pmi | None:
    """The line that mpiexec gave to this process, if it did."""
    global _of_process
    with _one_at_a_time:
        if _of_process is None and "PMI_FD" in environment:
            _of_process = Pmi(int(environment["PMI_FD"]))
            atexit.register(_of_process.leave)
        return _of_process
