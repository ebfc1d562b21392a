"""Streams that hypothesis makes, read by the core as control frames of a peer, under ASan.

A parser of a few lines says what has to be delivered: every whole frame up to the first that is
none, and nothing of what follows it.
"""

import itertools
import os
import struct
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cpp.programs import built

FULL = os.environ.get("DPCORE_TEST_FULL") == "1"

HEADER = struct.Struct(
    "<IB3xII6Q"
)  # magic, kind, bytes, -, group, operation, part, total, -, offset
MAGIC, GROUP = 0x6D667064, 7  # the group that the program has
DATA, POST, FINISHED, FAILED, LEFT, ALIVE = range(1, 7)
MOST_POSTED, STAGE = 64 << 10, 512 << 10


pytestmark = pytest.mark.timeout(1800)  # the first builds the program


class Reader:
    """The program, which reads one stream after the other."""

    def __init__(self):
        self.process = subprocess.Popen(
            [built("asan/frames"), "streams"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.post_bytes, self.failed_bytes = map(int, self.process.stdout.readline().split())

    def read(self, pieces):
        """What was delivered, as (operation, bytes, sum), and why the connection was given up."""
        words = [struct.pack("<I", len(pieces))]
        words += [struct.pack("<I", len(piece)) + piece for piece in pieces]
        self.process.stdin.write(b"".join(words))
        self.process.stdin.flush()
        line = self.process.stdout.readline().decode()
        assert line, self.process.stderr.read().decode()[-6000:]
        delivered, _, problem = line.partition("|")
        return [tuple(map(int, one.split(":"))) for one in delivered.split()], problem.strip()

    def end(self):
        self.process.stdin.close()
        errors = self.process.stderr.read().decode()
        assert self.process.wait(60) == 0, errors[-6000:]


@pytest.fixture(scope="module")
def reader():
    program = Reader()
    yield program
    program.end()


def sum_of(payload):
    total = 0
    for byte in payload:
        total = (total * 31 + byte) % 2**64
    return total


def expected(stream, reader):
    """The same as Reader.read() by the rules of csrc/comm/network/tcp_frame.h."""
    delivered, at = [], 0
    while len(stream) - at >= HEADER.size:
        magic, kind, size, _, group, operation, _, _, _, offset = HEADER.unpack_from(stream, at)
        fits = {
            POST: reader.post_bytes <= size <= reader.post_bytes + MOST_POSTED
            and offset <= STAGE - MOST_POSTED,
            FAILED: size == reader.failed_bytes,
        }.get(kind, kind in (FINISHED, LEFT, ALIVE) and size == 0)
        if magic != MAGIC or not fits:
            return delivered, "it sent something that is not a frame"
        payload = stream[at + HEADER.size : at + HEADER.size + size]
        if len(payload) < size:
            break
        if group == GROUP:
            delivered.append((operation, size, sum_of(payload)))
        at += HEADER.size + size
    return delivered, "its connection was closed"


@st.composite
def frames(draw):
    """Kind, operation, group (the program's or another) and length of the data in a post."""
    kind = draw(st.sampled_from([POST, FINISHED, FAILED, LEFT, ALIVE]))
    group = draw(st.sampled_from([GROUP, GROUP, 8]))
    return kind, draw(st.integers(0, 2**64 - 1)), group, draw(st.integers(0, MOST_POSTED))


def bytes_of(frame, spoiled, reader):
    kind, operation, group, posted = frame
    size = {POST: reader.post_bytes + posted, FAILED: reader.failed_bytes}.get(kind, 0)
    words = bytearray(HEADER.pack(MAGIC, kind, size, 0, group, operation, 0, 0, 0, 0))
    if spoiled:
        place, bits = spoiled
        words[place] ^= bits
    pattern = operation.to_bytes(8, "little")
    return bytes(words) + (pattern * (size // 8 + 1))[:size]


one_byte_of_the_header = st.tuples(st.integers(0, HEADER.size - 1), st.integers(1, 255))


@settings(
    max_examples=2000 if FULL else 150,
    deadline=None,
    derandomize=not FULL,
    suppress_health_check=list(HealthCheck),
)
@given(
    wanted=st.lists(st.tuples(frames(), st.none() | one_byte_of_the_header), max_size=6),
    tail=st.binary(max_size=200),
    cuts=st.lists(st.integers(0, 1 << 16), max_size=8),
)
def test_streams_of_frames(reader, wanted, tail, cuts):
    stream = b"".join(bytes_of(frame, spoiled, reader) for frame, spoiled in wanted) + tail
    places = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    pieces = [stream[a:b] for a, b in itertools.pairwise(places)]
    delivered, problem = reader.read(pieces)
    wanted_delivery, wanted_problem = expected(stream, reader)
    assert delivered == wanted_delivery
    # A peer that hangs up on unread bytes resets the connection.
    assert problem == wanted_problem or problem.startswith("its connection broke")
