"""Where a rank that joins a running job knocks, and how one of the job's ranks answers.

A door is at a place that a joiner can know beforehand, given in the forms of ``init_method``:

``"tcp://host:port"``   one of the job's ranks on that host listens there
``"file:///path"``      the lowest rank writes there where it listens
a store of torch        the same, under a key
any other text          an abstract Unix socket of that name: ranks of this host, and of this user

The rank that has the door is its *porter*. If it dies, its connections end, the next one opens
the door, and joiners knock again. Over TCP each side proves that it knows the job's secret.

    porter    {"nonce"}
    joiner    {"nonce", "proof", "host", "facts"}: what it trains
    porter    {"refused"}: in words; or {"proof"}, and some time later {"job", "rank", "world", ...}

The last line is the invitation to the meeting of all ranks (``Communicator._grow``). A joiner that
is gone shows by the end of its connection, which it keeps until it has met the others.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dpcore.base.files import write_whole
from dpcore.comm.communicators.native import Communicator
from dpcore.comm.launch import session
from dpcore.comm.launch.rendezvous import pretended_host, read_secret, this_host
from dpcore.comm.launch.stores import is_same_user
from dpcore.errors import Mismatch, RendezvousError, Unsupported

_LONGEST_LINE = 1 << 22
_ANSWER_SECONDS = 10.0
_LOOK_SECONDS = 0.05
_TRY_SECONDS = 1.0  # where another process still has the place
_MOST = 64  # that wait
_KEY = "dpcore/door"


class Place:
    """Where the door is: what a program gives, in the forms above."""

    def __init__(self, given: Any) -> None:
        self.given = given
        self.address = ""
        if isinstance(given, str) and given.startswith("tcp://"):
            self.address = given.removeprefix("tcp://").rstrip("/")
        elif isinstance(given, str) and not given.startswith("file://"):
            self.address = f"\0dpcore-door/{os.geteuid()}/{given}"
        elif not isinstance(given, str) and not hasattr(given, "compare_set"):
            raise Unsupported(
                f"door={given!r}: expected 'tcp://host:port', 'file:///path', a name on this host, "
                "or a store of torch.distributed"
            )
        if self.address and not self.address.startswith("\0"):
            _split(self.address)

    @property
    def is_fixed(self) -> bool:
        """Whether joiners need to be told nothing."""
        return bool(self.address)

    def publish(self, address: str) -> None:
        """For joiners, in the file or store."""
        if isinstance(self.given, str):
            write_whole(self._file, json.dumps(address))
        else:
            self.given.set(_KEY, json.dumps(address))

    def take_back(self, address: str) -> None:
        """No joiner shall go there any more."""
        if not self.is_fixed and isinstance(self.given, str) and self.look() == address:
            with contextlib.suppress(OSError):
                self._file.unlink()

    @property
    def _file(self) -> Path:
        return Path(self.given.removeprefix("file://"))

    def look(self) -> str:
        """The address, or nothing as long as none is known."""
        if self.is_fixed:
            return self.address
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            if isinstance(self.given, str):
                return str(json.loads(self._file.read_text()))
            if self.given.check([_KEY]):
                return str(json.loads(self.given.get(_KEY)))
        return ""


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise Unsupported(f"door='tcp://{address}': expected tcp://host:port")
    return host.strip("[]"), int(port)


def _secret(address: str) -> bytes:
    """Over TCP, where every process of the network could knock, it is required."""
    if address.startswith("\0"):
        return b""
    if not (secret := read_secret(os.environ)):
        raise Unsupported(
            "ranks that join over TCP have to know a secret: set DPCORE_SECRET to the same random "
            "text on all ranks, or DPCORE_SECRET_FILE to a file of mode 0600 that holds it"
        )
    return secret.encode()


def _proof(secret: bytes, side: str, *nonces: str) -> str:
    return hmac.digest(secret, " ".join((side, *nonces)).encode(), "sha256").hex()


class _Line:
    """A connection that carries lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._rest = b""

    def say(self, **words: Any) -> None:
        self.connection.sendall(json.dumps(words).encode() + b"\n")

    def hear(self, seconds: float | None) -> dict[str, Any]:
        """The next line; OSError where there is none any more."""
        self.connection.settimeout(seconds)
        while b"\n" not in self._rest:
            more = self.connection.recv(1 << 16)
            if not more or len(self._rest) > _LONGEST_LINE:
                raise ConnectionError("the other side has gone")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        words = json.loads(line)
        if not isinstance(words, dict):
            raise ConnectionError("not the words of a door")
        return words

    @property
    def is_open(self) -> bool:
        """Of one that does not block."""
        try:
            return self.connection.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        self.connection.close()


