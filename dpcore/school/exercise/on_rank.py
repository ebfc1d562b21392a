"""What runs on a rank: a body of a check, with the student's module.

Before that module is loaded, the rank gets a deadline and a limit of memory, its output goes to a
file, and the ways around the exercise (``DataParallel``, torch's DDP, dpcore.reference.ladder) are
closed. Only plain values and ``Failed`` leave the process.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import resource
import sys
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpcore.errors import Error
from dpcore.school.exercise import watching
from dpcore.school.exercise.student_comm import SUBMISSION, Call, Record, Shortcut, StudentComm

OWN = "dpcore_exercise_"  # how the modules begin that load() makes


@dataclass(frozen=True)
class Job:
    """What a rank is to do."""

    check: str  # the file with the body
    body: str
    file: str  # the student's, or "" for a run without
    args: tuple[Any, ...]
    seconds: float
    memory: int
    folder: str  # for what is printed and written


class Failed(Exception):
    """An error on a rank, in plain words.

    ``place`` is the student's line, and ``code`` what it says. An error in what the check did with
    what the student's code gave it has no place; then ``code`` is the check's line. ``step`` is
    that of a training, from 1, or 0.
    """

    def __init__(self, kind: str, message: str, place: str, code: str, step: int) -> None:
        super().__init__(kind, message, place, code, step)  # with which pickle makes it again
        self.kind, self.message = kind, message
        self.place, self.code, self.step = place, code, step


class Stage:
    """What a body gets beside the student's module."""

    def __init__(self, comm: Any, allowed: Sequence[str] | None, folder: str) -> None:
        self.rank: int = comm.rank
        self.world_size: int = comm.world_size
        self.folder = Path(folder)
        self.step = 0  # of a training, which a body notes for what it says about an error
        self.clock: Callable[[], float] = watching.clock()
        self._record = Record(self.clock)
        self.comm = comm if allowed is None else StudentComm(comm, allowed, self._record)
        self.barrier: Callable[[], None] = comm.barrier
        self.settle: Callable[[], None] = self._record.settle
        self._start, self._stop = comm._native.start_trace, comm._native.stop_trace

    @property
    def calls(self) -> list[Call]:
        """Of the student's communicator, in their order."""
        return self._record.calls

    def misuse(self) -> list[str]:
        """What was done wrong with operations in flight."""
        return self._record.misuse()

    def watch(self) -> watching.Watch:
        return watching.Watch(self._start, self._stop, self.clock, self._record.settle)


def run(comm: Any, job: Job) -> Any:
    """The body's result as plain values."""
    os.setsid()  # what it starts can be ended with it
    (Path(job.folder) / f"session.{comm.rank}").write_text(str(os.getpid()))
    _send_output_to(Path(job.folder) / f"printed.{comm.rank}")
    stacks = open(Path(job.folder) / f"stacks.{comm.rank}", "w")  # noqa: SIM115
    faulthandler.dump_traceback_later(job.seconds, exit=True, file=stacks)
    resource.setrlimit(resource.RLIMIT_DATA, (job.memory, job.memory))
    os.chdir(job.folder)
    import torch  # the limit is one of the process, so what torch brings along counts

    torch.manual_seed(0)
    check = load(job.check, "check")
    stage = Stage(comm, getattr(check, "ALLOWED", None), job.folder)
    if job.file:
        _close_shortcuts(getattr(check, "OPEN", ()))
    hidden = _hide_the_check()
    try:
        student = load(job.file, "submission") if job.file else None
        found = plain(getattr(check, job.body)(stage, student, *job.args))
        stage.settle()
        stage.barrier()  # no rank leaves while others still talk to it
        return found
    except BaseException as problem:
        raise _failed(problem, job, stage.step) from None
    finally:
        sys.modules.update(hidden)
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        sys.stderr.flush()


def load(path: str, name: str) -> types.ModuleType:
    """The module in a file, under a name that hides no other module."""
    called = f"{OWN}{name}"
    spec = importlib.util.spec_from_file_location(called, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[called] = module
    is_cached, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = is_cached
    return module


def plain(value: Any) -> Any:
    """Only what can be looked at without running a student's code: numbers, texts, arrays."""
    import numpy as np
    import torch

    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy().copy()
    if type(value) is np.ndarray and value.dtype.kind in "biuf":
        return value.copy()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(part) for part in value]
    if isinstance(value, torch.nn.Parameter | range):
        return [plain(part) for part in value]
    return f"<a {type(value).__name__}>"


def _send_output_to(path: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _hide_the_check() -> dict[str, types.ModuleType]:
    """Keeps what judges from being imported, and changed, by what is judged."""
    names = [name for name in sys.modules if name.startswith(("dpcore.school.exercise", OWN))]
    hidden = {name: sys.modules.pop(name) for name in names}
    sys.modules["dpcore.school.exercise"] = None  # type: ignore[assignment]
    return hidden


def _close_shortcuts(open_ones: Sequence[str]) -> None:
    """What would do the exercise by itself says so instead."""
    import torch

    import dpcore
    from dpcore import reference

    def shut(name: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise Shortcut(f"{name} is what this exercise is about: write it yourself")

        return refuse

    if "DataParallel" not in open_ones:
        dpcore.DataParallel.__init__ = shut("DataParallel")  # type: ignore[method-assign]
        torch.nn.parallel.DistributedDataParallel.__init__ = shut(  # type: ignore[method-assign]
            "DistributedDataParallel"
        )
    for name in ("ladder", "buckets", "tensor_parallel", "zero"):
        sys.modules[f"dpcore.reference.{name}"] = None  # type: ignore[assignment]
        if hasattr(reference, name):
            delattr(reference, name)
    for name in ("attention", "pipeline_plans"):
        sys.modules[f"dpcore.parallel.{name}"] = None  # type: ignore[assignment]
    dpcore._C.plan_buckets = shut("plan_buckets")


def _failed(problem: BaseException, job: Job, step: int) -> Failed:
    place = code = ""
    for frame in traceback.extract_tb(problem.__traceback__):
        if job.file and os.path.realpath(frame.filename) == os.path.realpath(job.file):
            place, code = f"line {frame.lineno}, in {frame.name}", frame.line or ""
        elif not place and frame.name != "run" and _is_of_the_check(frame.filename, job):
            code = frame.line or ""
    if isinstance(problem, SyntaxError) and problem.filename == job.file:
        place, code = f"line {problem.lineno or 0}, in the file", (problem.text or "").strip()
    kind = type(problem).__name__ if _is_known(problem) else f"{type(problem).__name__} (your own)"
    return Failed(kind, str(problem), place, code, step)


def _is_of_the_check(path: str, job: Job) -> bool:
    return path == job.check or os.path.dirname(path) == os.path.dirname(__file__)


def _is_known(problem: BaseException) -> bool:
    return isinstance(problem, Error) or type(problem).__module__ != SUBMISSION
