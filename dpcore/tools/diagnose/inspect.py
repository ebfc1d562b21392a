"""``dpcore inspect``: what ranks do, and which one holds them up, read from outside.

With process numbers it shows the black box of each (``black_box.py``). With ``--job`` it says in
plain sentences which rank holds up the job (``hang.py``), from any host of it: what ranks of
other hosts do is known to the ranks of this one, so no other host is asked, and none has to answer.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpcore.errors import Error, Unsupported
from dpcore.tools.diagnose.black_box import describe, ranks_of_this_host, read
from dpcore.tools.diagnose.hang import Verdict, judge
from dpcore.tools.diagnose.job import Family, Rank, beside, families
from dpcore.tools.flight_recorder import Called, write_dumps

if TYPE_CHECKING:
    from rich.console import Console

_RANKS_SHOWN, _FINISHED_SHOWN = 16, 5
_COARSE_CLOCK = 6  # CLOCK_MONOTONIC_COARSE, by which ranks note when operations begin and end
_NOBODY = "no process on this host that you may inspect is a dpcore rank"


def run(options: argparse.Namespace) -> int:
    """Prints what is asked for; the exit status."""
    from rich.console import Console

    console = Console(highlight=False)
    folder: Path | None = options.flight_recorder
    if options.job:
        return _show_jobs(ranks_of_this_host(), options.pid or None, console, options.json, folder)
    if folder is not None:
        raise Unsupported("--flight-recorder is of a whole job: add --job")
    pids = options.pid or ranks_of_this_host()
    if not pids:
        raise Error(_NOBODY)
    return _show_boxes(pids, console, options.json)


def _show_boxes(pids: Sequence[int], console: Console, as_json: bool) -> int:
    status = 0
    for pid in pids:
        try:
            boxes = read(pid)
        except Error as problem:
            print(f"dpcore inspect: {problem}", file=sys.stderr)
            status = 1
            continue
        for box in boxes:
            if as_json:
                print(json.dumps(box))
                continue
            for line, style in _lines(box):
                console.print(line, style=style or None, markup=False, soft_wrap=True)
    return status


def _show_jobs(
    pids: Sequence[int],
    asked: Sequence[int] | None,
    console: Console,
    as_json: bool,
    folder: Path | None,
) -> int:
    """``asked``: processes whose jobs are meant, instead of all. ``folder``: for the job's dumps in
    the format of torch's flight recorder."""
    if not pids and asked is None:
        raise Error(_NOBODY)
    found, problems = families(pids if asked is None else beside(asked, pids))
    for pid, problem in problems.items():
        if asked is None or pid in asked:
            print(f"dpcore inspect: {problem}", file=sys.stderr)
    if asked is not None:
        known = sorted(process for family in found for process in family.processes)
        found = [family for family in found if family.processes & set(asked)]
        if not found and problems.keys().isdisjoint(asked):
            raise Error(f"found no job that {_processes(asked)} is in, only of {_processes(known)}")
    if folder is not None:
        if len(found) > 1:
            raise Unsupported(
                f"--flight-recorder is of one job, and {len(found)} run here: name a process of one"
            )
        for family in found:
            write_dumps(folder, _calls_of(family), _groups_of(family))
    judged = [(family, judge(family)) for family in found]
    judged.sort(key=lambda pair: not pair[1].hangs)
    for at, (family, verdict) in enumerate(judged):
        if as_json:
            print(json.dumps(_as_json(family, verdict)))
            continue
        if at > 0:
            console.print()
        for line, style in _job_lines(family, verdict):
            console.print(line, style=style or None, markup=False, soft_wrap=True)
    return 0 if judged else 1


def _processes(pids: Sequence[int]) -> str:
    return f"process{'es' * (len(pids) > 1)} {', '.join(map(str, pids))}" if pids else "no process"


def _groups_of(family: Family) -> dict[int, list[int]]:
    return {
        group: [member for _, member in sorted(members.items())]
        for group, members in family.members.items()
    }


