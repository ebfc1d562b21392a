"""Buckets that a schedule cuts into slices: the bits are those of whole buckets."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributed import BuiltinCommHookType

import dpcore
from dpcore.base.link import Speed
from dpcore.comm.launch.spawn import run_processes
from dpcore.reference.launches import Bucketed, Priority
from dpcore.tools.show.buckets import bucket_spans
from dpcore.tools.show.reading import read_run
from dpcore.tools.simulate import Gradients, predict
from tests.data_parallel.test_deaths import kill_this_process

SLICE = 1 << 10


def even(sizes, most=SLICE):
    begins = ((b, begin) for b, size in enumerate(sizes) for begin in range(0, size, most))
    return [(b, begin, min(begin + most, sizes[b])) for b, begin in begins]


class Sliced(Bucketed):
    def slices(self, sizes):
        return even(sizes)


class SlicedAcrossSteps(Priority):
    def slices(self, sizes):
        return even(sizes)


class TailsFirst(dpcore.LaunchSchedule):
    """The last slices first, the last of each bucket with another priority and another number of
    bytes, and each launch by itself."""

    def slices(self, sizes):
        return [
            (b, begin, end)
            for b, size in reversed(list(enumerate(sizes)))
            for begin, end in ((size // 32 * 16, size), (0, size // 32 * 16))
            if begin < end
        ]

    def bucket_ready(self, control, bucket):
        for number in reversed(range(len(control.slices(bucket)))):
            control.launch(bucket, priority=number, slice=number)

    def backward_end(self, control):
        control.wait_for_all()


class Credit(dpcore.LaunchSchedule):
    """One slice at a time."""

    def __init__(self):
        self.seen = []

    def slices(self, sizes):
        self._order = even(sizes)
        self._numbers = [
            (b, [each for each in self._order if each[0] == b].index((b, begin, end)))
            for b, begin, end in self._order
        ]
        return self._order

    def _send(self, control):
        while self.left and control.is_complete(self.left[0][0]) and control.in_flight == 0:
            bucket, number = self.left.pop(0)
            control.launch(bucket, slice=number)

    def bucket_ready(self, control, bucket):
        if bucket == 0:
            self.left = list(self._numbers)
        self._send(control)

    def slice_complete(self, control, bucket, slice):
        self.seen.append((bucket, slice))
        self._send(control)

    def backward_end(self, control):
        control.wait_for_all()


torch.manual_seed(1)
LAYERS = nn.Sequential(
    *(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise([24, 100, 24, 24, 7]))
)


def layers():
    """The same weights each time. Ranks that are threads share torch's generator: one that seeds
    it and draws from it here would at times draw what another seeded."""
    return copy.deepcopy(LAYERS)


def weights(comm, schedule, across=False, **options):
    model = dpcore.DataParallel(
        layers(), comm=comm, schedule=schedule, bucket_cap_mb=0.004, deterministic=True, **options
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if across:
        optimizer = dpcore.DistributedOptimizer(optimizer, model)
    for step in range(4):
        batch = torch.randn(8, 24, generator=torch.Generator().manual_seed(step * 8 + comm.rank))
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([value.flatten().clone() for value in model.state_dict().values()])


@pytest.mark.parametrize("world", [2, 3])
def test_slices_give_the_bits_of_whole_buckets(world):
    def body(comm):
        whole = weights(comm, "bucketed")
        for schedule in (Sliced(), TailsFirst(), Credit()):
            assert torch.equal(weights(comm, schedule), whole), type(schedule).__name__
        assert torch.equal(weights(comm, SlicedAcrossSteps(), across=True), whole)
        assert torch.equal(weights(comm, Sliced(), find_unused_parameters=True), whole)
        return len(whole)

    assert dpcore.spawn(body, world, mode="processes")[0] > 1000


def test_slices_travel_in_the_narrower_type_of_their_bucket():
    def body(comm):
        def narrow(schedule):
            model = dpcore.DataParallel(
                layers(), comm=comm, schedule=schedule, deterministic=True, bucket_cap_mb=0.004
            )
            model._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)
            model(torch.full((4, 24), 0.1 + comm.rank)).square().mean().backward()
            return torch.cat([p.grad.flatten().clone() for p in model.parameters()])

        assert torch.equal(narrow(Sliced()), narrow("bucketed"))

    dpcore.spawn(body, 2, mode="threads")


def test_nothing_is_given_out_before_its_last_slice_and_all_are_told():
    def body(comm):
        schedule = Credit()
        weights(comm, schedule)
        return schedule.seen

    for seen in dpcore.spawn(body, 2, mode="threads"):
        last = seen[len(seen) - 1 - seen[::-1].index((0, 0)) :]
        assert last == sorted(set(last))  # in order, each once
        assert len(last) > 10


def test_a_trace_has_each_slice(tmp_path):
    def body(comm):
        model = dpcore.DataParallel(layers(), comm=comm, schedule=Sliced(), bucket_cap_mb=0.004)
        for _ in range(3):
            model(torch.ones(4, 24)).sum().backward()
        with dpcore.trace(tmp_path / "run.json", comm=comm):
            model(torch.ones(4, 24)).sum().backward()

    dpcore.spawn(body, 2, mode="threads")
    run = read_run(tmp_path / "run.json")
    spans = bucket_spans(run, run.ranks[0])
    of_bucket = {}
    for span in spans:
        of_bucket.setdefault(span.bucket, []).append(span)
    assert max(map(len, of_bucket.values())) > 3
    for slices in of_bucket.values():
        assert len({span.operation for span in slices}) == len(slices)
        assert len({span.last_ready_ns for span in slices}) == 1
        assert slices[0].last_ready_ns <= slices[0].launch_ns


# ---- what is refused -----------------------------------------------------------------------------


class Cuts(Bucketed):
    def __init__(self, cut):
        self._cut = cut

    def slices(self, sizes):
        return self._cut(sizes)


def without_last(sizes):
    return even(sizes)[:-1]


REFUSED = {
    "overlaps": (
        lambda sizes: [*even(sizes), (0, 0, 16)],
        r"bytes 0 to \d+ of bucket 0.* another slice has the bytes up to \d+",
    ),
    "leaves out the end": (without_last, r"leaves out bytes"),
    "leaves out the begin": (
        lambda sizes: [(b, 16, size) for b, size in enumerate(sizes)],
        r"leaves out bytes",
    ),
    "names no bucket": (lambda sizes: [*even(sizes), (len(sizes), 0, 16)], r"names bucket \d+"),
    "goes beyond": (
        lambda sizes: [(b, 0, size + 16) for b, size in enumerate(sizes)],
        r"bytes 0 to \d+ of bucket 0.* which has",
    ),
    "is empty": (lambda sizes: [*even(sizes), (0, 0, 0)], r"bytes 0 to 0 of bucket 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_slices_that_do_not_fit_are_refused(name):
    cut, message = REFUSED[name]

    def body(comm):
        with pytest.raises(dpcore.Unsupported, match=message):
            dpcore.DataParallel(layers(), comm=comm, schedule=Cuts(cut))

    dpcore.spawn(body, 1, mode="threads")
    work = Gradients([4096] * 4, [0] * 4, [0.0], [0.04], [[0.01, 0.02, 0.03, 0.04]]).on(2)
    with pytest.raises(dpcore.Error, match=message):
        predict(work, Speed(1e9), Cuts(cut), 0.01)


def test_other_refusals():
    class Forgets(Sliced):
        def bucket_ready(self, control, bucket):
            control.launch(bucket, slice=0)

        def backward_end(self, control):
            pass

    class Names(Sliced):
        def bucket_ready(self, control, bucket):
            control.launch(bucket, slice=99)

    class Joins(Sliced):
        def bucket_ready(self, control, bucket):
            if bucket == 1:
                control.launch([0, 1])

    class Halves(Sliced):
        def phases(self):
            return ["reduce_scatter", "update", "all_gather"]

    def body(comm):
        def step(schedule):
            model = dpcore.DataParallel(layers(), comm=comm, schedule=schedule, bucket_cap_mb=0.004)
            model(torch.ones(4, 24)).sum().backward()

        with pytest.raises(dpcore.Error, match=r"has not launched slice 1 of bucket 0"):
            step(Forgets())
        with pytest.raises(dpcore.Error, match=r"launch of slice 99 of bucket 0 .*numbered from 0"):
            step(Names())
        with pytest.raises(dpcore.Error, match="cuts buckets, which then go by themselves"):
            step(Joins())
        with pytest.raises(dpcore.Unsupported, match="phases that begin with all_reduce"):
            step(Halves())
        with pytest.raises(dpcore.Unsupported, match="cuts a number in two"):
            step(Cuts(lambda sizes: even(sizes, 1022)))
        model = dpcore.DataParallel(layers(), comm=comm, schedule=Sliced())
        with pytest.raises(dpcore.Unsupported, match="a communication hook gets them whole"):
            model.register_comm_hook(None, lambda state, bucket: None)

    dpcore.spawn(body, 1, mode="threads")


def test_ranks_that_cut_differently_are_told():
    def body(comm):
        cut = Cuts(lambda sizes: even(sizes, 1024 if comm.rank == 0 else 2048))
        model = dpcore.DataParallel(layers(), comm=comm, schedule=cut, bucket_cap_mb=0.004)
        with pytest.raises(dpcore.Error, match=r"slice . of bucket . .*disagree") as caught:
            model(torch.ones(4, 24)).sum().backward()
        return type(caught.value).__name__

    assert "Mismatch" in dpcore.spawn(body, 2, mode="threads")


@pytest.mark.hurried
def test_a_rank_that_dies_between_two_slices():
    class Dies(Credit):
        def slice_complete(self, control, bucket, slice):
            if self.dies and (bucket, slice) == (0, 0):
                kill_this_process()
            super().slice_complete(control, bucket, slice)

    def body(comm):
        schedule = Dies()
        schedule.dies = False
        model = dpcore.DataParallel(layers(), comm=comm, schedule=schedule, bucket_cap_mb=0.004)
        model(torch.ones(4, 24)).sum().backward()
        schedule.dies = comm.rank == 1
        with pytest.raises(dpcore.PeerLost, match=r"slice \d+ of bucket \d+.* step 2: ") as caught:
            model(torch.ones(4, 24)).sum().backward()
        with pytest.raises(dpcore.PeerLost):
            model(torch.ones(4, 24)).sum().backward()
        return str(caught.value)

    ranks = run_processes(body, 2)
    assert "slice" in ranks[0].result
