"""``dpcore.monitor``: its numbers against those of a trace, whom it names, what it costs."""

import contextlib
import copy
import statistics
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import dpcore as dp
from dpcore.recorder.step_figures import RankSteps, Step, figures_of, line_of, slow_rank, summary
from tests.data_parallel.models import seeded
from tests.faults.tries import in_time, timed
from tests.ranks.groups import in_group

MS = 1e-3


class Sleep(torch.autograd.Function):
    """Takes a time in forward, and again in backward."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class Layers(nn.Module):
    """Three layers that sleep besides: six times ``seconds`` in a step."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds
        self.layers = nn.ModuleList([seeded(lambda: nn.Linear(30, 30)) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(Sleep.apply(x, self.seconds))
        return x


def train(model, steps, between=0.0):
    for _ in range(steps):
        model.zero_grad()
        model(torch.ones(2, 30, requires_grad=True)).sum().backward()
        time.sleep(between)


def watched(comm, steps, seconds=1 * MS, between=0.0, every=50, **options):
    """The figures of each line on rank 0, and the last ones of every rank."""
    lines = []
    model = dp.DataParallel(Layers(seconds), comm=comm, **options)
    with dp.monitor(model, every, lines.append) as monitor:
        train(model, steps, between)
    return lines, monitor.last


def on_threads(body, world, **options):
    return dp.spawn(body, world, mode="threads", **options)


# ---- who is slow -------------------------------------------------------------------------------


@timed
@pytest.mark.parametrize(("world", "slow"), [(2, 0), (4, 2)])
def test_a_rank_that_is_20_percent_slower_is_named_within_20_steps(world, slow):
    def body(comm):
        return watched(comm, 20, 5 * MS * (1.2 if comm.rank == slow else 1))

    results = on_threads(body, world)
    for _, last in results:
        assert last["step"] == 16
        in_time(last["slow_rank"] == slow, line_of(last))
        in_time(0.1 < last["skew"] < 0.35, line_of(last))
        assert f"rank {slow} is slow: its forward and backward take" in line_of(last)
    assert results[0][0] == [results[0][1]]  # one line, on rank 0
    assert all(not lines for lines, _ in results[1:])


@timed
def test_nobody_is_named_in_20_runs_of_ranks_that_are_alike():
    results = [on_threads(lambda comm: watched(comm, 18), 4)[0][1] for _ in range(20)]
    assert [last["slow_rank"] for last in results] == [None] * 20
    assert "no rank is slow" in line_of(results[0])


@timed
def test_a_rank_that_is_slow_between_its_steps_is_named_for_that():
    def body(comm):
        return watched(comm, 20, between=(15 if comm.rank == 1 else 5) * MS)[1]

    last = on_threads(body, 2)[0]
    in_time(last["slow_rank"] == 1 and last["ranks"][1]["between_ms"] > 15, line_of(last))
    assert "rank 1 is slow: what it does between backward and forward" in line_of(last)


@timed
def test_who_becomes_slow_later_is_named_then():
    def body(comm):
        lines = []
        model = dp.DataParallel(Layers(5 * MS), comm=comm)
        monitor = dp.monitor(model, 20, lines.append)
        train(model, 22)
        model.module.seconds *= 1.5 if comm.rank == 1 else 1
        train(model, 20)
        monitor.close()
        return [(line["step"], line["slow_rank"]) for line in lines]

    lines = on_threads(body, 2)[0]
    assert [step for step, _ in lines] == [16, 20, 40]
    in_time([rank for _, rank in lines] == [None, None, 1], str(lines))


def ranks_of(*compute, spread=0.1, steps=20):
    found = []
    for middle in compute:
        values = [middle + spread * (number - steps // 2) for number in range(steps)]
        found.append(summary([Step(20, value, 1, 2, 8) for value in values]))
    return found


def test_noise_and_small_differences_name_nobody():
    assert slow_rank(ranks_of(10, 12)).rank == 1
    assert slow_rank(ranks_of(10, 10.9)) is None  # by less than a tenth
    assert slow_rank(ranks_of(10, 12, spread=0.5)) is None  # medians may be the same
    assert slow_rank(ranks_of(10, 12, steps=6)) is None  # too few
    assert slow_rank(ranks_of(10)) is None
    two_of_four = slow_rank(ranks_of(10, 12.5, 10, 13))
    assert (two_of_four.rank, two_of_four.where) == (3, "compute")


# ---- the numbers -------------------------------------------------------------------------------


@timed
@pytest.mark.parametrize("schedule", ["bucketed", "sequential"])
def test_figures_are_those_of_a_trace(schedule):
    """Over a slow link, so that there is something to see."""

    def body(comm):
        model = dp.DataParallel(Layers(1 * MS), comm=comm, schedule=schedule, bucket_cap_mb=0.004)
        train(model, 3)
        traced = []
        with dp.monitor(model, to=None) as monitor:
            for _ in range(12):
                with dp.trace(comm=comm) as trace:
                    train(model, 1)
                traced.append((trace.exposed_ms, trace.communication_ms))
            figures = monitor.figures()
        expected = [statistics.median(values) for values in zip(*traced, strict=True)]
        mine = figures["ranks"][comm.rank]
        assert mine["exposed_ms"] == pytest.approx(expected[0], rel=0.15, abs=0.15)
        assert mine["communication_ms"] == pytest.approx(expected[1], rel=0.15, abs=0.15)
        assert mine["bytes"] == sum(p.numel() * 4 for p in model.parameters())
        assert mine["steps"] == 12
        assert figures["overlap"] == pytest.approx(
            1 - figures["exposed_ms"] / figures["communication_ms"]
        )
        return figures["overlap"], mine["compute_ms"], mine["step_ms"] - mine["exposed_ms"]

    results = on_threads(body, 2, link="20mbit,100us", transport="auto")
    for overlap, computed, without_waits in results:
        assert overlap > 0.2 if schedule == "bucketed" else overlap < 0.1
        assert computed > 6  # six naps of 1 ms
        in_time(computed < 1.15 * without_waits + 0.8, str(results))  # and no waiting


def test_across_steps_and_hooks_and_groups_without_a_core():
    def body(comm):
        model = dp.DataParallel(Layers(0.3 * MS), comm=comm, schedule="zero1")
        optimizer = dp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        with dp.monitor(model, to=None) as monitor:
            for _ in range(12):
                train(model, 1)
                optimizer.step()
            across = monitor.figures()
        hooked = dp.DataParallel(Layers(0.3 * MS), comm=comm)
        hooked.register_comm_hook(comm, average)
        with dp.monitor(hooked, to=None) as monitor:
            train(hooked, 12)
            with_hook = monitor.figures()
        alike = SimpleNamespace(
            rank=comm.rank,
            world_size=2,
            all_reduce=lambda t, op, async_op: comm.all_reduce(t, op, async_op=async_op),
            broadcast=comm.broadcast,
            all_gather=comm.all_gather,
        )
        own = dp.DataParallel(Layers(0.3 * MS), comm=alike)
        with dp.monitor(own, to=None) as monitor:
            train(own, 20)
        for figures in (across, with_hook, monitor.last):
            assert figures["communication_ms"] > 0
            assert 1.5 < figures["compute_ms"] < figures["step_ms"]
        size = sum(p.numel() * 4 for p in model.parameters())
        assert across["bytes"] == 2 * size  # a reduce_scatter and an all_gather
        assert with_hook["bytes"] == size

    on_threads(body, 2)


def average(comm, bucket):
    buffer = bucket.buffer()
    return comm.all_reduce(buffer, "mean", async_op=True).get_future().then(lambda _: buffer)


@timed
def test_accumulation_evaluation_and_batch_norm_count_where_they_belong():
    def body(comm):
        module = nn.Sequential(Layers(1 * MS), nn.BatchNorm1d(30))
        model = dp.DataParallel(module, comm=comm)
        with dp.monitor(model, to=None) as monitor:
            for step in range(14):
                with model.no_sync():
                    train(model, 1)
                train(model, 1)
                if step % 7 == 3:
                    with torch.no_grad():
                        model(torch.ones(2, 30))
            figures = monitor.figures()
        assert figures["steps"] == 13
        assert figures["step"] == 14
        return figures["compute_ms"]

    computed = on_threads(body, 2)
    assert min(computed) > 12  # of both batches
    in_time(max(computed) < 18, str(computed))


def test_ranks_without_inputs_and_the_lines_after_them():
    def body(comm):
        model = dp.DataParallel(Layers(0.1 * MS), comm=comm)
        lines = []
        with dp.monitor(model, 5, lines.append):
            for _ in range(2):
                for _ in model.until_all_end(range(12 + 5 * comm.rank)):
                    train(model, 1)
        return [line["step"] for line in lines]

    assert on_threads(body, 2)[0] == [5, 10, 17, 20, 25]


# ---- where lines go ----------------------------------------------------------------------------


class Writer:
    def __init__(self):
        self.scalars = {}

    def add_scalar(self, name, value, step):
        self.scalars[name, step] = value


def test_where_lines_go(capsys):
    def body(comm):
        model, writer = dp.DataParallel(Layers(0), comm=comm), Writer()
        for to in ("stdout", writer):
            with dp.monitor(model, 8, to):
                train(model, 10)
        return writer.scalars

    scalars, none = on_threads(body, 2)
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert printed.startswith("step 8: ")
    assert " of communication, overlap " in printed
    assert " KiB; " in printed
    names = "step_ms compute_ms exposed_ms communication_ms overlap bytes skew slow_rank"
    assert {name for name, _ in scalars} == {f"dpcore/{name}" for name in names.split()}
    assert {step for _, step in scalars} == {18}  # its eighth
    assert none == {}


def test_a_world_of_one_and_a_line_at_once(capsys):
    with contextlib.closing(dp.init(rank=0, world_size=1)):
        model = dp.DataParallel(Layers(0))
        with dp.monitor(model, 3) as monitor:
            assert monitor.last is None
            train(model, 5)
            assert monitor.figures()["steps"] == 4
        lines = capsys.readouterr().out.splitlines()
        assert [line.partition(":")[0] for line in lines] == ["step 3", "step 5"]
        assert "step 5" in repr(monitor)
        assert "slow" not in repr(monitor)
        dp.finalize()


# ---- ends --------------------------------------------------------------------------------------


def test_ends():
    def body(comm):
        model = dp.DataParallel(Layers(0), comm=comm)
        monitor = dp.monitor(model, 8, to=None)
        with pytest.raises(dp.Error, match="has a monitor already"):
            dp.monitor(model)
        train(model, 9)  # the ninth forward sends the line that nobody has taken yet
        monitor.close()
        assert monitor.last["step"] == 8
        monitor.close()
        with pytest.raises(dp.Error, match="this one is closed"):
            monitor.figures()
        with pytest.raises(KeyError), dp.monitor(model, 8, to=None) as monitor:
            train(model, 8)
            raise KeyError
        assert monitor.last is None
        with dp.monitor(model, 4, to=None) as monitor:  # fewer steps than a line needs
            train(model, 3)
        assert monitor.last is None
        with dp.monitor(model, 4, to=None) as monitor:
            train(model, 3)
            model.refresh()
            train(model, 6)
        assert monitor.last["step"] == 4
        assert not model._forward_pre_hooks
        assert copy.copy(monitor).last is None

    on_threads(body, 2)


def test_ranks_that_disagree_are_told():
    def body(comm):
        model = dp.DataParallel(Layers(0), comm=comm)
        with pytest.raises(dp.Mismatch, match="every 5 to 6 steps, after step 0 to 0"):
            dp.monitor(model, 5 + comm.rank)
        train(model, 2)  # and training goes on

    on_threads(body, 2)


def test_a_rank_that_dies_is_told_by_training_itself():
    def body(comm):
        model = dp.DataParallel(Layers(0), comm=comm)
        with dp.monitor(model, 4, to=None):
            train(model, 4)
            if comm.rank == 1:
                raise KeyError("gone")
            with pytest.raises(dp.PeerLost, match="gone"):
                train(model, 10)
            raise KeyError("gone")

    with pytest.raises(KeyError):
        on_threads(body, 2)


def test_what_it_does_not_take():
    with pytest.raises(TypeError, match="is needed, not a Linear"):
        dp.monitor(nn.Linear(1, 1))
    with contextlib.closing(dp.init(rank=0, world_size=1)):
        model = dp.DataParallel(nn.Linear(1, 1))
        for steps in (0, -1, 2.5, True, "50"):
            with pytest.raises(dp.Unsupported, match="log_every_n_steps="):
                dp.monitor(model, steps)
        with pytest.raises(dp.Unsupported, match="to='tensorboard'"):
            dp.monitor(model, to="tensorboard")
        dp.finalize()


# ---- what it costs -----------------------------------------------------------------------------


@timed
def test_it_costs_less_than_half_a_percent_of_a_step_of_10_ms():
    """The processor time of its calls: those of most steps, and those that begin and end a line.
    Other programs and the other rank's thread don't count."""

    def body(comm):
        model = dp.DataParallel(Layers(0), comm=comm)
        taken = []
        with dp.monitor(model, 10, to=None) as monitor:
            inner = monitor._step_begins
            monitor._hook.remove()

            def timed(*arguments):
                begin = time.thread_time()
                inner(*arguments)
                taken.append(time.thread_time() - begin)

            monitor._hook = model.register_forward_pre_hook(timed)
            train(model, 201)
        usual = statistics.median(taken)
        of_lines = [taken[at] + taken[at + 1] for at in range(10, 200, 10)]
        return usual, statistics.median(of_lines)

    usual, line = on_threads(body, 2)[0]
    assert usual + line / 50 < 0.005 * 10 * MS, (usual, line)


def test_figures_of_ranks_without_steps():
    figures = figures_of(3, [RankSteps(), RankSteps()])
    assert (figures["steps"], figures["slow_rank"], figures["overlap"]) == (0, None, None)
    assert line_of(figures).startswith("step 3: 0.000 ms")


def test_torchs_ddp_is_watched_until_the_end_of_the_block():
    """Its reducer notes every step meanwhile, and one of a hundred before and after."""

    def body():
        model = nn.parallel.DistributedDataParallel(Layers(1 * MS))
        rates = []
        change = model._set_ddp_runtime_logging_sample_rate
        model._set_ddp_runtime_logging_sample_rate = lambda rate: (rates.append(rate), change(rate))
        lines = []
        with dp.monitor(model, 8, lines.append) as monitor:
            with pytest.raises(dp.Error, match="has a monitor already"):
                dp.monitor(model)
            train(model, 18)
        train(model, 2)
        assert rates == [1, 100] and [line["step"] for line in lines] == [8, 16][: len(lines)]
        return monitor.last

    last, other = in_group(body, 2, backend="gloo")
    assert last["ranks"] == other["ranks"] and len(last["ranks"]) == 2
    assert 6 < last["compute_ms"] <= last["step_ms"]
    assert 0 <= last["exposed_ms"] <= last["communication_ms"] > 0
    assert last["bytes"] == 4 * 3 * (30 * 30 + 30)


def test_a_step_of_local_updates_is_the_mean_of_its_interval():
    def body(comm):
        module = Layers(1 * MS)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with (
            dp.LocalSGD(module, optimizer, 4, comm=comm) as block,
            dp.monitor(block, 8, to=None) as monitor,
        ):
            for _ in range(20):
                train(module, 1)
                optimizer.step()
        return monitor.last

    last, _ = dp.spawn(body, 2, mode="threads")
    assert last["bytes"] == 3 * (30 * 30 + 30)  # a quarter of 4 bytes each
    assert last["communication_ms"] > 0 and 6 < last["compute_ms"] <= last["step_ms"]
