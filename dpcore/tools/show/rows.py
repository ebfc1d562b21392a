"""``dpcore show --csv``: a row per run, step, rank and bucket, for spreadsheets and data frames."""

from __future__ import annotations

import bisect
import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpcore.base.files import write_whole
from dpcore.recorder.intervals import union_of
from dpcore.reference.launches import UNLIMITED, caps_of
from dpcore.tools.show.buckets import (
    BucketSpan,
    averaging_spans,
    bucket_spans,
    described_model,
    model_name,
    parameters_of,
)
from dpcore.tools.show.figures import steps_of
from dpcore.tools.show.run import RankEvents, Run

# Name and meaning of each column, for the file, --help and the documentation.
COLUMNS = {
    "run": "name of the run",
    "step": "number of the step in the trace, from 1; empty before the first",
    "rank": "rank",
    "bucket": "number of the bucket, or of the fragment, in the step; 0 is sent first",
    "model": "name of the model, where the run has several",
    "bytes": "size of the bucket; empty where the trace does not say",
    "schedule": "launch schedule of the model",
    "cap_mb": "bucket cap in MiB that applied to this bucket; empty for none",
    "link": "words of an emulated link, empty for the real one",
    "transport": "what carried the bytes: shm, tcp, gloo, nccl, ...",
    "world": "number of ranks",
    "commit": "commit of the program that was traced, where it ran in a git working tree",
    "begin_ms": "from the beginning of the step to the bucket's first gradient",
    "filling_ms": "from its first gradient to its last",
    "not_sent_ms": "from its last gradient to its launch",
    "in_flight_ms": "from its launch to its completion",
    "exposed_ms": "time the program waited while this bucket was the first one in flight",
    "step_ms": "length of the step",
    "step_exposed_ms": "exposed time of the whole step",
    "parameters": "the first parameters in the bucket",
    "phase": "reduce_scatter or all_gather, where a bucket has several phases",
}


def write_csv(path: Path, runs: Sequence[Run]) -> None:
    """Writes one file with the rows of all runs."""
    write_whole(path, csv_text(runs))


def csv_text(runs: Sequence[Run]) -> str:
    """The names of the columns, and the rows of all runs."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(row for run in runs for row in rows_of(run))
    return text.getvalue()


def rows_of(run: Run) -> Iterator[dict[str, Any]]:
    """The rows of a run, in order of rank and time."""
    for rank in run.ranks:
        yield from _of_rank(run, rank)


def _of_rank(run: Run, rank: RankEvents) -> Iterator[dict[str, Any]]:
    steps = steps_of(rank)
    begins = [begin for begin, _ in steps]
    exposed = union_of(rank.exposed)
    for span in bucket_spans(run, rank) or averaging_spans(run, rank):
        at = bisect.bisect_right(begins, span.launch_ns) - 1
        step = steps[at] if at >= 0 else None
        described = described_model(run, span.model) or {}
        yield {
            "run": run.name,
            "step": at + 1 if step else "",
            "rank": rank.rank,
            "bucket": span.bucket,
            "model": model_name(run, span.model),
            "bytes": span.bytes or "",
            "schedule": described.get("schedule", ""),
            "cap_mb": _cap(described, span),
            "link": run.link,
            "transport": run.transport or run.backend,
            "world": run.world_size,
            "commit": run.commit,
            "begin_ms": _ms(span.first_ready_ns - step[0]) if step else "",
            "filling_ms": _ms(span.last_ready_ns - span.first_ready_ns),
            "not_sent_ms": _ms(span.launch_ns - span.last_ready_ns),
            "in_flight_ms": _ms(span.end_ns - span.launch_ns),
            "exposed_ms": _ms(span.exposed_ns),
            "step_ms": _ms(step[1] - step[0]) if step else "",
            "step_exposed_ms": _ms(exposed.between(*step)) if step else "",
            "parameters": parameters_of(run, span.bucket, span.bytes, span.model),
            "phase": span.phase,
        }


def _cap(described: Mapping[str, Any], span: BucketSpan) -> str | float:
    caps = caps_of(described.get("schedule", ""), described.get("bucket_caps") or ())
    cap = caps[min(span.bucket, len(caps) - 1)] if caps else UNLIMITED
    return "" if cap == UNLIMITED else round(cap / 2**20, 6)


def _ms(ns: int) -> float:
    return round(ns * 1e-6, 6)
