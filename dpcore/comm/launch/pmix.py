"""The little of PMIx that a rendezvous needs: what Open MPI's mpirun and srun offer to each rank.

Rank 0 puts its address under a key, the others get it. A process can enter PMIx once, and MPI does
so when it starts, earlier or later in the same program. So a process of its own
(``pmix_client.py``) enters for this rank, and leaves when the ranks have met. While MPI runs, ranks
meet through MPI (``mpi_rendezvous.py``).
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping

from dpcore.errors import RendezvousError

_ANSWER_SECONDS = 60.0
_CLIENT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "pmix_client.py")
_OTHERWISE = "set MASTER_ADDR and MASTER_PORT to start without it"


class Pmix:
    """The line to the launcher's daemon. One per process, see :func:`connect`."""

    def __init__(self, libraries: list[str]) -> None:
        self._libraries = libraries
        self._process = os.getpid()
        self._client: subprocess.Popen[bytes] | None = None
        self.found = self._enter()

    @contextlib.contextmanager
    def publish(self, key: str, value: str) -> Iterator[None]:
        self._ask(f"publish {key} {value}", _ANSWER_SECONDS)
        try:
            yield
        finally:
            self.leave()

    def read(self, key: str, deadline: float) -> str:
        seconds = max(1, math.ceil(deadline - time.monotonic()))
        try:
            return self._ask(f"read {key} {seconds}", seconds + _ANSWER_SECONDS)
        finally:
            self.leave()

    def leave(self) -> None:
        """The launcher takes a rank that ends without a word for one that crashed."""
        client, self._client = self._client, None
        if client is None or os.getpid() != self._process:
            return
        assert client.stdin is not None and client.stdout is not None
        client.stdin.close()
        try:
            client.wait(_ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            client.kill()
            client.wait()
        client.stdout.close()

    def _enter(self) -> bool:
        """False where the launcher's library is not found."""
        command = [sys.executable, "-I", "-S", _CLIENT, *self._libraries]
        self._client = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        word, text = self._answer("PMIx_Init", _ANSWER_SECONDS)
        if word != "done":
            self.leave()
        if word == "failed":
            raise RendezvousError(f"{text}; {_OTHERWISE}")
        return word == "done"

    def _ask(self, question: str, seconds: float) -> str:
        if self._client is None:
            self._enter()
        assert self._client is not None and self._client.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer tells
            self._client.stdin.write(question.encode() + b"\n")
        word, text = self._answer(question, seconds)
        if word != "done":
            raise RendezvousError(text)
        return text

    def _answer(self, question: str, seconds: float) -> tuple[str, str]:
        assert self._client is not None and self._client.stdout is not None
        deadline = time.monotonic() + seconds
        ready = select.poll()
        ready.register(self._client.stdout, select.POLLIN)
        answer = b""
        while not answer.endswith(b"\n"):
            more = b""
            if ready.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                more = self._client.stdout.read(4096)
            if not more:
                self._client.kill()
                self.leave()
                raise RendezvousError(
                    f"the launcher's PMIx does not answer {question!r}; {_OTHERWISE}"
                )
            answer += more
        word, _, text = answer.decode().rstrip("\n").partition(" ")
        return word, text


_of_process: Pmix | None = None
_one_at_a_time = threading.Lock()


def connect(environment: Mapping[str, str]) -> Pmix | None:
    """The line to the launcher, if it speaks PMIx and its library is found."""
    global _of_process
    with _one_at_a_time:
        if _of_process is None and "PMIX_NAMESPACE" in environment:
            line = Pmix(_libraries(environment))
            if line.found:
                _of_process = line
                atexit.register(line.leave)
        return _of_process


def _libraries(environment: Mapping[str, str]) -> list[str]:
    """The launcher's own copy first: another version may not understand its daemon."""
    folders = []
    for name in ("PMIX_PREFIX", "OPAL_PREFIX"):
        if prefix := environment.get(name):
            folders += [os.path.join(prefix, "lib", "openmpi"), os.path.join(prefix, "lib")]
    return [*(os.path.join(folder, "libpmix.so.2") for folder in folders), "libpmix.so.2"]
