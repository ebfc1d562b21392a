"""Files of torch's profiler, one per rank, as runs.

The files of one folder are the ranks of one run. Where a rank has several (the profiler's schedule
repeats, or the folder holds two runs), files that were recorded at the same time belong together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dpcore.base.checked_json import Unreadable
from dpcore.recorder.file import assign_lanes
from dpcore.recorder.profile_clocks import align, wait_for_the_last
from dpcore.recorder.profile_events import RankProfile, described
from dpcore.tools.show.run import RankEvents, Run, rank_events

_ENDING = re.compile(r"(\.pt)?(\.trace)?\.json(\.gz)?$")
_RANK_IN_NAME = re.compile(r"rank[-_. ]?(\d+)", re.IGNORECASE)
_BLIND = "exposed time is not known, since calls of torch.distributed were not recorded"


@dataclass(frozen=True)
class ProfileFile:
    path: Path
    profile: RankProfile


def runs_of(files: Sequence[ProfileFile]) -> list[Run]:
    """The runs that these files are the ranks of."""
    folders: dict[Path, list[ProfileFile]] = {}
    for file in files:
        folders.setdefault(file.path.absolute().parent, []).append(file)
    runs = []
    for in_folder in folders.values():
        groups = list(_together(_with_ranks(in_folder)))
        for number, group in enumerate(groups, 1):
            run = _run_of(group)
            runs.append(run if len(groups) == 1 else replace(run, title=f"{run.name}-{number}"))
    return runs


def _with_ranks(files: Sequence[ProfileFile]) -> list[ProfileFile]:
    """A file that does not say its rank has it in its name, or else gets one that is free."""
    known = {file.profile.rank for file in files if file.profile.rank >= 0}
    result = []
    for file in sorted(files, key=lambda file: file.path.name):
        rank = file.profile.rank
        if rank < 0:
            told = _RANK_IN_NAME.search(file.path.name)
            rank = int(told[1]) if told else next(n for n in range(len(files)) if n not in known)
            known.add(rank)
        result.append(replace(file, profile=replace(file.profile, rank=rank)))
    return result


def _together(files: Sequence[ProfileFile]) -> Iterator[list[ProfileFile]]:
    if len({file.profile.rank for file in files}) == len(files):
        yield list(files)
        return
    groups: list[list[ProfileFile]] = []
    for file in sorted(files, key=lambda file: file.profile.span_ns):
        begin, end = file.profile.span_ns
        for group in groups:
            others = [other.profile for other in group]
            meets = any(o.span_ns[0] <= end and begin <= o.span_ns[1] for o in others)
            if meets and all(o.rank != file.profile.rank for o in others):
                group.append(file)
                break
        else:
            groups.append([file])
    yield from groups


def _run_of(files: Sequence[ProfileFile]) -> Run:
    ordered = sorted(files, key=lambda file: file.profile.rank)
    ranks = [file.profile for file in ordered]
    clocks = align(ranks)
    moved = [rank.moved(shift) for rank, shift in zip(ranks, clocks.shifts, strict=True)]
    first = min(rank.span_ns[0] for rank in moved)
    moved = [rank.moved(-first) for rank in moved]
    world = max([len(ranks), *(rank.world_size for rank in ranks)])
    if len(ranks) == world:
        moved = wait_for_the_last(moved)
    models = max(moved, key=lambda rank: len(rank.layouts))
    library = next((rank.library for rank in moved if rank.library), "torch")
    hosts = sorted({rank.host for rank in ranks if rank.host})
    missing = f"only {len(ranks)} of {world} ranks" if len(ranks) < world else ""
    blind = "" if all(rank.knows_calls for rank in ranks) else _BLIND
    on = f"{', '.join(hosts[:3])}{' ...' if len(hosts) > 3 else ''}"
    return Run(
        path=ordered[0].path,
        world_size=world,
        backend=library,
        version="",
        machine={},
        transport=library,
        link="",
        error="",
        paths={},
        schedules={},
        models=described(models.layouts, models.gradients),
        ranks=[_rank(rank) for rank in moved],
        title=_title([file.path for file in ordered]),
        about=", ".join(filter(None, ["torch.profiler", on, missing, blind, clocks.sentence])),
    )


def _rank(profile: RankProfile) -> RankEvents:
    lanes = assign_lanes(profile.events)
    pairs = [(event, lanes.get(index, 0)) for index, event in enumerate(profile.events)]
    events = rank_events(profile.rank, pairs)
    events.steps = [(step.begin_ns, step.end_ns) for step in profile.steps]
    events.host, events.facts = profile.host, profile.facts
    return events


def _title(paths: Sequence[Path]) -> str:
    """What files of several ranks have in common, or the folder's name."""
    names = [_ENDING.sub("", path.name) for path in paths]
    folder = paths[0].absolute().parent.name
    if len(names) == 1:
        return names[0]
    common = re.sub(r"[-_. ]*(rank)?[-_. ]*\d*$", "", _common_beginning(names))
    is_of_the_handler = all(
        path.name.endswith((".pt.trace.json", ".pt.trace.json.gz")) for path in paths
    )
    return folder if is_of_the_handler or len(common) < 3 else common


def refuse(path: Path) -> Unreadable:
    """For a profile in which nothing was communicated."""
    return Unreadable(
        f"{path} has no communication: torch's profiler recorded neither Gloo's operations nor "
        "NCCL's kernels; record steps of training that include backward, on every rank"
    )


def _common_beginning(names: Sequence[str]) -> str:
    first, last = min(names), max(names)
    same = (i for i, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1])
    return first[: next(same, min(len(first), len(last)))]
