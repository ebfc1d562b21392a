"""A predicted step as a run: the trace that ``dpcore show`` would have read of it, and its page."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from dpcore.recorder import file as trace_file
from dpcore.recorder.file import Event, RankRecord
from dpcore.tools.show.page import write_page
from dpcore.tools.show.reading import read_run
from dpcore.tools.simulate.plan import Plan
from dpcore.tools.simulate.turns import Note


@dataclass
class Recording:
    """What ``predict`` tells: the notes of each simulated rank."""

    ranks: list[list[Note]] = field(default_factory=list)
    schedule: str = ""
    world: int = 0
    plan: Plan = field(default_factory=lambda: Plan([], [], []))

    def of_rank(self) -> list[Note]:
        """Where the next rank leaves its notes."""
        self.ranks.append([])
        return self.ranks[-1]

    def write_trace(self, path: Path) -> None:
        """As dpcore.trace would."""
        records = [
            RankRecord(rank, rank, {0: "predicted"}, 0, sorted(map(_event, notes), key=_begin))
            for rank, notes in enumerate(self.ranks)
        ]
        plan = self.plan
        model = {
            "schedule": self.schedule,
            "parameters": [f"gradient {number}" for number in range(len(plan.sizes))],
            "parameter_bytes": list(plan.sizes),
            "buckets": [
                {"gradients": list(gradients), "bytes": nbytes, "dtype": ""}
                for gradients, nbytes in zip(plan.buckets, plan.bytes, strict=True)
            ],
        }
        trace_file.write(path, records, len(records), {"transport": "predicted", "models": [model]})

    def write_page(self, path: Path) -> None:
        """As dpcore show would."""
        with tempfile.TemporaryDirectory(prefix="dpcore-") as folder:
            trace = Path(folder) / "predicted.json"
            self.write_trace(trace)
            write_page(path, [read_run(trace)])


def _event(note: Note) -> Event:
    begin_ns, end_ns = round(note.begin * 1e9), round(note.end * 1e9)
    return Event(note.name, note.kind, -1, 0, note.number, note.nbytes, begin_ns, end_ns)


def _begin(event: Event) -> int:
    return event.begin_ns
