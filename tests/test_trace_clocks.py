"""Times of several ranks in one trace file."""

import pickle
import time
from copy import deepcopy

from dpcore.recorder.file import Event, RankRecord, chrome_trace, joined


def test_a_rank_without_events_moves_nobody():
    """It ended before its first collective. The file begins with the other one's first event."""
    record = RankRecord(0, 1, {7: "main"}, 0, [event_at(time.monotonic_ns())])
    parts = [
        chrome_trace([one], 2, {"models": []}) for one in (record, RankRecord(1, 1, {}, 0, []))
    ]
    for first, second in (parts, parts[::-1]):
        content = joined(deepcopy([first, second]))
        times = [event["ts"] for event in content["traceEvents"] if event["ph"] != "M"]
        assert max(times) < 60e6  # us


def test_ranks_of_two_hosts_are_on_one_clock():
    """That have been up for different times; the same moment has two monotonic times."""
    here, there = 10 * 10**9, 86_400 * 10**9
    records = [
        RankRecord(0, 1, {7: "main"}, 0, [event_at(here)], {}, unix_minus_monotonic=there),
        RankRecord(1, 1, {7: "main"}, 0, [event_at(there)], {}, unix_minus_monotonic=here),
    ]
    received = pickle.loads(pickle.dumps(records))
    assert received == records
    content = chrome_trace(received, 2, {})
    events = [entry for entry in content["traceEvents"] if entry["ph"] != "M"]
    assert [(entry["pid"], entry["ts"]) for entry in events] == [(0, 0.0), (1, 0.0)]
    assert content["baseTimeNanoseconds"] == here + there


def event_at(moment):
    return Event("step", "compute", -1, 7, 0, 0, moment, moment + 1000)
