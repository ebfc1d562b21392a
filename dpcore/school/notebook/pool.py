"""Ranks that live on: processes that run the cells of a notebook.

One pipe per rank. A cell is sent to all; what they print comes line by line, and each says when it
has ended. When a cell fails on a rank while others go on, they get a moment to end by themselves.
Then the rank that failed aborts the communicator, so that no rank waits for it in vain, and the
ranks make a new one. Their variables stay.
"""

from __future__ import annotations

import math
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from dpcore.comm.launch.rank_processes import RankProcesses, how_it_ended
from dpcore.errors import Error
from dpcore.school.notebook import on_rank
from dpcore.school.notebook.messages import Abort, Cell, Done, Meet, Problem

_MOMENT = 1.0  # seconds for the other ranks to end a cell by themselves
_PATIENCE = 5.0  # seconds for them to end it after an abort, or Ctrl-C
_LOOK_SECONDS = 0.1  # at most between two looks at what is late
_PRELOAD = ["dpcore.school.notebook.on_rank", "dpcore.ddp.data_parallel"]


class RankError(Error):
    """A cell has failed on a rank. A notebook shows the rank's traceback in the place of ours."""

    def __init__(self, problem: Problem, where: str, after: str) -> None:
        super().__init__(f"{where}: {problem.line}{after}")
        self._shown = [*problem.traceback.rstrip().splitlines(), f"({where}){after}"]

    def _render_traceback_(self) -> list[str]:
        return self._shown


class RanksGone(Error):
    """Ranks have ended, and their variables with them."""


class RankPool:
    """``world_size`` ranks. ``hear(rank, message)`` gets what they print and show meanwhile."""

    def __init__(
        self, world_size: int, hear: Callable[[int, Any], None], options: Mapping[str, Any]
    ) -> None:
        self.world_size, self.options = world_size, dict(options)
        self._hear = hear
        self._cells = 0
        self._ranks = RankProcesses(
            on_rank.main, world_size, (world_size, self.options), preload=_PRELOAD
        )
        try:
            self._meet()
        except BaseException:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        return bool(self.processes) and self._ranks.first_gone() is None

    @property
    def processes(self) -> list[int]:
        """Their numbers, in the order of the ranks."""
        return self._ranks.process_ids

    def run(self, source: str, names: tuple[str, ...] = ()) -> list[Done]:
        """Runs a cell on all ranks, whose variables with these names come back. Raises
        ``RankError`` when it fails on one."""
        self._cells += 1
        ended = self._ask(Cell(self._cells, source, names))
        failed = {rank: done.problem for rank, done in enumerate(ended) if done.problem is not None}
        counts = [done.operations for done in ended]
        differ = not all(done.is_usable for done in ended) or any(c != counts[0] for c in counts)
        if failed and differ:
            self._meet()
        if failed:
            first = min(failed, key=lambda rank: failed[rank].at)
            alike = all(problem.line == failed[first].line for problem in failed.values())
            on_all = alike and len(failed) == self.world_size > 1
            where = "all ranks" if on_all else f"rank {first} of {self.world_size}"
            renewed = (
                "; the ranks have a new `comm` and all their variables: wrap models again"
                if differ
                else ""
            )
            raise RankError(failed[first], where, renewed)
        return ended

    def close(self) -> list[int]:
        """Ends the ranks, which have these exit codes."""
        self._ranks.hang_up()
        return self._ranks.end(_PATIENCE)

    # ---- asking ----------------------------------------------------------------------------------

    def _meet(self) -> None:
        ended = self._ask(Meet(f"notebook-{uuid.uuid4().hex}"))
        for rank, done in enumerate(ended):
            if done.problem is not None:
                self.close()
                raise RankError(done.problem, f"rank {rank} of {self.world_size}", "")

    def _ask(self, message: Any) -> list[Done]:
        """Everybody's answer. Ctrl-C reaches the ranks, and what they make of it comes back."""
        if not self.processes:
            raise RanksGone("these ranks were ended; the next %%ranks starts new ones")
        gone = self._ranks.first_gone()
        if gone is not None:
            self._lost(gone)
        answers: dict[int, Done] = {}
        for rank in range(self.world_size):
            self._ranks.send(rank, message)
        stopper = _Stopper(self._ranks)
        while len(answers) < self.world_size:
            try:
                waiting = [rank for rank in range(self.world_size) if rank not in answers]
                for rank, heard in self._ranks.heard(waiting, _LOOK_SECONDS):
                    if heard is None:
                        self._lost(rank)
                    elif isinstance(heard, Done):
                        answers[rank] = heard
                    else:
                        self._hear(rank, heard)
                stopper.look(answers)
            except KeyboardInterrupt:
                stopper.interrupt(answers)
        return [answers[rank] for rank in range(self.world_size)]

    def _lost(self, rank: int) -> NoReturn:
        how = how_it_ended(self.close()[rank])
        raise RanksGone(
            f"rank {rank} has ended {how}, and the other ranks were ended with it; the next "
            "%%ranks starts new ones, without their variables"
        )


class _Stopper:
    """Ends one cell: brings the other ranks to its end after an error, or Ctrl-C."""

    def __init__(self, ranks: RankProcesses) -> None:
        self._ranks = ranks
        self._aborts_at = float("inf")  # the communicator, after an error
        self._interrupts_at = float("inf")  # those that have not looked at it for long
        self._gives_up_at = float("inf")

    def look(self, answers: Mapping[int, Done]) -> None:
        """Now and then while ranks run."""
        now = time.monotonic()
        failed = {rank: done.problem for rank, done in answers.items() if done.problem is not None}
        if failed and self._aborts_at == float("inf"):
            self._aborts_at, self._interrupts_at = now + _MOMENT, now + _MOMENT + _PATIENCE
        if failed and now >= self._aborts_at:
            self._aborts_at = math.nan  # once
            for rank, problem in failed.items():
                self._ranks.send(rank, Abort(problem.line))
        if now >= self._interrupts_at:
            self.interrupt(answers)
        if now >= self._gives_up_at:
            self._give_up(answers)

    def interrupt(self, answers: Mapping[int, Done]) -> None:
        """Ctrl-C, for all that are at it still."""
        self._interrupts_at = math.nan
        self._gives_up_at = min(self._gives_up_at, time.monotonic() + _PATIENCE)
        for rank in self._late(answers):
            self._ranks.send_signal(rank, signal.SIGINT)

    def _give_up(self, answers: Mapping[int, Done]) -> None:
        late = ", ".join(map(str, self._late(answers)))
        self._ranks.end(0.0)
        raise RanksGone(
            f"rank {late} did not stop within {_PATIENCE:.0f} s, and all ranks were ended; the "
            "next %%ranks starts new ones, without their variables"
        )

    def _late(self, answers: Mapping[int, Done]) -> list[int]:
        return [rank for rank in range(len(self._ranks.process_ids)) if rank not in answers]
