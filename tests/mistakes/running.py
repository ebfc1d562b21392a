"""Runs programs one after the other in one pair of rank processes, and notes what is said.

    told = over_dpcore(programs, "shm")     # {name: [what rank 0 heard, what rank 1 heard]}

A ``way`` says how: see ``WAYS``. Each program gets a fresh ``init``, so what one breaks does not
reach the next.
"""

import tempfile
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import dpcore
from tests.mistakes.here import Here

DEADLINE = 20.0  # seconds, for a rank of dpcore that waits
PATIENCE = 3.0  # of torch, for ranks that wait for ever
MEETS = timedelta(seconds=120)

# transport, schedule, and the backend of torch.distributed around it
WAYS = {
    "shm": ("shm", None, None),
    "tcp": ("tcp", None, None),
    "priority": ("shm", "priority", None),
    "dear": ("shm", "dear", None),
    "zero1": ("shm", "zero1", None),
    "gloo": (None, None, "gloo"),  # process_group=, in whose place dpcore moves the bytes
    "torch": (None, None, "torch"),  # dpcore.init("torch"): Gloo moves them
}


@dataclass(frozen=True)
class Said:
    """A message that a rank got in a step, the first being 1. After the last one it is the end."""

    step: int
    how: str  # "raise", "warn" or "note"
    kind: str  # class
    text: str


def over_dpcore(programs, way="shm", mistakes="warn", world=2):
    """``programs``: by name, generators of a ``Here``."""
    return _by_program(programs, world, _rank_of_dpcore, way, mistakes)


def over_torch(programs):
    """The same over torch DDP and Gloo."""
    return _by_program(programs, 2, _rank_of_torch)


def _by_program(programs, world, body, *options):
    with tempfile.TemporaryDirectory() as folder:
        ranks = dpcore.spawn(body, world, dict(programs), folder, *options)
    return {name: [told[name] for told in ranks] for name in programs}


def _rank_of_dpcore(comm, programs, folder, way, mistakes):
    rank, world = comm.rank, comm.world_size
    dpcore.finalize()
    torch.set_num_threads(1)
    transport, schedule, group = WAYS[way]
    told = {}
    for name, program in programs.items():
        here = Here(rank, world, schedule=schedule, mistakes=mistakes)
        try:
            if group is not None:
                _join_gloo(rank, world, folder, name, DEADLINE)
                here.group = dist.group.WORLD if group == "gloo" else None
                if group == "torch":
                    dpcore.init("torch")
                    here.steps = range(3 * len(here.steps))
            else:
                dpcore.init(
                    rank=rank, world_size=world, init_method=f"{Path(folder).name}-{name}",
                    transport=transport, timeout=DEADLINE,
                )  # fmt: skip
            told[name] = _heard(program, here, at_end=dpcore.finalize)
        finally:
            _finalize_quietly()
            if group is not None:
                _leave_gloo(rank, world)
    return told


def _rank_of_torch(comm, programs, folder):
    rank, world = comm.rank, comm.world_size
    dpcore.finalize()
    torch.set_num_threads(1)
    told = {}
    for name, program in programs.items():
        _join_gloo(rank, world, folder, name, PATIENCE)
        told[name] = _heard(program, Here(rank, world, is_torch=True))
        _leave_gloo(rank, world)
    return told


_store = None


def _join_gloo(rank, world, folder, name, seconds):
    global _store
    _store = dist.FileStore(str(Path(folder) / name), world)
    _store.set_timeout(MEETS)
    dist.init_process_group(
        "gloo", store=_store, rank=rank, world_size=world, timeout=timedelta(seconds=seconds)
    )


def _leave_gloo(rank, world):
    """Together: what a rank that leaves does to one that waits is not what is looked at."""
    _store.set(f"done/{rank}", "")
    _store.wait([f"done/{other}" for other in range(world)], MEETS)
    dist.destroy_process_group()


def _finalize_quietly():
    try:
        dpcore.finalize()
    except dpcore.Error:
        dpcore.finalize()


def _heard(program, here, at_end=lambda: None):
    """What was said while the program ran, in its order."""
    said = []
    step = 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for _ in program(here):
                _take_down(said, caught, here, step)
                step += 1
            at_end()
        except Exception as error:
            said.append(Said(step, "raise", type(error).__name__, _text_of(error)))
        _take_down(said, caught, here, step)
    return said


def _take_down(said, caught, here, step):
    for warning in caught:
        if issubclass(warning.category, dpcore.MistakeWarning):
            said.append(Said(step, "warn", warning.category.__name__, str(warning.message)))
    caught.clear()
    known = {message.text for message in said if message.how == "note"}
    for note in (note for model in here.models for note in _notes_of(model)):
        if note not in known:
            known.add(note)
            said.append(Said(step, "note", "", note))


def _text_of(error):
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    if isinstance(error, dpcore.Error) or "torch" in type(error).__module__:
        return f"{error}{notes}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{error}{notes} ({Path(last.filename).name}:{last.lineno})"


def _notes_of(model):
    reports = getattr(model, "_mistakes", None)
    return reports.notes if reports is not None else ()
