"""Which rank holds up a job, from what is known of all ranks.

``judge`` is a pure function of a family: it follows which rank waits for which, to those that
wait for none (they are the cause) or round a circle (then the order of calls differs).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dpcore.tools.diagnose.black_box import describe, describe_message
from dpcore.tools.diagnose.job import SILENT_SECONDS, Box, Family, Rank, age_of

# Two things were seen in one look if they are no further apart.
_SAME_LOOK_SECONDS = 0.5
# A wait that is shorter may be a step like any other.
_HANG_SECONDS = 1.0


@dataclass
class Wait:
    """One rank waits in one operation for others."""

    rank: int
    group: int
    what: str
    seconds: float
    late: tuple[int, ...]  # ranks that have not come
    details: Mapping[str, Any]
    is_message: bool = False


def waits_of(family: Family) -> Iterator[Wait]:
    for rank in family.ranks.values():
        for group, box in rank.boxes.items():
            members = family.members[group]
            for entry in box["in_flight"]:
                late = [
                    member
                    for member in members.values()
                    if member != rank.number
                    and _entered(family.ranks[member].boxes.get(group)) <= entry["number"]
                ]
                text = describe(entry) + family.group_text(group)
                yield Wait(rank.number, group, text, entry["since_seconds"], tuple(late), entry)
            message = box["message"]
            if message is not None and _is_in_message(rank, box):
                peer = message["peer"]
                late = [members[peer]] if peer in members else []
                if peer < 0:
                    late = [member for member in members.values() if member != rank.number]
                text = describe_message(message, members) + family.group_text(group)
                seconds = message["since_seconds"]
                yield Wait(rank.number, group, text, seconds, tuple(late), message, True)


def _entered(box: Box | None) -> int:
    return 0 if box is None else int(box["operations_entered"])


def _is_in_message(rank: Rank, box: Box) -> bool:
    """Whether the last that was seen of the rank is its wait for this message."""
    seen = box["message"]["seen_seconds_ago"]
    if rank.process is not None and not rank.is_stopped:
        return bool(seen < _SAME_LOOK_SECONDS)
    return bool(seen - age_of(box) < _SAME_LOOK_SECONDS)


@dataclass
class Verdict:
    """What ``dpcore inspect --job`` says of a family."""

    hangs: bool
    culprits: list[int]
    operation: Mapping[str, Any] | None
    says: list[str]
    waits: list[Wait]


def judge(family: Family) -> Verdict:
    waits = sorted(waits_of(family), key=lambda wait: -wait.seconds)
    given_up = _who_gave_up(family)
    if given_up is not None:
        culprit, text = given_up
        return Verdict(False, [culprit] if culprit >= 0 else [], None, [text], waits)
    if not waits or waits[0].seconds < _HANG_SECONDS:
        return Verdict(False, [], None, [_all_is_well(family, waits)], waits)
    for_somebody = [wait for wait in waits if wait.late]
    if not for_somebody:
        return _inside(family, waits)
    waiting = {wait.rank: wait for wait in reversed(for_somebody)}
    # From any wait one comes to a rank that waits for none, or back to where one was.
    wait, seen = for_somebody[0], [for_somebody[0].rank]
    while True:
        free = [rank for rank in wait.late if rank not in waiting]
        if free:
            return _held_up(family, waits, sorted(free), wait)
        if wait.late[0] in seen:
            circle = seen[seen.index(wait.late[0]) :]
            return _in_a_circle(family, [waiting[rank] for rank in circle], waits)
        wait = waiting[wait.late[0]]
        seen.append(wait.rank)


def _who_gave_up(family: Family) -> tuple[int, str] | None:
    aborts = [
        (-box["abort"]["seconds_ago"], rank.number, group, box["abort"])
        for rank in family.ranks.values()
        for group, box in rank.boxes.items()
        if box["abort"] is not None
    ]
    if not aborts:
        return None
    _, _, group, abort = min(aborts, key=lambda each: each[:2])
    culprit = family.members[group].get(abort["culprit"], -1)
    blamed = f"; rank {culprit} is to blame" if culprit >= 0 else ""
    text = f"The job gave up {abort['seconds_ago']:.1f} s ago: {abort['error']}{blamed}."
    return culprit, f"{text} {abort['reason']}"


def _all_is_well(family: Family, waits: list[Wait]) -> str:
    if waits:
        return (
            f"No rank has waited for longer than {max(waits[0].seconds, 0.0):.1f} s: "
            "this is not a hang, or it has just begun."
        )
    stopped = [rank for rank in family.ranks.values() if rank.is_stopped or rank.is_silent]
    if stopped:
        return "No rank waits for another one. " + " ".join(_state_text(rank) for rank in stopped)
    return "No rank waits for another one: each of them computes, or does something else."


def _held_up(family: Family, waits: list[Wait], culprits: list[int], wait: Wait) -> Verdict:
    waiting = sorted({other.rank for other in waits if set(other.late) & set(culprits)})
    shown = culprits[:4]
    names = _listed([family.ranks[rank].name for rank in shown if rank in family.ranks])
    more = f" and {len(culprits) - len(shown)} more" if len(culprits) > len(shown) else ""
    verb = "hold" if len(culprits) > 1 else "holds"
    who = _ranks_text(waiting)
    missing = "sent it" if wait.is_message else "called it"
    if wait.is_message and wait.details["direction"] == "send":
        missing = "received it"
    has = "have" if len(culprits) > 1 else "has"
    says = [
        f"{names[0].upper()}{names[1:]}{more} {verb} up the job: {who} "
        f"{'waits' if len(waiting) == 1 else 'wait'} in {wait.what}, for {wait.seconds:.1f} s, and "
        f"{'they' if len(culprits) > 1 else 'it'} {has} not {missing}."
    ]
    says += [_state_text(family.ranks[rank]) for rank in shown if rank in family.ranks]
    return Verdict(True, culprits, dict(wait.details), says, waits)


def _in_a_circle(family: Family, circle: list[Wait], waits: list[Wait]) -> Verdict:
    says = [
        f"{_ranks_text(sorted(wait.rank for wait in circle)).capitalize()} wait for each other:"
    ]
    for wait in circle:
        place = _place_of(family.ranks[wait.rank])
        says.append(
            f"  rank {wait.rank} waits for {_ranks_text(sorted(wait.late))} in {wait.what}"
            f"{f', at {place}' if place else ''}, for {wait.seconds:.1f} s"
        )
    messages = [wait for wait in circle if wait.is_message]
    if len(messages) == 1:
        (wait,) = messages
        if wait.details["direction"] == "recv":
            says.append(f"No rank has sent what rank {wait.rank} waits for.")
        else:
            says.append(f"No rank receives what rank {wait.rank} sends.")
        return Verdict(True, [wait.rank], dict(wait.details), says, waits)
    says.append("All ranks have to make these calls in the same order.")
    return Verdict(True, sorted(w.rank for w in circle), dict(circle[0].details), says, waits)


def _inside(family: Family, waits: list[Wait]) -> Verdict:
    """Everybody has come, and still it does not end."""
    wait = waits[0]
    lost = [rank for rank in family.ranks.values() if rank.is_stopped or rank.is_silent]
    says = [
        f"All ranks are in {wait.what}, which has not ended for {wait.seconds:.1f} s: its data is "
        "on its way."
    ]
    says += [_state_text(rank) for rank in lost]
    if not lost:
        says.append("The network is slow, or bytes are lost on it.")
    return Verdict(True, sorted(rank.number for rank in lost), dict(wait.details), says, waits)


# ---- sentences -------------------------------------------------------------------------------


def _state_text(rank: Rank) -> str:
    """What the rank does instead of what the others wait for."""
    place = _place_of(rank)
    last = f"; it was last seen at {place}" if place else ""
    root = rank.boxes.get(0)
    it = f"Rank {rank.number}"
    if root is not None and root["finalized"]:
        return f"{it} has finalized its communicator and left."
    if rank.is_stopped:
        return (
            f"{it} is stopped, by SIGSTOP, a debugger or a suspended container{last}. "
            f"`kill -CONT {rank.process}` lets it go on."
        )
    if rank.is_silent:
        return (
            f"{it} has said nothing for {rank.silent_seconds:.1f} s, though each rank does every "
            "second: its process is stopped, its host or the network between is gone, or native "
            f"code keeps Python's lock{last}."
        )
    where = rank.where
    if where is None:
        return f"{it} lives; where its program is has not been recorded yet."
    if rank.process is not None and where["seen_seconds_ago"] > SILENT_SECONDS:
        return (
            f"{it} runs native code that keeps Python's lock, for "
            f"{where['seen_seconds_ago']:.1f} s{last}."
        )
    disk = " Its process waits for a disk or a network file system." if rank.state == "D" else ""
    return f"{it} is at {place}, for {_seconds_there(rank):.1f} s.{disk}"


def _place_of(rank: Rank) -> str:
    return "" if rank.where is None else str(rank.where["line"])


def _seconds_there(rank: Rank) -> float:
    """Since its program is at the line, and no operation began or ended."""
    assert rank.where is not None
    since: list[float] = [rank.where["since_seconds"]]
    for box in rank.boxes.values():
        since += [entry["seconds_ago"] for entry in box["finished"]]
        since += [entry["since_seconds"] for entry in box["in_flight"]]
    return max(0.0, min(since))


def _ranks_text(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {_listed([str(rank) for rank in ranks[:8]])}" + (", ..." * (len(ranks) > 8))


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
