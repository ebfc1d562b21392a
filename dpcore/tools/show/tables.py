"""The figures of a run as tables: the page and the terminal show the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpcore.base.markup import short
from dpcore.tools.show.buckets import PHASES, bucket_spans, model_name, parameters_of
from dpcore.tools.show.figures import RunFigures
from dpcore.tools.show.run import Run

_MOST_ROWS = 40


@dataclass(frozen=True)
class Table:
    """Rows of numbers as texts; ``texts`` are the columns that hold words."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    @property
    def texts(self) -> list[int]:
        """The first column, and lists of names."""
        words = ("path", "parameters", "operations")
        return [i for i, name in enumerate(self.columns) if i == 0 or name in words]


def tables_of(run: Run, figures: RunFigures) -> list[Table]:
    """Ranks, passes of a pipeline, spans of the program, turns of a ring, operations, waits and,
    where a model was traced, buckets."""
    tables = [_ranks(figures), _passes(figures), _spans(figures), _turns(figures)]
    tables += [_operations(figures), _waits(figures), _buckets(run)]
    return [table for table in tables if table.rows]


def print_tables(console: Any, run: Run, figures: RunFigures) -> None:
    """Prints them on a console of rich."""
    from rich.markup import escape
    from rich.table import Table as Drawn

    for table in tables_of(run, figures):
        drawn = Drawn(title=table.title, title_justify="left", title_style="bold", box=None)
        for number, column in enumerate(table.columns):
            drawn.add_column(column, justify="left" if number in table.texts else "right")
        for row in table.rows:
            drawn.add_row(*map(escape, row))  # names of the program
        console.print(drawn)
        console.print()


def _ranks(figures: RunFigures) -> Table:
    columns = ["rank", "step ms", "forward ms", "backward ms"]
    columns += ["communication ms", "exposed ms", "overlap"]
    rows = [
        [
            f"rank {rank.rank}",
            _shown(rank.step_ms),
            _shown(rank.forward_ms),
            _shown(rank.backward_ms),
            short(rank.communication_ms),
            short(rank.exposed_ms),
            "–" if rank.overlap is None else f"{rank.overlap:.0%}",
        ]
        for rank in figures.ranks
    ]
    return Table("Ranks, over the whole trace; steps are medians", columns, rows)


def _passes(figures: RunFigures) -> Table:
    columns = ["rank", "stages", "forward ms", "backward ms", "bubble", "micro-batches kept"]
    pipeline = figures.pipeline
    if pipeline is None:
        return Table("", columns, [])
    rows = [
        [
            f"rank {rank.rank}",
            ", ".join(map(str, rank.stages)),
            short(rank.forward_ms),
            short(rank.backward_ms),
            f"{rank.bubble:.1%}",
            str(rank.live),
        ]
        for rank in pipeline.ranks
    ]
    return Table(f"Pipeline: {pipeline.headline}; medians of a pass and of a step", columns, rows)


def _spans(figures: RunFigures) -> Table:
    columns = ["span", "times", "ms", "communication ms", "exposed ms", "of its time", "MiB"]
    rows = [
        [
            span.name,
            str(span.count),
            short(span.ms),
            short(span.communication_ms),
            short(span.exposed_ms),
            f"{span.exposed_share:.0%}",
            short(span.bytes / 2**20),
            ", ".join(f"{name} {count / span.count:g}" for name, count in span.operations.items()),
        ]
        for span in figures.spans[:_MOST_ROWS]
    ]
    title = "Layers and other spans that communicate, means of one of them"
    return Table(title, [*columns, "operations"], rows)


def _turns(figures: RunFigures) -> Table:
    columns = ["turn of the ring", "times", "block ms", "shift ms", "on the link ms"]
    rows = [
        [
            turn.name,
            str(turn.count),
            short(turn.block_ms) if turn.block_ms else "–",
            short(turn.shift_ms) if turn.shift_ms else "–",
            _shown(turn.link_ms),
            short(turn.exposed_ms) if turn.shift_ms else "–",
            "–" if turn.hidden is None else f"{turn.hidden:.0%}",
        ]
        for turn in figures.ring
    ]
    title = "Ring attention: what of each shift is hidden under its block, means"
    return Table(title, [*columns, "exposed ms", "hidden"], rows)


def _operations(figures: RunFigures) -> Table:
    columns = ["operation", "count", "MiB", "in flight ms", "exposed ms", "path"]
    rows = [
        [
            line.name,
            str(line.count),
            short(line.bytes / 2**20) if line.bytes else "–",
            short(line.in_flight_ms),
            short(line.exposed_ms),
            ", ".join(f"{path} {count}" for path, count in line.paths.items()) or "–",
        ]
        for line in figures.operations
    ]
    return Table("Operations, of all ranks", columns, rows)


def _waits(figures: RunFigures) -> Table:
    columns = ["operations stood still for", "times", "total ms", "longest ms"]
    rows = [
        [line.name, str(line.count), short(line.total_ms), short(line.longest_ms)]
        for line in figures.waits[:_MOST_ROWS]
    ]
    return Table("Waits, of all ranks", columns, rows)


def _buckets(run: Run) -> Table:
    """Means over the steps of the first rank. Each phase of a bucket and a bucket of an older plan
    have lines of their own."""
    by_bucket: dict[tuple[int, int, int, int, str], list[tuple[float, ...]]] = {}
    for span in bucket_spans(run, run.ranks[0]):
        times = (
            span.last_ready_ns - span.first_ready_ns,
            span.launch_ns - span.last_ready_ns,
            span.end_ns - span.launch_ns,
            span.exposed_ns,
        )
        order = PHASES.index(span.phase) if span.phase else 0
        by_bucket.setdefault((span.model, span.bucket, span.bytes, order, span.phase), []).append(
            times
        )
    rows = [
        [
            " ".join(filter(None, (str(bucket), phase, name and f"of {name}"))),
            short(nbytes / 2**20) if nbytes else "–",
            str(len(times)),
            *(short(_mean(column) * 1e-6) for column in zip(*times, strict=True)),
            parameters_of(run, bucket, nbytes, model) or "–",
        ]
        for (model, bucket, nbytes, _, phase), times in sorted(by_bucket.items())[:_MOST_ROWS]
        for name in [model_name(run, model)]
    ]
    columns = ["bucket", "MiB", "times", "filling ms", "not sent ms", "in flight ms"]
    columns += ["exposed ms", "parameters"]
    return Table(f"Buckets of rank {run.ranks[0].rank}, means", columns, rows)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _shown(value: float | None) -> str:
    return "–" if value is None else short(value)
