"""Reads files of ``dpcore.trace`` and of torch's profiler into events, sorted by rank and kind.

Times are nanoseconds after the first event of the run, the same clock for all ranks. A file of
``dpcore.trace`` is a run; files of torch's profiler hold a rank each (``profiles`` puts them
together).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpcore.base.checked_json import Unreadable, Wrong, checking, read_json, shown
from dpcore.recorder.file import Event
from dpcore.recorder.profile_events import rank_profile
from dpcore.recorder.profile_file import is_profile, profile_of
from dpcore.recorder.profiled import facts_from
from dpcore.recorder.trace_schema import EVENT, TRACE
from dpcore.tools.collector import without_collector
from dpcore.tools.show import profiles
from dpcore.tools.show.run import RankEvents, Run, rank_events

_KINDS = ("operation", "wait", "exposed", "compute", "mark", "ready", "launch")
_WAIT = "wait for "
_BEGIN_BYTES = 1 << 20  # torch's profiler writes its own facts before the events
_SHOWN_OTHERS = 5


def read_run(path: Path, *more: Path) -> Run:
    """The run that a file, the files of its ranks, or a folder of torch's profiler has recorded."""
    runs = read_runs([path, *more])
    if len(runs) != 1:
        raise Unreadable(f"{path} holds {len(runs)} runs; name the files of one")
    return runs[0]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs that these files have recorded, of ``dpcore.trace`` or of torch's profiler. A folder
    stands for the traces in it; other JSON there is passed over."""
    runs: list[Run] = []
    of_torch: list[profiles.ProfileFile] = []
    others: list[Path] = []
    place = 0
    with without_collector():
        files = [(file, os.path.isdir(path)) for path in paths for file in _files(path)]
        places = Counter(os.path.realpath(file) for file, _ in files)
        for path, in_folder in files:
            if places[os.path.realpath(path)] > 1:
                raise Unreadable(f"{path} is named twice; name two different traces to compare")
            content = content_of(path, in_folder)
            if in_folder and not (is_profile(content) or _is_of_dpcore(content)):
                others.append(path)
            elif is_profile(content):
                if not of_torch:
                    place = len(runs)
                with checking(path):
                    profile = rank_profile(profile_of(content))
                if not profile.operations:
                    raise profiles.refuse(path)
                of_torch.append(profiles.ProfileFile(path, profile))
            else:
                with checking(path):
                    runs.append(run_of(path, content))
        runs[place:place] = profiles.runs_of(of_torch)
    if not runs:
        names = ", ".join(path.name for path in others[:_SHOWN_OTHERS])
        more = f" and {len(others) - _SHOWN_OTHERS} more" if len(others) > _SHOWN_OTHERS else ""
        raise Unreadable(
            f"{paths[0]} has no traces, of dpcore.trace or of torch.profiler; passed over: "
            f"{names}{more}"
        )
    return _with_names_of_their_own(runs)


def _files(path: Path) -> list[Path]:
    if not os.path.isdir(path):  # of any name: Path.is_dir raises for those that are too long
        return [path]
    try:
        found = sorted(p for p in path.iterdir() if p.name.endswith((".json", ".json.gz")))
    except OSError as problem:
        raise Unreadable(f"{path} can't be read: {problem.strerror}") from None
    if not found:
        raise Unreadable(f"{path} has no traces: no file in it ends with .json or .json.gz")
    return found


def _with_names_of_their_own(runs: Sequence[Run]) -> list[Run]:
    """Runs that are called alike get the names of the folders that they lie in."""
    names = [run.name for run in runs]
    result = []
    for run in runs:
        folder, above = run.path.absolute().parents[:2]
        where = above.name if folder.name == run.name else folder.name
        is_alone = names.count(run.name) == 1 or not where
        result.append(run if is_alone else replace(run, title=f"{where}-{run.name}"))
    return result


def content_of(path: Path, in_folder: bool = False) -> Any:
    """The JSON of a file. In a folder, None of what is none and does not begin as a trace."""
    try:
        return read_json(path, "a trace")
    except FileNotFoundError:
        if in_folder:  # a link to nothing
            return None
        raise Unreadable(
            f"there is no file {path}. A trace is written by `with dpcore.trace({path.name!r}):`; "
            "after an error each rank writes its own, such as "
            f"{path.stem}.rank0{path.suffix or '.json'}"
        ) from None
    except Unreadable:
        if in_folder and not _begins_as_a_trace(path):
            return None
        raise


def _begins_as_a_trace(path: Path) -> bool:
    """What a program that was killed has left may be half a trace."""
    if not os.path.isfile(path):
        return False
    with path.open("rb") as file:
        begin = file.read(_BEGIN_BYTES)
    return begin[:2] == b"\x1f\x8b" or b'"traceEvents"' in begin


def _is_of_dpcore(content: Any) -> bool:
    other = content.get("otherData") if isinstance(content, dict) else None
    return isinstance(other, dict) and other.get("program") == "dpcore"


def run_of(path: Path, content: Any) -> Run:
    """The run of a file of ``dpcore.trace`` that has this content."""
    if not _is_of_dpcore(content):
        raise Unreadable(
            f"{path} was not written by dpcore.trace nor by torch.profiler; traces of other "
            "programs can be opened with https://ui.perfetto.dev"
        )
    TRACE.check(content)
    other = content["otherData"]
    info = content.get("distributedInfo", {})
    ranks = _ranks(content["traceEvents"])
    if not ranks:
        raise Unreadable(f"{path} has no events: nothing happened in the block of this trace")
    for rank in ranks:
        rank.dropped = other.get("dropped", {}).get(str(rank.rank), 0)
        if (profiled := other.get("profiled", {}).get(str(rank.rank))) is not None:
            rank.facts = facts_from(profiled)
    return Run(
        path=path,
        world_size=info.get("world_size", len(ranks)),
        backend=info.get("backend", ""),
        version=other.get("version", ""),
        machine=other.get("machine", {}),
        transport=other.get("transport", ""),
        link=other.get("link") or "",
        error=other.get("error", ""),
        paths=other.get("paths", {}),
        schedules=other.get("schedules", {}),
        models=other.get("models", []),
        ranks=ranks,
        commit=other.get("commit", ""),
    )


def _ranks(entries: Iterable[Mapping[str, Any]]) -> list[RankEvents]:
    spans: dict[int, list[tuple[Event, int]]] = {}
    for index, entry in enumerate(entries):
        kind = entry.get("cat", "") if isinstance(entry, dict) else None
        if kind in _KINDS:
            EVENT.check(entry, ("traceEvents", index))
            event = _event(entry, kind)
            if event.operation < 0 and kind in ("ready", "launch"):
                raise Wrong(("traceEvents", index), f"has the number {event.operation}")
            spans.setdefault(entry["pid"], []).append((event, entry["tid"]))
        elif kind is None:
            raise Wrong(("traceEvents", index), f"is {shown(entry)}; it must be an object")
    return [rank_events(rank, found) for rank, found in sorted(spans.items())]


def _event(entry: Mapping[str, Any], kind: str) -> Event:
    args = entry.get("args", {})
    begin = round(entry["ts"] * 1000)
    name = entry["name"]
    return Event(
        name.removeprefix(_WAIT) if kind == "wait" else name,
        kind,
        args.get("peer", -1),
        args.get("thread", entry["tid"]),
        args.get("operation", args.get("number", 0)),
        args.get("bytes", 0),
        begin,
        begin + round(entry.get("dur", 0) * 1000),
        args.get("path", ""),
        args.get("schedule", ""),
        args.get("root", -1),
        args.get("world", 0),
        args.get("model", 0),
    )
