"""Trace files whose numbers are known: written by hand, without ranks."""

from __future__ import annotations

from dpcore import trace_file
from dpcore.trace_file import Event, RankRecord

MS = 1_000_000


def span(name, kind, begin_ms, end_ms, operation=0, nbytes=0, peer=-1):
    return Event(name, kind, peer, 1, operation, nbytes, round(begin_ms * MS), round(end_ms * MS))


def step_events(begin, number, buckets=2, late=0.0):
    """A step of 20 ms: forward 6, backward 8, exposed 4; a bucket is sent every 8 / buckets ms, the
    last one at the end of backward, and each is 5 ms on its way."""
    events = [
        span("forward", "compute", begin, begin + 6, number),
        span("backward", "compute", begin + 6, begin + 14, number),
    ]
    for bucket in range(buckets):
        ready = begin + 6 + 8 * (bucket + 1) / buckets
        end = min(ready + 5, begin + 18)
        operation = number * buckets + bucket
        nbytes = 1024 * (bucket + 1)
        for gradient in (2 * bucket, 2 * bucket + 1):
            at = ready - (1 - gradient % 2) * 4 / buckets
            events.append(span("gradient ready", "ready", at, at, gradient, nbytes // 2))
        events.append(span("bucket launch", "launch", ready, ready, bucket, nbytes))
        events.append(span("all_reduce", "operation", ready, end, operation, nbytes))
        events.append(span("a message", "wait", ready + 0.5, end - 0.5, operation, nbytes, peer=1))
    events.append(span("all_reduce", "exposed", begin + 14 + late, begin + 18, 0, 1024))
    return sorted(events, key=lambda event: event.begin_ns)


def model_of(buckets):
    return {
        "schedule": "bucketed",
        "parameters": [
            f"layer{n // 2}.{'bias' if n % 2 else 'weight'}" for n in range(2 * buckets)
        ],
        "parameter_bytes": [512 * (n // 2 + 1) for n in range(2 * buckets)],
        "buckets": [
            {"gradients": [2 * b, 2 * b + 1], "bytes": 1024 * (b + 1), "dtype": "Float"}
            for b in range(buckets)
        ],
    }


def write_trace(path, ranks=2, steps=3, buckets=2, late=0.0, **facts):
    """Writes a trace. ``late``: how much later rank 1 begins to wait."""
    records = []
    for rank in range(ranks):
        events = [
            event
            for step in range(steps)
            for event in step_events(20.0 * step, step, buckets, late if rank == 1 else 0.0)
        ]
        records.append(RankRecord(rank, 100 + rank, {1: "main"}, 0, events))
    count = steps * buckets
    known = {"transport": "tcp", "paths": {"all_reduce": {"moves": count}}}
    trace_file.write(path, records, ranks, known | {"models": [model_of(buckets)]} | facts)
    return path
