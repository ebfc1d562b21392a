"""Traces of local updates, as dpcore.trace writes them, of which every millisecond is known."""

from dpcore.recorder import file as trace_file
from dpcore.recorder.file import LOCAL_STEP, Event, RankRecord

MS = 1_000_000


def model(**options):
    updates = {"sync_every": 4, "fragments": 1, "delay": 0, "bits": 32}
    return {
        "number": 1, "name": "model 1", "schedule": "local updates",
        "local_updates": updates | options,
        "parameters": ["a", "b"], "parameter_bytes": [750_000, 500_000],
        "buckets": [{"gradients": [0, 1], "bytes": 1_250_000, "dtype": "torch.float32"}],
    }  # fmt: skip


def written(path, intervals=3, computing=(10, 10), outer=2, wire=20, link="", **options):
    """Steps compute so many milliseconds. The last of an interval sends, waits for ``wire``
    milliseconds, and computes ``outer`` more."""
    described = model(**options)
    every = described["local_updates"]["sync_every"]
    events = [[] for _ in computing]
    now = [0] * len(computing)
    for step in range(1, intervals * every + 1):
        begins = list(now)
        now = [t + ms * MS for t, ms in zip(now, computing, strict=True)]
        if step % every == 0:
            entered, ended = max(now), max(now) + wire * MS
            for rank, begin in enumerate(now):
                sent = Event("all_reduce", "operation", -1, 7, step, 1_250_000, begin, ended)
                late = Event("every rank to enter", "wait", -1, 7, step, 0, begin, entered)
                exposed = sent._replace(kind="exposed", bytes=0)
                events[rank] += [sent, exposed, *[late] * (entered > begin)]
                now[rank] = ended + outer * MS
        for rank, (begin, end) in enumerate(zip(begins, now, strict=True)):
            events[rank].append(Event(LOCAL_STEP, "compute", -1, 7, 0, 0, begin, end, model=1))
    records = [
        RankRecord(rank, rank, {7: "main"}, 0, sorted(own, key=lambda e: e.begin_ns))
        for rank, own in enumerate(events)
    ]
    facts = {"transport": "tcp", "link": link, "models": [described]}
    trace_file.write(path, records, len(records), facts)
    return path
