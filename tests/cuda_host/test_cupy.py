"""backend="cupy" up to the first call of CUDA: what CuPy's communicator is called with."""

import importlib.util
import threading

import pytest
import torch

import dpcore
from dpcore.comm.communicators.cupy_nccl import CupyCommunicator


class Streams:
    """Notes in which order things are asked for."""

    address = 77

    def __init__(self, notes):
        self.notes = notes

    def begin(self):
        self.notes.append("begin")

    def end(self):
        self.notes.append("end")
        return "event"

    def wait(self, event):
        assert event == "event"
        self.notes.append("wait")

    def keep(self, tensors):
        self.notes.append(("keep", *(tensor.data_ptr() for tensor in tensors)))


class Nccl:
    """The module cupy.cuda.nccl, of which every call is a note."""

    cupy = 14  # the major version

    def __init__(self):
        self.notes = []
        outer = self

        class NcclCommunicator:
            def __init__(self, size, identity, rank):
                if not isinstance(identity, bytes if outer.cupy >= 14 else tuple):
                    raise TypeError(f"Argument 'commId' is a {type(identity).__name__}")
                assert len(identity) == 128
                assert outer.cupy >= 14 or all(-128 <= number < 128 for number in identity)
                outer.notes.append(("NcclCommunicator", size, identity, rank))

            def __getattr__(self, name):
                return lambda *arguments: outer.notes.append((name, *arguments))

        self.NcclCommunicator = NcclCommunicator

    def get_unique_id(self):
        identity = bytes(number % 256 for number in range(0, 384, 3))
        return identity if self.cupy >= 14 else tuple((n + 128) % 256 - 128 for n in identity)

    def groupStart(self):  # noqa: N802
        self.notes.append("groupStart")

    def groupEnd(self):  # noqa: N802
        self.notes.append("groupEnd")


@pytest.fixture(params=[13, 14], autouse=True)
def _cupy(request, monkeypatch):
    monkeypatch.setattr(Nccl, "cupy", request.param)


def notes_of(body, world=2, rank=1):
    """What a rank has called while it ran ``body``."""
    results = {}
    lock = threading.Lock()

    def rank_main(control):
        nccl = Nccl()
        comm = CupyCommunicator(control, nccl, torch.device("cpu"), Streams(nccl.notes))
        identity = nccl.notes[0][2]
        del nccl.notes[:]
        body(comm)
        with lock:
            results[comm.rank] = (identity, nccl.notes)

    dpcore.spawn(rank_main, world, mode="threads")
    identities = {identity for identity, _ in results.values()}
    assert len(identities) == 1, "the ranks meet under one name"
    return results[rank][1]


def test_reductions():
    x, y = torch.zeros(6), torch.zeros(3)
    at, to = x.data_ptr(), y.data_ptr()
    b = torch.zeros(4, dtype=torch.bfloat16)
    flags = torch.zeros(4, dtype=torch.bool)
    counts = torch.zeros(4, dtype=torch.int64)

    def body(comm):
        comm.all_reduce(x, "mean")
        comm.all_reduce(counts, "mean")
        comm.reduce(b, 1, "max")
        comm.reduce_scatter(y, x)
        comm.all_reduce(flags, "bor")

    notes = notes_of(body)
    order = ["begin", None, "end", "wait"]
    calls = [note for note in notes if isinstance(note, tuple)]
    assert [n if isinstance(n, str) else None for n in notes] == order * 5
    assert calls == [
        ("allReduce", at, at, 6, 7, 4, 77),
        ("allReduce", counts.data_ptr(), counts.data_ptr(), 4, 4, 4, 77),
        ("reduce", b.data_ptr(), b.data_ptr(), 4, 9, 2, 1, 77),
        ("reduceScatter", at, to, 3, 7, 0, 77),
        ("allReduce", flags.data_ptr(), flags.data_ptr(), 4, 1, 2, 77),
    ]