class Door:
    """Of a rank of the job. ``facts``: what a joiner has to have alike, in words."""

    def __init__(self, place: Place, facts: Sequence[str]) -> None:
        self._place, self._facts = place, list(facts)
        self._listener: socket.socket | None = None
        self._secret, self._address = b"", ""
        self._tried = 0.0
        self._lock = threading.Lock()
        self._waiting: list[_Line] = []
        self._guests: list[_Line] = []  # that the ranks have been told of
        self._invited = ""
        self._members = 0

    def open(self, comm: Communicator) -> None:
        """Tries to, where this rank may; again after each change of the ranks."""
        self._members = comm.world_size
        is_network = bool(self._place.address) and not self._place.address.startswith("\0")
        if self._listener is not None or (comm.rank > 0 and not is_network):
            return
        if time.monotonic() - self._tried < _TRY_SECONDS:
            return
        self._tried = time.monotonic()
        address = self._place.address
        if not address:
            host = comm._native.address.rpartition(":")[0].strip("[]")
            name = f"\0dpcore-door/{os.geteuid()}/{secrets.token_hex(8)}"
            address = f"{host}:0" if host else name
        self._secret = _secret(address)
        try:
            self._listener = _listen(address)
        except OSError:
            return  # of another host, or of a process that has not ended yet
        if not self._place.is_fixed:
            if not address.startswith("\0"):
                port = self._listener.getsockname()[1]
                address = f"{host}:{port}"
            self._place.publish(address)
        self._address = address
        threading.Thread(
            target=self._answer_all, args=(self._listener,), name="dpcore-door", daemon=True
        ).start()

    def close(self) -> None:
        """Nobody is answered any more; those that wait see it."""
        listener, self._listener = self._listener, None
        if listener is not None:
            self._place.take_back(self._address)
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._lock:
            for line in self._waiting:
                line.close()
            self._waiting, self._guests = [], []

    # ---- between the steps -------------------------------------------------------------------

    def count(self) -> int:
        """How many wait. They are the guests of the next meeting, if the ranks agree."""
        if not self._waiting:
            return 0
        with self._lock:
            for line in self._waiting:
                if not line.is_open:
                    line.close()
            self._waiting = [line for line in self._waiting if line.connection.fileno() >= 0]
            self._guests = list(self._waiting)
        return len(self._guests)

    def invite(self, job: str, meeting: str, shares_memory: bool) -> None:
        """Tells the guests where the ranks meet, once."""
        if job == self._invited:
            return
        self._invited = job
        world = self._members + len(self._guests)
        for number, line in enumerate(self._guests):
            with contextlib.suppress(OSError):
                line.say(
                    job=job, rank=self._members + number, world=world, meeting=meeting,
                    shares_memory=shares_memory,
                )  # fmt: skip

    def are_gone(self) -> bool:
        """Whether one of the guests will not come."""
        return not all(line.is_open for line in self._guests)

    def let_in(self) -> None:
        """The meeting is over; those that did not come in knock again."""
        with self._lock:
            self._waiting = [line for line in self._waiting if line not in self._guests]
        for line in self._guests:
            line.close()
        self._guests = []

    # ---- the porter's threads ----------------------------------------------------------------

    def _answer_all(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed, or of a connection whose network has failed since
                if self._listener is not listener:
                    return
                time.sleep(_LOOK_SECONDS)
                continue
            if len(self._waiting) >= _MOST:
                connection.close()
                continue
            line = _Line(connection)
            threading.Thread(target=self._answer, args=(line,), daemon=True).start()

    def _answer(self, line: _Line) -> None:
        try:
            problem = self._problem_of(line)
            if problem:
                line.say(refused=problem)
                line.close()
                return
        except (OSError, ValueError, KeyError, TypeError):
            line.close()
            return
        line.connection.setblocking(False)  # from here on it is looked at between steps
        with self._lock:
            if self._listener is None:
                line.close()
            else:
                self._waiting.append(line)

    def _problem_of(self, line: _Line) -> str:
        ours = secrets.token_hex(16)
        line.connection.settimeout(_ANSWER_SECONDS)
        line.say(nonce=ours)
        said = line.hear(_ANSWER_SECONDS)
        theirs = str(said["nonce"])
        if line.connection.family == socket.AF_UNIX:
            if not is_same_user(line.connection):
                return "the job belongs to another user"
        elif not hmac.compare_digest(_proof(self._secret, "joiner", ours, theirs), said["proof"]):
            return "the job has another secret (DPCORE_SECRET)"
        if problem := first_difference(self._facts, said["facts"]):
            return problem
        is_host_only = self._place_is_of_host()
        if is_host_only and said["host"] != this_host():
            return "the ranks of the job share memory on one host, and this is another"
        line.say(proof=_proof(self._secret, "porter", theirs, ours))
        return ""

    def _place_is_of_host(self) -> bool:
        return self._listener is not None and self._listener.family == socket.AF_UNIX


def _listen(address: str) -> socket.socket:
    if address.startswith("\0"):
        listener = _unix_socket(socket.socket.bind, address)
        listener.listen(_MOST)
        return listener
    host, port = _split(address)
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=_MOST)


