"""The little of PMI-1 that a rendezvous needs: what MPICH's mpiexec offers to each rank on PMI_FD.

Lines of ``cmd=... key=value``, a question and an answer each. The line is there for MPI, which may
start later in the same program. So it stays open and as it is (blocking), our keys begin with
"dpcore", and it is only ended in a program that never starts MPI. While MPI runs, ranks meet
through MPI (``mpi_rendezvous.py``).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import threading
import time
from collections.abc import Iterator, Mapping

from dpcore.comm.launch import mpi_rendezvous
from dpcore.errors import RendezvousError

_ANSWER_SECONDS = 60.0


class Pmi:
    """The line to mpiexec. One per process, see :func:`connect`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._process = os.getpid()
        self.patience = _ANSWER_SECONDS  # for the other ranks
        self._ask("cmd=init pmi_version=1 pmi_subversion=1")
        self.name = self._ask("cmd=get_my_kvsname")["kvsname"]

    @contextlib.contextmanager
    def publish(self, key: str, value: str) -> Iterator[None]:
        self._ask(f"cmd=put kvsname={self.name} key={key} value={value}")
        self._ask("cmd=barrier_in", self.patience)
        yield

    def read(self, key: str, deadline: float) -> str:
        self._ask("cmd=barrier_in", max(0.0, deadline - time.monotonic()))
        return self._ask(f"cmd=get kvsname={self.name} key={key}")["value"]

    def leave(self) -> None:
        """mpiexec takes a rank that ends without a word for one that crashed. MPI says it itself,
        and a forked child has nothing to say."""
        if os.getpid() == self._process and not mpi_rendezvous.was_started():
            with contextlib.suppress(RendezvousError):
                self._ask("cmd=finalize")

    def _ask(self, question: str, seconds: float = _ANSWER_SECONDS) -> dict[str, str]:
        try:
            answer = self._exchange(question.encode() + b"\n", seconds)
        except OSError as error:
            raise RendezvousError(
                f"mpiexec does not answer {question!r}: {error}; set MASTER_ADDR and MASTER_PORT "
                "to start without it"
            ) from error
        words = dict(word.partition("=")[::2] for word in answer.decode().split())
        if words.get("rc", "0") != "0":
            raise RendezvousError(
                f"mpiexec answers {question!r} with {answer.decode()!r}; set MASTER_ADDR and "
                "MASTER_PORT to start without it"
            )
        return words

    def _exchange(self, question: bytes, seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        while question:
            question = question[os.write(self._descriptor, question) :]
        ready = select.poll()
        ready.register(self._descriptor, select.POLLIN)
        answer = b""
        while not answer.endswith(b"\n"):
            if not ready.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                raise OSError(f"no answer in {seconds:.3g} s; have all ranks come?")
            more = os.read(self._descriptor, 4096)
            if not more:
                raise OSError("it hung up")
            answer += more
        return answer.rstrip(b"\n")


_of_process: Pmi | None = None
_one_at_a_time = threading.Lock()


def connect(environment: Mapping[str, str], patience: float = _ANSWER_SECONDS) -> Pmi | None:
    """The line that mpiexec gave to this process, if it did. ``patience``: how many seconds to
    wait there for the other ranks."""
    global _of_process
    with _one_at_a_time:
        if _of_process is None and "PMI_FD" in environment:
            _of_process = Pmi(int(environment["PMI_FD"]))
            atexit.register(_of_process.leave)
        if _of_process is not None:
            _of_process.patience = patience
        return _of_process
