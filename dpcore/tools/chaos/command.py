"""The command: faults come to a job while it trains, until there were enough of them."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from dpcore.tools import hosts as namespaces
from dpcore.tools.chaos.faults import Fault, check_kinds, faults
from dpcore.tools.chaos.figures import Figures, Struck, step_time
from dpcore.tools.chaos.job import Job
from dpcore.tools.hosts import Hosts, end_in_order_on_signals

_OWN = ["-m", "dpcore.tools.chaos.program"]
_LEAST_LIVING = 2  # train on after a kill
_BEGIN_SECONDS = 120.0  # until the first step


def run(options: argparse.Namespace) -> int:
    """``dpcore chaos``; the exit status says whether all went well."""
    check_kinds(options.kinds, options.hosts)
    world = options.world[0]
    if world < _LEAST_LIVING + 1:
        raise ValueError(f"--world {world}: kills need 3 ranks, of which two go on")
    if options.hosts > 1 and (why := namespaces.why_not()):
        raise OSError(f"--hosts: {why}")
    command = options.program[1:] if options.program[:1] == ["--"] else options.program
    is_own = not command
    count = options.faults if options.faults is not None else (10 if is_own else None)
    with _hosts(options.hosts) as made:
        end_in_order_on_signals()
        chaos = Chaos(
            [sys.executable, *_OWN] if is_own else command,
            world,
            made,
            faults(options.seed, options.mtbf, options.kinds),
            count,
            options.restart,
            options.patience,
            None if options.json else _say,
        )
        figures = chaos.run(is_own)
    print(json.dumps(figures.as_json()) if options.json else figures.text())
    return 0 if figures.is_well else 1


@contextlib.contextmanager
def _hosts(count: int) -> Iterator[Hosts | None]:
    if count < 2:
        yield None
        return
    with namespaces.hosts(count) as made:
        yield made


def _say(text: str) -> None:
    print(text, flush=True)


class Chaos:
    """One job under faults."""

    def __init__(
        self,
        command: Sequence[str],
        world: int,
        hosts: Hosts | None,
        coming: Iterator[Fault],
        count: int | None,
        restart: float,
        patience: float,
        say: Any = None,
    ) -> None:
        self._coming, self._count = coming, count
        self._restart, self._patience = restart, patience
        self._say = say or (lambda text: None)
        self._struck: list[Struck] = []
        self._ends: list[tuple[float, Any, Any]] = []  # when a fault ends, and what ends it
        self._restarts: list[tuple[float, int]] = []
        self._problems: dict[str, list[str]] = {"hangs": [], "wrong": [], "left": []}
        self._began = self._ended = self._last_step_at = time.monotonic()
        self._joined: list[float] = []
        self._hosts = hosts
        self._job = Job(command, world, hosts, subprocess.DEVNULL if say is None else None)

    def run(self, is_own: bool) -> Figures:
        """Until there were enough faults and a step after them, or the program is over."""
        left: list[int] = []
        try:
            self._train()
            self._ended = time.monotonic()
        finally:
            for _, end, argument in self._ends:
                end(argument)
            left = self._job.end()
        self._problems["left"] += [f"process {pid} does not end" for pid in left]
        if is_own and not self._problems["hangs"]:
            self._check_bits()
        return self._figures()

    def _train(self) -> None:
        job = self._job
        while not job.steps:
            self._hear(0.2)
            if self._is_over() or time.monotonic() - self._last_step_at > _BEGIN_SECONDS:
                self._problems["hangs"].append("no step was finished")
                return
        self._began = job.steps[min(job.steps)].at
        fault = next(self._coming)
        next_at = time.monotonic() + fault.after
        while not self._is_over():
            now = time.monotonic()
            is_enough = self._count is not None and len(self._struck) >= self._count
            if is_enough and self._is_settled():
                return
            self._end_what_is_due(now)
            if not is_enough and now >= next_at:
                if self._strike(fault):
                    fault = next(self._coming)
                next_at = time.monotonic() + fault.after
            if now - self._last_step_at > self._patience:
                self._problems["hangs"].append(self._why_it_hangs())
                return
            due = [at for at, *_ in self._ends] + [at for at, _ in self._restarts]
            self._hear(min([0.1, *(max(0.0, at - now) for at in (next_at, *due))]))

    def _hear(self, seconds: float) -> None:
        heard = self._job.listen(seconds)
        for said in heard:
            step = self._job.steps.get(said.get("step", -1))
            if said["what"] != "step" or step is None:
                continue
            self._last_step_at = time.monotonic()
            for struck in self._struck:
                struck.hears(step)
            for one in self._job.ranks:
                if one.joins and one.number in step.ranks and not one.has_stepped:
                    one.has_stepped = True
                    self._joined.append(step.at - one.at)

    def _is_over(self) -> bool:
        """The program is."""
        for one in self._job.ranks:
            code = one.process.poll()
            if code not in (None, 0) and not one.is_killed and not one.is_told:
                one.is_told = True
                self._problems["wrong"].append(
                    f"rank {one.place} (process {one.process.pid}) ended with status {code}"
                )
        return not self._job.living or (self._count is not None and bool(self._problems["wrong"]))

    def _is_settled(self) -> bool:
        """All that has begun has come to its end: each fault, and each rank that joins."""
        return (
            not self._ends
            and not self._restarts
            and all(one.stepped is not None for one in self._struck)
            and all(one.has_stepped for one in self._job.living if one.joins)
        )

    # ---- faults ------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> bool:
        """False where it has to come later, since too few ranks train."""
        job, now = self._job, time.monotonic()
        able = [one for one in job.living if not one.is_stopped]
        training = [one for one in able if one.trains]
        if fault.kind in ("kill", "pair"):
            count = 2 if fault.kind == "pair" else 1
            first = int(fault.choice * len(able))
            victims = [able[(first + i) % len(able)] for i in range(count)]
            rest = [one for one in training if one not in victims]
            # Too few are enough for the next shrink(), which counts ranks that have not died.
            if len(rest) < _LEAST_LIVING or any(one.is_stopped for one in job.living):
                return False
            for one in victims:
                job.kill(one)
                if self._restart >= 0:
                    self._restarts.append((now + self._restart, one.place))
            numbers = tuple(one.number for one in victims if one.number >= 0)
            self._note(fault, f"rank {', '.join(str(one.place) for one in victims)}", numbers)
        elif fault.kind == "stop":
            if not training or any(one.is_stopped for one in job.living):
                return False
            one = training[int(fault.choice * len(training))]
            job.stop(one)
            self._ends.append((now + fault.seconds, job.go_on, one))
            self._note(fault, f"rank {one.place} for {fault.seconds:.2f} s", ())
        else:
            assert self._hosts is not None
            host = int(fault.choice * len(self._hosts.names))
            if fault.kind == "cut":
                job.cable(host, False)
                self._ends.append((now + fault.seconds, lambda h: job.cable(h, True), host))
            else:
                job.slow(host, True)
                self._ends.append((now + fault.seconds, lambda h: job.slow(h, False), host))
            self._note(fault, f"host {host} for {fault.seconds:.2f} s", ())
        return True

    def _note(self, fault: Fault, whom: str, numbers: tuple[int, ...]) -> None:
        self._struck.append(Struck(fault.kind, time.monotonic(), numbers))
        after = self._job.last.step if self._job.last else 0
        at = self._struck[-1].at - self._began
        self._say(f"{at:7.2f} s  step {after:5}  {fault.kind} {whom}")

    def _end_what_is_due(self, now: float) -> None:
        for one in [one for one in self._ends if one[0] <= now]:
            self._ends.remove(one)
            one[1](one[2])
        for at, place in [one for one in self._restarts if one[0] <= now]:
            self._restarts.remove((at, place))
            self._job.start(place, True)
            self._say(f"{now - self._began:7.2f} s               rank {place} starts again")

    def _why_it_hangs(self) -> str:
        last = self._job.last
        said = f"no step for {self._patience:.3g} s after step {last.step if last else 0}"
        looked = subprocess.run(
            [sys.executable, "-m", "dpcore", "inspect", "--job"],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        self._say(looked.stdout + looked.stderr)
        return said

    # ---- the end -----------------------------------------------------------------------------

    def _check_bits(self) -> None:
        from dpcore.tools.chaos.program import replayed

        steps = self._job.steps
        for step in steps.values():
            if len(step.digests) > 1:
                self._problems["wrong"].append(f"ranks differ after step {step.step}")
        # A rank that joined late is heard before what the others had not sent yet.
        heard = next(number for number in count(1) if number not in steps)
        told = [number for number, step in steps.items() if step.digests and number < heard]
        if not told:
            self._problems["wrong"].append("no rank told of its weights")
            return
        ranks = {number: step.ranks for number, step in steps.items()}
        if (last := max(told)) and replayed(ranks, last) not in steps[last].digests:
            self._problems["wrong"].append(f"the weights after step {last} are not those of a run "
                                           "in which the same ranks took each step")  # fmt: skip

    def _figures(self) -> Figures:
        steps, seconds = self._job.steps, self._ended - self._began
        median = step_time(steps)
        of_kind = {
            kinds: [one.stepped - one.at for one in self._struck
                    if one.kind in kinds and one.stepped is not None]
            for kinds in (("kill", "pair"), ("stop",))
        }  # fmt: skip
        lost = sum(max(0.0, one.stepped - one.at - median) for one in self._struck if one.stepped)
        return Figures(
            ranks=self._job.world,
            seconds=seconds,
            faults=dict(Counter(one.kind for one in self._struck)),
            joined=len(self._joined),
            steps=len(steps),
            repeated=self._job.repeated,
            step=median,
            kill_to_step=of_kind["kill", "pair"],
            stop_to_step=of_kind["stop",],
            start_to_step=self._joined,
            goodput=max(0.0, 1 - lost / seconds) if steps and seconds > 0 else 0.0,
            **self._problems,
        )