def first_difference(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """Between what the job trains and what a joiner does, in words; empty if there is none.

    >>> first_difference(["a parameter w", "SGD"], ["a parameter w", "AdamW"])
    'the job has SGD, and this rank has AdamW'
    """
    for number in range(max(len(ours), len(theirs))):
        its, own = (list_[number] if number < len(list_) else "" for list_ in (ours, theirs))
        if its != own:
            return f"the job has {its or 'no'}{'' if its else ' ' + own}" + (
                f", and this rank has {own or 'nothing there'}" if its else ", and this rank has it"
            )
    return ""


# ---- a joiner --------------------------------------------------------------------------------


class Invitation:
    """Of a porter, whose connection stays open until ``close``."""

    def __init__(self, line: _Line, words: dict[str, Any]) -> None:
        self._line = line
        self.job, self.meeting = str(words["job"]), str(words["meeting"])
        self.rank, self.world_size = int(words["rank"]), int(words["world"])
        self._shares_memory = bool(words["shares_memory"])

    def accept(self, options: dict[str, Any]) -> Communicator:
        """Meets all ranks; ``RendezvousError`` if that fails. ``options``: of ``init``."""
        from dpcore import _C

        tcp = None
        if self.meeting:
            interface = os.environ.get("DPCORE_SOCKET_IFNAME", "")
            host = pretended_host(self.rank, os.environ)
            sockets = int(os.environ.get("DPCORE_TCP_SOCKETS", "1"))
            secret = read_secret(os.environ)
            shares = self._shares_memory
            tcp = _C.TcpOptions(self.meeting, None, interface, secret, sockets, shares, host)
        return session.connect(self.job, self.rank, self.world_size, tcp=tcp, **options)

    def close(self) -> None:
        """The meeting is over."""
        self._line.close()


def knock(
    place: Place, facts: Sequence[str], patience: float, look: Callable[[], None] = lambda: None
) -> Invitation:
    """Waits until the job invites this rank: for ``patience`` seconds where nobody answers, and as
    long as it takes where a porter has let this rank wait. Raises ``Mismatch`` if it is refused."""
    deadline = time.monotonic() + patience
    while True:
        look()
        if address := place.look():
            try:
                line = _connect(address)
            except OSError:
                line = None
            if line is not None:
                try:
                    return _ask(line, address, facts)
                except (OSError, ValueError, KeyError):
                    line.close()  # the porter has gone: another rank opens the door
                except BaseException:
                    line.close()
                    raise
                deadline = max(deadline, time.monotonic() + patience)
        if time.monotonic() > deadline:
            raise RendezvousError(
                f"no job has answered at the door {place.given!r} for {patience:.3g} seconds: has "
                "it begun, with dpcore.elastic(..., door=...) on all ranks, or is it over?"
            )
        time.sleep(_LOOK_SECONDS)


def _connect(address: str) -> _Line:
    if not address.startswith("\0"):
        connection = socket.create_connection(_split(address), timeout=_ANSWER_SECONDS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        return _Line(connection)
    return _Line(_unix_socket(socket.socket.connect, address))


def _unix_socket(use: Callable[[socket.socket, str], None], address: str) -> socket.socket:
    """``use``: bind or connect."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        use(made, address)
    except OSError:
        made.close()
        raise
    return made


def _ask(line: _Line, address: str, facts: Sequence[str]) -> Invitation:
    secret, ours = _secret(address), secrets.token_hex(16)
    theirs = str(line.hear(_ANSWER_SECONDS)["nonce"])
    proof = _proof(secret, "joiner", theirs, ours)
    line.say(nonce=ours, proof=proof, host=this_host(), facts=list(facts))
    answer = line.hear(_ANSWER_SECONDS)
    if refused := answer.get("refused"):
        raise Mismatch(f"the job does not take this rank in: {refused}")
    if not hmac.compare_digest(_proof(secret, "porter", ours, theirs), str(answer["proof"])):
        raise Mismatch("what answers at the door does not know the job's secret (DPCORE_SECRET)")
    return Invitation(line, line.hear(None))
