"""bucket_cap_mb="auto": which buckets it chooses from what was measured, and that nothing else
changes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dpcore
from dpcore.ddp.wrapper.rebuilding import CAPS_MB, Speed, best_caps, measured_speed
from dpcore.reference.buckets import plan_buckets
from tests.data_parallel.models import OPTIMIZERS, assert_same_values, train, train_alone

MIB = 1 << 20


def end_of(cap, sizes, ready, speed):
    """Second by second: each bucket is sent when it is ready and the one before it is through."""
    free = 0.0
    for bucket in plan_buckets(sizes, [0] * len(sizes), range(len(sizes)), [cap]):
        ready_at = [ready[number] for number in bucket]
        free = (
            max([free, *ready_at]) + speed.share + sum(sizes[n] for n in bucket) / speed.bandwidth
        )
    return free + speed.latency


@settings(deadline=None)  # the machine may be busy with something else
@given(
    st.lists(st.tuples(st.integers(1, 8 * MIB), st.floats(0, 0.05)), min_size=1, max_size=20),
    st.builds(Speed, st.floats(1e-6, 1e-2), st.floats(0, 1e-2), st.floats(1e6, 1e11)),
)
def test_no_other_size_is_over_earlier(gradients, speed):
    sizes = [size for size, _ in gradients]
    ready = [sum(wait for _, wait in gradients[: i + 1]) for i in range(len(gradients))]
    kinds, order = [0] * len(sizes), range(len(sizes))
    (chosen,) = best_caps(sizes, kinds, order, ready, speed)
    ends = {int(cap * MIB): end_of(int(cap * MIB), sizes, ready, speed) for cap in CAPS_MB}
    enough = min(ends.values()) * 1.01
    assert ends[chosen] <= enough
    assert all(end > enough for cap, end in ends.items() if cap > chosen)


def test_dear_operations_make_large_buckets_and_late_gradients_small_ones():
    sizes, kinds, order = [MIB] * 16, [0] * 16, range(16)
    at_once, one_by_one = [0.0] * 16, [0.01 * number for number in range(16)]
    assert best_caps(sizes, kinds, order, at_once, Speed(1e-3, 1e-3, 1e9)) == [100 * MIB]
    assert best_caps(sizes, kinds, order, one_by_one, Speed(1e-3, 1e-5, 1e8)) == [MIB]
    assert best_caps(sizes, kinds, order, one_by_one, Speed(0.1, 0.1, 1e8))[0] > 4 * MIB


@pytest.mark.parametrize("world", (1, 2, 3))
@pytest.mark.parametrize("options", ({}, {"static_graph": True, "find_unused_parameters": True}))
def test_training_is_the_same_and_all_ranks_choose_alike(world, options):
    def body(comm):
        model = train(comm, OPTIMIZERS["momentum"], bucket_cap_mb="auto", **options)
        assert_same_values(model.module, train_alone(OPTIMIZERS["momentum"]))
        assert model.bucket_report().rebuilt
        return model.bucket_bytes_cap

    caps = dpcore.spawn(body, world, mode="threads")
    assert len(set(caps)) == 1 and caps[0] / MIB in CAPS_MB


@pytest.mark.quiet
def test_a_slow_link_is_measured_as_such():
    def body(comm):
        return measured_speed(comm)

    first, second = dpcore.spawn(body, 2, mode="threads", link="50mbit,20ms")
    assert first == second
    assert first.latency >= 20e-3
    assert first.share < first.latency
    assert first.bandwidth <= 1.1 * 50e6 / 8


def test_what_auto_does_not_go_with():
    def body(comm):
        module = nn.Linear(2, 1)
        for options, text in (
            ({"bucket_cap_mb": "automatic"}, "'automatic': pass a number of MiB"),
            ({"bucket_cap_mb": "auto", "bucket_cap_mb_list": [1.0]}, "excludes bucket_cap_mb"),
            (
                {"bucket_cap_mb": "auto", "find_unused_parameters": True},
                "and find_unused",
            ),
        ):
            with pytest.raises(dpcore.Unsupported, match=text):
                dpcore.DataParallel(module, comm=comm, **options)

    dpcore.spawn(body, 1, mode="threads")


def test_buckets_that_have_just_been_planned_anew_report_no_times():
    def body(comm):
        layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        model = dpcore.DataParallel(layers, comm=comm, bucket_cap_mb=0.0005)
        model(torch.ones(2, 8)).sum().backward()
        out = model(torch.ones(2, 8))
        planned = model.bucket_report()
        assert planned.rebuilt
        out.sum().backward()
        return [
            (line.ready_ms, line.launched_ms, line.complete_ms)
            for report in (planned, model.bucket_report())
            for line in report
        ]

    for times in dpcore.spawn(body, 2, mode="threads"):
        planned, reduced = times[: len(times) // 2], times[len(times) // 2 :]
        assert planned == [(None, None, None)] * len(planned)
        assert all(0 <= ready <= sent <= done for ready, sent, done in reduced)