def _calls_of(family: Family) -> dict[int, list[Called]]:
    """What each rank of a job has called, as far as its boxes remember."""
    now_ns = time.time_ns()

    def called(group: int, entry: Mapping[str, Any]) -> Called:
        ended = "took_ms" in entry
        end_ns = now_ns - int(entry["seconds_ago" if ended else "since_seconds"] * 1e9)
        begin_ns = end_ns - int(entry["took_ms"] * 1e6) if ended else end_ns
        return Called(
            group,
            entry["number"],
            entry["collective"],
            entry.get("dtype", ""),
            entry.get("bytes", 0),
            begin_ns,
            end_ns if ended else None,
        )

    return {
        number: [
            called(group, entry)
            for group, box in rank.boxes.items()
            for entry in (*box["finished"], *box["in_flight"])
        ]
        for number, rank in family.ranks.items()
    }


def _as_json(family: Family, verdict: Verdict) -> dict[str, Any]:
    return {
        "job": family.job,
        "world_size": family.world,
        "hangs": verdict.hangs,
        "culprits": verdict.culprits,
        "operation": verdict.operation,
        "says": verdict.says,
        "ranks": [
            {
                "rank": rank.number,
                "pid": rank.process,
                "process_state": rank.state or None,
                "silent_seconds": rank.silent_seconds,
                "where": rank.where,
                "waits": [
                    {"in": wait.what, "seconds": wait.seconds, "for": list(wait.late)}
                    for wait in verdict.waits
                    if wait.rank == rank.number
                ],
            }
            for _, rank in sorted(family.ranks.items())
        ],
    }


# ---- as text ---------------------------------------------------------------------------------


def _job_lines(family: Family, verdict: Verdict) -> Iterator[tuple[str, str]]:
    here = sum(rank.process is not None for rank in family.ranks.values())
    yield f"{family.world} ranks, {here} of them on this host", "bold"
    for sentence in verdict.says:
        yield sentence, "bold red" if verdict.hangs else ""
    yield "", ""
    ranks = sorted(family.ranks.values(), key=lambda rank: _order_of(rank, verdict))
    for rank in ranks[:_RANKS_SHOWN]:
        yield f"  {_rank_line(rank, verdict)}", ""
    if len(ranks) > _RANKS_SHOWN:
        yield f"  and {len(ranks) - _RANKS_SHOWN} more ranks (--json has all)", "dim"


def _order_of(rank: Rank, verdict: Verdict) -> tuple[bool, int]:
    return rank.number not in verdict.culprits, rank.number


def _rank_line(rank: Rank, verdict: Verdict) -> str:
    process = f"process {rank.process}" if rank.process is not None else "other host"
    own = [wait for wait in verdict.waits if wait.rank == rank.number]
    does = f"waits for {own[0].seconds:.1f} s in {own[0].what}" if own else "waits for no rank"
    where = f", at {rank.where['line']}" if rank.where is not None else ""
    return f"rank {rank.number}  {process}  {does}{where}"


def _lines(box: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    group = "" if box["communicator"] == "init" else " of a group made by split()"
    state = ", finalized" if box["finalized"] else ""
    yield (
        f"process {box['pid']}: rank {box['rank']} of {box['world_size']}{group}{state}, "
        f"{box['operations_entered']} operations entered",
        "bold",
    )
    abort = box["abort"]
    if abort is not None:
        blamed = f", rank {abort['culprit']} is to blame" if abort["culprit"] >= 0 else ""
        yield f"  gave up {abort['seconds_ago']:.1f} s ago: {abort['error']}{blamed}", "bold red"
        yield f"    {abort['reason']}", "red"
    if box["where"] is not None:
        yield f"  at {box['where']['line']}", ""
    for entry in box["in_flight"]:
        verb = "was in flight" if abort is not None else "in flight"
        yield f"  {verb} for {entry['since_seconds']:.1f} s: {describe(entry)}", "yellow"
    if not box["in_flight"]:
        yield "  nothing in flight", ""
    for entry in reversed(box["finished"][-_FINISHED_SHOWN:]):
        yield (
            f"  finished {entry['seconds_ago']:.1f} s ago, took {_took(entry['took_ms'])}: "
            f"{describe(entry)}",
            "dim",
        )


def _took(milliseconds: float) -> str:
    """As exactly as the ranks' clock says it.

    >>> _took(1000.0)
    '1000 ms'
    """
    tick = time.clock_getres(_COARSE_CLOCK) * 1e3
    return f"{milliseconds:.0f} ms" if milliseconds >= tick else f"less than {tick:.0f} ms"
