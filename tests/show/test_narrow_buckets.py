"""Buckets that travel in a narrower type: launches tell the gradients' bytes, operations those that
travel."""

from types import SimpleNamespace

import pytest

from dpcore.recorder.file import Event
from dpcore.tools.show.buckets import bucket_spans
from dpcore.tools.show.run import RankEvents

GRADIENTS = 1000
PADDED = 1024  # bytes more, by which gradients are aligned


def event(name, kind, number, nbytes, begin):
    return Event(name, kind, -1, 0, number, nbytes, begin, begin + 10)


@pytest.mark.parametrize("narrower", [1, 2, 4])
def test_a_launch_is_tied_to_the_operation_that_carries_it(narrower):
    sent = 4_000_000
    rank = RankEvents(0)
    rank.launches = [event("bucket launch", "launch", 0, sent, 100)]
    rank.operations = [
        event("all_reduce", "operation", 7, 4, 90),
        event("all_reduce", "operation", 8, 12, 105),  # of the program
        event("all_reduce", "operation", 9, (sent + PADDED) // narrower, 110),
    ]
    (span,) = bucket_spans(SimpleNamespace(models=()), rank)
    assert (span.operation, span.end_ns) == (9, 120)
