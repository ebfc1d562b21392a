"""dp.spawn: what ranks are given, what they import, and how their errors come back."""

import copy
import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dpcore
from dpcore.comm.launch import session
from dpcore.comm.launch.rank_processes import RankProcesses


@pytest.mark.parametrize(
    ("arguments", "said"),
    [((print, "2"), "world_size: expected an integer, not '2'"), ((3, 2), "a function .*, not 3")],
)
def test_spawn_says_what_it_was_not_given(arguments, said):
    with pytest.raises(TypeError, match=f"spawn: .*{said}"):
        dpcore.spawn(*arguments)


def test_ranks_have_the_environment_of_the_moment(monkeypatch):
    """And not the one in which the fork server began."""

    def seen(comm):
        return os.environ.get("OF_THE_MOMENT")

    for value in (None, "one", "two", None):
        if value is None:
            monkeypatch.delenv("OF_THE_MOMENT", raising=False)
        else:
            monkeypatch.setenv("OF_THE_MOMENT", value)
        assert dpcore.spawn(seen, 2) == [value] * 2


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 begins where it stands")
def test_ranks_import_what_the_program_does_and_not_what_lies_beside_it(tmp_path):
    """Python's fork server begins to look in the current directory."""
    for name in ("dpcore", "random", "types"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from where it stands')")
    code = "import dpcore\n\ndef where(comm):\n    return dpcore.__file__\n\n"
    code += "assert dpcore.spawn(where, 2) == [dpcore.__file__] * 2"
    program = tmp_path / "elsewhere" / "program.py"
    program.parent.mkdir()
    program.write_text(code)
    root = str(Path(dpcore.__file__).parents[1])
    out = subprocess.run(
        [sys.executable, program], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    assert out.returncode == 0, out.stderr


def test_ranks_are_given_a_schedule_of_ones_own():
    """And give it back: by its moves and the promises that it was made with."""
    moves = [(0, 1, 0, 0, True), (1, 0, 1, 0, False)]
    own = dpcore.Schedule("by hand", "all_reduce", 2, 1, moves, ordered=True)

    def reduced(comm, schedule):
        tensor = torch.full((4,), comm.rank + 1.0)
        comm.all_reduce(tensor, algorithm=schedule)
        return tensor.tolist(), schedule

    for result, back in dpcore.spawn(reduced, 2, own):
        assert result == [3.0] * 4
        for one in (back, pickle.loads(pickle.dumps(own)), copy.deepcopy(own)):
            assert repr(one) == repr(own)
            assert (one.moves, one.root, one.ordered) == (own.moves, own.root, own.ordered)


class OnlyHere:
    """Can be pickled, and can't be made again from that."""

    def __reduce__(self):
        return getattr, (os, "of_no_other_process")


def test_what_a_rank_cannot_unpickle_is_its_error():
    with pytest.raises(AttributeError, match="of_no_other_process") as raised:
        dpcore.spawn(print, 2, OnlyHere())
    assert "cloudpickle.loads" in str(raised.value.__cause__)


class Coded(Exception):
    """Can be pickled, and not made again: its arguments are others than those of __init__."""

    def __init__(self, code, text):
        super().__init__(text)
        self.code = code


@pytest.mark.parametrize("back", ("error", "result"))
def test_what_the_caller_cannot_unpickle_is_told_by_its_text(back):
    def body(comm):
        if comm.rank == 1 and back == "error":
            raise Coded(3, "no more data")
        return OnlyHere() if comm.rank == 1 else None

    with pytest.raises(dpcore.Error, match=f"rank 1: the {back}.*can't be unpickled") as raised:
        dpcore.spawn(body, 2)
    cause = str(raised.value.__cause__)
    assert "(rank 1 of 2)" in cause
    if back == "error":
        assert "Coded: no more data" in str(raised.value)
        assert "in body" in cause and "Coded: no more data" in cause


def test_the_error_of_a_rank_is_told_where_finalize_raises_as_well():
    def body(comm):
        def check(communicator):
            raise RuntimeError("of finalize")

        session.call_before_finalize(check)
        raise ValueError("no more data")

    with pytest.raises(ValueError, match="no more data") as raised:
        dpcore.spawn(body, 2)
    assert "in body" in str(raised.value.__cause__)


class PickledOnce:
    """Reaches rank 0 and keeps the next one from being started."""

    is_pickled = False

    def __reduce__(self):
        if self.is_pickled:
            raise ValueError("no second time")
        self.is_pickled = True
        return str, ()


def waits_for_its_launcher(pipe, rank, argument):
    pipe.recv()


def test_where_one_rank_cannot_be_started_the_others_are_ended():
    with pytest.raises(ValueError, match="no second time"):
        RankProcesses(waits_for_its_launcher, 2, (PickledOnce(),))
    assert not multiprocessing.active_children()
