"""What ranks would do if no message were kept for its receiver, and how many steps it would take.

dpcore keeps messages that nobody has asked for, so ranks that all send first and receive later get
on. Where messages are long, most libraries have no room for them: a send returns when its receiver
takes the message, and the same program stands still. The calls that ranks have made are enough to
find out, and they also tell how many messages have to come one after the other, on any machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from dpcore.school.exercise.student_comm import Call

MESSAGES = ("send", "recv")
Side = tuple[int, int]  # a rank, and the number of its call


@dataclass
class Replay:
    """``stopped``: where each rank is that does not come to its end. ``steps``: the longest chain
    of messages, each of which is sent after the one before has come."""

    stopped: dict[int, Call] = field(default_factory=dict)
    steps: int = 0


def replay(ranks: Sequence[Sequence[Call]]) -> Replay:
    """Runs the calls of all ranks again, with messages that take one step each.

    >>> send, recv = Call("send", 1, 0, -1, 0.0, 4), Call("recv", 0, 0, -1, 0.0, 5)
    >>> replay([[send], [recv]])
    Replay(stopped={}, steps=1)
    >>> first = [[Call(name, other, 0, -1, 0.0, 1) for name in MESSAGES] for other in (1, 0)]
    >>> {rank: str(call) for rank, call in replay(first).stopped.items()}
    {0: 'send to rank 1 (line 1)', 1: 'send to rank 0 (line 1)'}
    """
    now = [0] * len(ranks)  # steps that each rank has behind it
    at = [0] * len(ranks)
    posted: dict[Side, int] = {}  # when
    complete: dict[Side, int] = {}
    meeting: defaultdict[tuple[int, int, int], dict[str, list[Side]]]
    meeting = defaultdict(lambda: {"send": [], "recv": []})

    def post(side: Side, call: Call) -> None:
        """The n-th send between two ranks meets the n-th receive."""
        rank = side[0]
        posted[side] = now[rank]
        between = (rank, call.peer) if call.name == "send" else (call.peer, rank)
        both = meeting[(*between, call.tag)]
        both[call.name].append(side)
        count = len(both[call.name])
        if min(map(len, both.values())) >= count:
            send, recv = both["send"][count - 1], both["recv"][count - 1]
            complete[send] = complete[recv] = max(posted[send] + 1, posted[recv])

    def goes_on(rank: int, call: Call) -> bool:
        side = (rank, call.work if call.name == "wait" else at[rank])
        if ranks[rank][side[1]].name not in MESSAGES:
            return True
        if side not in posted:
            post(side, call)
        if call.blocks and side not in complete:
            return False
        if call.blocks:
            now[rank] = max(now[rank], complete[side])
        return True

    has_moved = True
    while has_moved:
        has_moved = False
        for rank, calls in enumerate(ranks):
            while at[rank] < len(calls) and goes_on(rank, calls[at[rank]]):
                at[rank] += 1
                has_moved = True
    stopped = {rank: ranks[rank][n] for rank, n in enumerate(at) if n < len(ranks[rank])}
    return Replay(stopped, max(now, default=0))