def test_copies_count_bytes():
    x, y = torch.zeros(6, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    at, part = x.data_ptr(), y.data_ptr()

    def body(comm):
        comm.broadcast(y, 0)
        comm.all_gather(x, y)
        comm.send(y, 1 - comm.rank)
        comm.recv(y, 1 - comm.rank)

    calls = [note for note in notes_of(body) if isinstance(note, tuple)]
    assert calls == [
        ("broadcast", part, part, 24, 0, 0, 77),
        ("allGather", part, at, 24, 0, 77),
        ("send", part, 24, 0, 0, 77),
        ("recv", part, 24, 0, 0, 77),
    ]


def test_groups_of_calls():
    x, y, own = torch.zeros(6), torch.zeros(6), torch.zeros(4)
    at, to = x.data_ptr(), y.data_ptr()

    def body(comm):
        comm.all_to_all(y, x)
        comm.all_gather(y, own[: 4 if comm.rank else 2], sizes=[2, 4])

    assert notes_of(body) == [
        "begin", "groupStart",
        ("send", at, 12, 0, 0, 77), ("recv", to, 12, 0, 0, 77),
        ("send", at + 12, 12, 0, 1, 77), ("recv", to + 12, 12, 0, 1, 77),
        "groupEnd", "end", "wait",
        "begin", "groupStart",
        ("broadcast", to, to, 8, 0, 0, 77), ("broadcast", own.data_ptr(), to + 8, 16, 0, 1, 77),
        "groupEnd", "end", "wait",
    ]  # fmt: skip


def test_parts_of_a_reduction_that_differ():
    x, y = torch.zeros(6), torch.zeros(4)
    at, to = x.data_ptr(), y.data_ptr()

    def body(comm):
        comm.reduce_scatter(y[: 4 if comm.rank else 2], x, "max", sizes=[2, 4])
        comm.reduce_scatter(y[: 4 if comm.rank else 0], x[:4], sizes=[0, 4])

    assert notes_of(body) == [
        "begin", "groupStart",
        ("reduce", at, to, 2, 7, 2, 0, 77), ("reduce", at + 8, to, 4, 7, 2, 1, 77),
        "groupEnd", "end", "wait",
        "begin", "groupStart", ("reduce", at, to, 4, 7, 0, 1, 77), "groupEnd", "end", "wait",
    ]  # fmt: skip


def test_gather_and_scatter():
    whole, own = torch.zeros(6), torch.zeros(4)
    at, mine = whole.data_ptr(), own.data_ptr()

    def body(comm):
        part = own[: 4 if comm.rank else 2]
        at_root = whole if comm.rank == 1 else None
        comm.gather(at_root, part, 1, sizes=[2, 4])
        comm.scatter(part, at_root, 1, sizes=[2, 4])

    assert notes_of(body, rank=1) == [
        "begin", "groupStart", ("send", mine, 16, 0, 1, 77),
        ("recv", at, 8, 0, 0, 77), ("recv", at + 8, 16, 0, 1, 77), "groupEnd", "end", "wait",
        "begin", "groupStart", ("recv", mine, 16, 0, 1, 77),
        ("send", at, 8, 0, 0, 77), ("send", at + 8, 16, 0, 1, 77), "groupEnd", "end", "wait",
    ]  # fmt: skip
    assert notes_of(body, rank=0) == [
        "begin", "groupStart", ("send", mine, 8, 0, 1, 77), "groupEnd", "end", "wait",
        "begin", "groupStart", ("recv", mine, 8, 0, 1, 77), "groupEnd", "end", "wait",
    ]  # fmt: skip


def test_groups_of_ranks():
    x = torch.zeros(3)

    def body(comm):
        assert (comm.split(None if comm.rank else 0) is None) == (comm.rank == 1)
        alone = comm.split(comm.rank)
        alone.all_reduce(x)
        alone.close()
        with pytest.raises(dpcore.Error, match="finalized"):
            alone.all_reduce(x)
        comm.all_reduce(x)

    notes = notes_of(body)
    assert notes[0][:2] == ("NcclCommunicator", 1) and notes[0][3] == 0
    reduced = ("allReduce", x.data_ptr(), x.data_ptr(), 3, 7, 0, 77)
    once = ["begin", reduced, "end", "wait"]
    assert notes[1:] == [*once, ("destroy",), *once]


def test_memory_is_kept_for_work_that_nobody_waits_for():
    whole, part = torch.zeros(4), torch.zeros(2)

    def body(comm):
        comm.all_gather(whole, part, async_op=True)
        comm.all_gather(whole, part)  # the current stream waits: nobody needs to keep it

    kept = [note for note in notes_of(body) if note[0] == "keep"]
    assert kept == [("keep", whole.data_ptr(), part.data_ptr())]


def test_a_group_of_calls_ends_when_one_of_them_fails():
    def body(comm):
        def fails(*_):
            raise RuntimeError("no such peer")

        comm._comm.send = fails
        with pytest.raises(RuntimeError, match="no such peer"):
            comm.all_to_all(torch.zeros(2), torch.zeros(2))

    assert notes_of(body) == ["begin", "groupStart", "groupEnd"]


def test_asynchronous_work_waits_when_it_is_told_to():
    def body(comm):
        work = comm.all_reduce(torch.zeros(2), async_op=True)
        with pytest.raises(dpcore.Unsupported, match="no deadlines"):
            work.wait(timeout=1)
        work.wait()

    assert [note for note in notes_of(body) if isinstance(note, str)] == ["begin", "end", "wait"]


def test_what_is_refused():
    def body(comm):
        with pytest.raises(dpcore.Unsupported, match="mean of bool is not possible with NCCL"):
            comm.all_reduce(torch.zeros(2, dtype=torch.bool), "mean")
        with pytest.raises(dpcore.Unsupported, match="not contiguous"):
            comm.broadcast(torch.zeros(3, 3).t())
        with pytest.raises(dpcore.Unsupported, match="output has 3 elements, 4 are needed"):
            comm.all_gather(torch.zeros(3), torch.zeros(2))
        with pytest.raises(dpcore.Unsupported, match="sizes has 1 entries, 2 are needed"):
            comm.reduce_scatter(torch.zeros(2), torch.zeros(4), sizes=[2])
        with pytest.raises(dpcore.Unsupported, match="input has 3 elements, 2 are needed"):
            comm.gather(torch.zeros(4) if comm.rank == 0 else None, torch.zeros(3), sizes=[2, 2])
        with pytest.raises(ValueError, match=r"output must be (given|None) here"):
            comm.gather(None if comm.rank == 0 else torch.zeros(4), torch.zeros(2))
        with pytest.raises(ValueError, match=r"root 2 is not a rank: 0\.\.1"):
            comm.scatter(torch.zeros(2), None, 2)
        with pytest.raises(dpcore.Unsupported, match=r"on meta, this communicator works on cpu"):
            comm.all_reduce(torch.zeros(2, device="meta"))
        comm.close()
        with pytest.raises(dpcore.Error, match="finalized"):
            comm.all_reduce(torch.zeros(2))

    assert notes_of(body) == [("destroy",)]


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
def test_without_cupy_it_says_what_to_install():
    with pytest.raises(dpcore.Unsupported, match=r"needs CuPy .*cupy-cuda13x"):
        dpcore.init("cupy", rank=0, world_size=1)
