"""The simulator repeats constants of the engine: each is what the C++ source says."""

import re
from pathlib import Path

import pytest

from dpcore.base.link import Speed
from dpcore.tools.simulate import cards, in_memory, network
from dpcore.tools.simulate.links import Links

COMM = Path(__file__).parents[2] / "csrc" / "comm"
TCP = Links.tcp(Speed(1.25e8, 50e-6))

CONSTANTS = [
    ("memory/control.h", "kSlots", network.SLOTS),
    ("operations/executor.cpp", "kMinWindow", network._LEAST_WINDOW),
    ("operations/executor.cpp", "kWindowPerChunk", network._WINDOW_PER_CHUNK),
    ("operations/executor.cpp", "kSegmentsLeft", network._SEGMENTS_LEFT),
    ("operations/path_run.h", "kSegmentBytes", in_memory.SEGMENT_BYTES),
    ("collective/geometry.h", "kSmallBytes", in_memory.SMALL_BYTES),
    ("network/tcp_flow.h", "kSegmentBytes", network._TCP_WINDOW_BYTES // 16),
    ("network/tcp_flow.h", "kSegmentBytes", 2 * TCP.segment_bytes(2)),
    ("network/tcp_flow.h", "kSegmentBytes", 4 * TCP.segment_bytes(4)),
    ("network/tcp_flow.h", "kSegmentBytes", cards.LATE_QUEUE_BYTES),
    ("network/tcp_flow.cpp", "kLeastBytes", cards.LEAST_QUEUE_BYTES),
    ("network/tcp_flow.cpp", "kEarlyPollNs", round(cards.QUEUE_SECONDS * 1e9)),
    ("network/tcp_flow.cpp", "kOvertakenShare", cards.OVERTAKEN_SHARE),
    ("network/tcp_flow.h", "kEarlyBytes", network._EARLY_BYTES),
    ("transport/tcp_transport.h", "kLeastSegmentBytes", TCP.segment_bytes(4096)),
    ("transport/mapped_transport.h", "kSegmentBytes", Links(Speed(1.25e8)).segment_bytes(4)),
]


@pytest.mark.parametrize(("file", "name", "value"), CONSTANTS)
def test_a_constant_is_the_engines(file, name, value):
    source = (COMM / file).read_text()
    [(number, shift)] = re.findall(
        rf"constexpr (?:size_t|int|double) {name} = (?:size_t\{{)?([\d.e]+)\}}?(?: << (\d+))?;",
        source,
    )
    assert float(number) * 2 ** int(shift or 0) == value


@pytest.mark.parametrize(("world", "kib"), [(2, 128), (3, 64), (4, 40), (5, 32), (4096, 32)])
def test_a_frame_is_a_share_of_half_a_segment(world, kib):
    """As Network::share_card has it, with one connection for the data of each peer."""
    source = (COMM / "network/network.cpp").read_text()
    assert "kHalfSegment = TcpFlow::kSegmentBytes / 2;" in source
    assert "kLeastShare = size_t{32} << 10;" in source
    assert TCP.frame_bytes(world) == kib << 10


def test_what_travels_with_the_word_of_entry():
    assert TCP.is_posted(65536, 2) and not TCP.is_posted(65537, 2)
    assert TCP.is_posted(16384, 3) and not TCP.is_posted(16385, 3)
