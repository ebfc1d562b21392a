"""Whatever strangers say to a rank that waits for the others: refused, with a reason where they
spoke the language, and the ranks meet. The bytes are hypothesis'."""

import contextlib
import socket
import struct
import threading
import uuid

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpcore import _C, RendezvousError
from dpcore.comm.launch import session

pytestmark = pytest.mark.patient

SECRET = "right"
GREETING = struct.Struct("<QIIIIiiiiiI32s32s64s")
CHALLENGE = struct.Struct("<QII32s32s256s")
VERDICT = struct.Struct("<I256s")


class Rendezvous:
    """Rank 0 of two waits; the second comes when the strangers are done."""

    def __init__(self):
        self.job = f"handshake-{uuid.uuid4().hex}"
        self.listener = _C.TcpListener.at("127.0.0.1:0")
        self.address = self.listener.address
        self.results = {}
        self.truth = genuine_greeting(self.job)
        self.first = threading.Thread(target=self.rank, args=(0,), daemon=True)
        self.first.start()

    def rank(self, rank):
        listener = self.listener if rank == 0 else None
        tcp = _C.TcpOptions(self.address, listener, "", SECRET, 1)
        comm = session.connect(self.job, rank, 2, timeout=120, transport="inproc", tcp=tcp)
        tensor = torch.full((50_000,), rank + 1.0)
        comm.all_reduce(tensor)
        self.results[rank] = tensor.unique().tolist()
        comm.close()

    def say(self, *words):
        """One connection; what was answered to each word, until the other side hung up."""
        host, port = self.address.split(":")
        answers = []
        with socket.create_connection((host, int(port)), timeout=10) as line:
            for word, expected in words:
                with contextlib.suppress(OSError):
                    line.sendall(word)
                    if len(word) < expected:
                        line.shutdown(socket.SHUT_WR)
                answer = b""
                with contextlib.suppress(ConnectionError):
                    while more := line.recv(4096):
                        answer += more
                        if len(answer) in (CHALLENGE.size, VERDICT.size):
                            break
                answers.append(answer)
        return answers

    def end(self):
        second = threading.Thread(target=self.rank, args=(1,), daemon=True)
        second.start()
        for thread in (self.first, second):
            thread.join(60)
        assert self.results == {0: [3.0], 1: [3.0]}


def genuine_greeting(job):
    """The fields of what rank 1 says to whom it takes for rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def come():
            tcp = _C.TcpOptions(address, None, "", SECRET, 1)
            with contextlib.suppress(RendezvousError):
                session.connect(job, 1, 2, timeout=0.2, transport="inproc", tcp=tcp)

        rank = threading.Thread(target=come, daemon=True)
        rank.start()
        with server.accept()[0] as line:
            said = line.recv(GREETING.size, socket.MSG_WAITALL)
    rank.join(30)
    return GREETING.unpack(said)


@pytest.fixture(scope="module")
def rendezvous():
    made = Rendezvous()
    yield made
    made.end()  # the ranks that belong here still meet


fuzzed = settings(
    max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
SIGNED = range(5, 10)  # world, rank, line, lines, process
words = st.integers(0, 2**32 - 1)
numbers = st.integers(-(2**31), 2**31 - 1)


@fuzzed
@given(said=st.binary(max_size=2 * GREETING.size))
def test_bytes_that_are_no_greeting_get_no_answer(rendezvous, said):
    assert rendezvous.say((said, GREETING.size)) == [b""]


@st.composite
def greetings(draw, truth):
    """Right in most fields, so that every check is reached."""
    fields = list(truth)
    for at in draw(st.sets(st.integers(1, len(fields) - 1), max_size=2)):
        if isinstance(fields[at], bytes):
            fields[at] = draw(st.binary(max_size=len(fields[at])))
        else:
            fields[at] = draw(numbers if at in SIGNED else words)
    return GREETING.pack(*fields)


@fuzzed
@given(data=st.data(), proof=st.binary(min_size=32, max_size=32))
def test_greetings_of_strangers_are_refused_with_a_reason(rendezvous, data, proof):
    greeting = data.draw(greetings(rendezvous.truth))
    challenge, *verdict = rendezvous.say((greeting, GREETING.size), (proof, 32))
    magic, refused, _, _, _, reason = CHALLENGE.unpack(challenge)
    assert magic == rendezvous.truth[0]
    if refused:
        assert reason.rstrip(b"\0").decode()
    else:  # it looked right: then the secret decides
        accepted, reason = VERDICT.unpack(verdict[0])
        assert not accepted and b"does not know the secret of this job" in reason
