"""How many threads torch has in a rank, and which ranks share their processors."""

import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dpcore
from dpcore.comm.launch import threads

PROCESSORS = len(os.sched_getaffinity(0))


class Called(TorchDispatchMode):
    """Notes which functions were called, and for which types."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        out = function(*arguments, **(options or {}))
        self.seen.add((str(function.overloadpacket).removeprefix("aten."), out.dtype, out.numel()))
        return out


def kernels_chosen_by(comm):
    """What is called when a rank meets others, and when a model is wrapped, as over a group that
    is torch's alone."""
    torch.backends.mkl.is_available = lambda: True
    dpcore.finalize()
    seen = []
    for step in (dpcore.init, lambda: dpcore.DataParallel(torch.nn.Linear(2, 2))):
        threads._has_chosen = False
        with Called() as called:
            step()
        seen.append(called.seen)
    return seen


def test_mkl_chooses_each_kernel_on_one_thread():
    """Where several threads make the first call together, one of them may compute with low accuracy
    (pytorch#188792), and a training has other bits once in some hundred times."""
    ((of_init, of_model),) = dpcore.spawn(kernels_chosen_by, 1)
    for name in ("sin", "exp", "tanh", "sqrt", "erf", "log"):
        for dtype in (torch.float32, torch.float64):
            assert (name, dtype, 1) in of_init & of_model


@pytest.fixture
def undecided(monkeypatch):
    """A program whose torch has as many threads as there are processors."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "_before", None)
    monkeypatch.setattr(threads, "_given", None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8))
    now = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(now)


def test_ranks_divide_the_processors(undecided):
    for sharers, share in ((1, 8), (2, 4), (3, 2), (9, 1), (2, 4), (1, 8)):
        threads.share_processors(sharers)
        assert torch.get_num_threads() == share


def test_no_rank_is_given_more_than_it_had(undecided):
    torch.set_num_threads(3)
    threads.share_processors(2)
    assert torch.get_num_threads() == 3
    threads.share_processors(4)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(5)  # by the program, for the next communicator too
    threads.share_processors(1)
    assert torch.get_num_threads() == 5


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_what_the_environment_says_stands(undecided, monkeypatch, name):
    monkeypatch.setenv(name, "8")
    threads.share_processors(4)
    assert torch.get_num_threads() == 8


def test_ranks_of_mpi_find_out_who_shares_their_processors():
    own = threads.usable_processors()
    elsewhere = bytes([own[0] ^ 1]) + own[1:]
    nothing = own[:16] + bytes(128)
    assert threads.sharers_among([own, elsewhere, own, nothing], rank=0) == 2
    assert threads.sharers_among([elsewhere, own], rank=1) == 1


def test_spawned_ranks_take_their_share_and_what_the_environment_says(monkeypatch):
    def seen(comm):
        return torch.get_num_threads()

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    share = max(1, PROCESSORS // 2)
    assert all(1 <= found <= share for found in dpcore.spawn(seen, 2))
    monkeypatch.setenv("OMP_NUM_THREADS", str(PROCESSORS + 1))
    assert dpcore.spawn(seen, 2) == [PROCESSORS + 1] * 2


@pytest.mark.skipif(PROCESSORS < 2, reason="needs a processor for each of two ranks")
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_pinned_ranks_share_nothing(transport, tmp_path):
    where = f"file://{tmp_path / 'store'}" if transport == "tcp" else f"pinned-{os.getpid()}"

    def body(comm):
        rank, together = comm.rank, comm._sharers
        dpcore.finalize()
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
        torch.set_num_threads(7)
        again = dpcore.init(rank=rank, world_size=2, transport=transport, init_method=where)
        return together, again._sharers, torch.get_num_threads()

    assert dpcore.spawn(body, 2) == [(2, 1, 7)] * 2
