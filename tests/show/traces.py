"""Trace files whose numbers are known: written by hand, without ranks."""

from __future__ import annotations

from dpcore import reference
from dpcore.recorder import file as trace_file
from dpcore.recorder.file import Event, RankRecord
from dpcore.tools.show import read_run, write_page

MS = 1_000_000
RING = "00000000000000aa"  # the number of its list of moves


def span(name, kind, begin_ms, end_ms, operation=0, nbytes=0, peer=-1):
    return Event(name, kind, peer, 1, operation, nbytes, round(begin_ms * MS), round(end_ms * MS))


def ran_by_turns(bucket, world):
    """What the operations of a file ran: the first bucket a ring, the second one a two-shot, ..."""
    if bucket % 2:
        return {"path": "two_shot/stage", "world": world}
    return {"path": "ring/moves", "world": world, "schedule": RING}


def says_nothing(bucket, world):
    """An earlier file: its operations don't say what they ran."""
    return {}


def step_events(begin, number, buckets=2, late=0.0, world=2, ran=ran_by_turns, jitter=None):
    """A step of 20 ms: forward 6, backward 8, exposed 4; a bucket is sent every 8 / buckets ms, the
    last one at the end of backward, and each is 5 ms on its way. ``jitter``: how much later each
    bucket is ready and complete, asked for each."""
    later = jitter or (lambda: 0.0)
    events = [
        span("forward", "compute", begin, begin + 6, number),
        span("backward", "compute", begin + 6, begin + 14, number),
    ]
    for bucket in range(buckets):
        ready = begin + 6 + 8 * (bucket + 1) / buckets + later()
        end = min(ready + 5 + later(), begin + 18)
        operation = number * buckets + bucket
        nbytes = 1024 * (bucket + 1)
        for gradient in (2 * bucket, 2 * bucket + 1):
            at = ready - (1 - gradient % 2) * 4 / buckets
            events.append(span("gradient ready", "ready", at, at, gradient, nbytes // 2))
        events.append(span("bucket launch", "launch", ready, ready, bucket, nbytes))
        carrier = span("all_reduce", "operation", ready, end, operation, nbytes)
        events.append(carrier._replace(**ran(bucket, world)))
        events.append(span("a message", "wait", ready + 0.5, end - 0.5, operation, nbytes, peer=1))
    events.append(span("all_reduce", "exposed", begin + 14 + late, begin + 18, 0, 1024))
    return sorted(events, key=lambda event: event.begin_ns)


def page_of(folder, *paths):
    """The page of these trace files."""
    page = folder / "page.html"
    write_page(page, [read_run(path) for path in paths])
    return page


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


def write_trace(
    path, ranks=2, steps=3, buckets=2, late=0.0, ran=ran_by_turns, jitter=None, ahead=0.0, **facts
):
    """Writes a trace. ``late``: how much later rank 1 begins to wait. ``ran``: what operations say
    that they ran, by bucket. ``ahead``: how much earlier than the others rank 1 begins."""
    ring = trace_file.describe(reference.make_schedule("ring", "all_reduce", ranks))
    records = []
    for rank in range(ranks):
        events = [
            event
            for step in range(steps)
            for event in step_events(
                20.0 * step + (ahead if rank != 1 else 0.0),
                step,
                buckets,
                late if rank == 1 else 0.0,
                ranks,
                ran,
                jitter,
            )
        ]
        records.append(RankRecord(rank, 100 + rank, {1: "main"}, 0, events, {RING: ring}))
    known = {"transport": "tcp", "models": [model_of(buckets)]}
    trace_file.write(path, records, ranks, known | facts)
    return path
