"""The simulator of files of torch's profiler: which it reads, and what it says they lack."""

import json

import pytest

from dpcore.__main__ import main
from dpcore.base.link import Speed
from dpcore.errors import Error
from dpcore.tools.simulate import gradients_of, predict
from tests.show.profiles import GLOO, gpu_steps, span, write

LEAF = "torch::autograd::AccumulateGrad"
NODE = f"autograd::engine::evaluate_function: {LEAF}"


def gloo_step(begin, number, buckets, searches=False):
    """Forward 0 to 5, backward 5 to 15 with eight gradients of 1 MiB, one each ms from 6 on.
    ``buckets``: after how many gradients each of them is sent."""
    b, dims = begin, {"Input Dims": [[1 << 18]], "Input type": ["float"]}
    events = [
        span(f"ProfilerStep#{number}", "user_annotation", 1, b, b + 30),
        span("DistributedDataParallel.forward", "user_annotation", 1, b, b + 5),
    ]
    sent = 0
    for gradient in range(8):
        at = b + 6 + gradient
        events += [
            span(NODE, "cpu_op", 1, at - 1, at + 0.2),
            span(LEAF, "cpu_op", 1, at - 0.1, at, **dims),
        ]
        if gradient + 1 in buckets:
            size = [[[(gradient + 1 - sent) << 18]], []]
            told = {"Input Dims": size, "Input type": ["TensorList", ""]}
            events += [
                span("c10d::allreduce_", "cpu_op", 1, at + 0.1, at + 0.15, **told),
                span("gloo:all_reduce", "user_annotation", 2, at + 0.15, b + 20 + gradient, **told),
            ]
            sent = gradient + 1
    if searches:
        events += [
            span("c10d::allreduce_", "cpu_op", 1, b + 13.16, b + 13.18),
            span("gloo:all_reduce", "user_annotation", 2, b + 13.18, b + 28.5),
        ]
    return events


def gloo(path, layouts, rank=0, world=1, base_ns=0, searches=False):
    events = [
        event
        for number, buckets in enumerate(layouts)
        for event in gloo_step(100 + 30 * number, number, buckets, searches)
    ]
    return write(path, events, rank=rank, world=world, base_ns=base_ns)


def test_the_layout_of_most_steps_counts(tmp_path):
    """DDP's first step has another one than those after it."""
    work = gradients_of(gloo(tmp_path / "rank0.json", [[8], [1, 8], [1, 8]]))
    assert work.sizes == [1 << 20] * 8
    assert tuple(work.caps) == (1 << 20, 25 << 20)
    assert len(work.spread) == 2
    assert work.forward == pytest.approx([5e-3]) and min(work.ready[0]) == pytest.approx(1e-3)
    assert work.unknown[0] == "bucket_cap_mb (the buckets are those of torch's default)"
    assert work.unknown[1:] == (
        "how busy a core was (it is taken to compute all the time)",
        "the optimizer's step (it is taken to take no time)",
    )


@pytest.mark.parametrize(("buckets", "cap"), [([2, 4, 6, 8], 2), ([8], 8)])
def test_a_cap_is_concluded_from_the_buckets(tmp_path, buckets, cap):
    path = gloo(tmp_path / "rank0.json", [buckets] * 2, searches=True)
    work = gradients_of(path)
    assert list(work.caps) == [cap << 20]
    assert f"those of {cap} MiB" in work.unknown[0]
    assert predict(work.on(2), Speed(1e9)).buckets == len(buckets)


def test_buckets_that_no_cap_makes_are_said(tmp_path):
    work = gradients_of(gloo(tmp_path / "rank0.json", [[3, 4, 8]] * 2))
    assert "no single one" in work.unknown[0]


def test_over_nccl_a_bucket_is_a_gradient(tmp_path):
    """Forward 5 ms and backward 10; the buckets begin 5 and 9 ms after it began."""
    for rank in range(2):
        write(tmp_path / f"rank{rank}.json", gpu_steps(), rank=rank)
    work = gradients_of(tmp_path)
    assert work.sizes == [4000, 4000] and work.world == 2
    assert work.forward[0] == pytest.approx(5e-3) and work.backward[0] == pytest.approx(1e-2)
    assert work.ready[0] == pytest.approx([5e-3, 9e-3])
    assert "each bucket counts as one gradient" in work.unknown[0]
    assert predict(work, Speed(1e9)).step_ms == pytest.approx(15, abs=0.1)


def test_repetitions_of_the_schedule_are_steps_of_one_recording(tmp_path):
    for window in range(2):
        gloo(tmp_path / f"w{window}.pt.trace.json", [[1, 8]] * 2, base_ns=window * 10**9)
    assert len(gradients_of(tmp_path).spread) == 4


def test_two_runs_are_not_one(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        gloo(tmp_path / name / "rank0.json", [[1, 8]])
    with pytest.raises(Error, match="holds 2 runs"):
        gradients_of(tmp_path / "a", tmp_path / "b")


def test_the_command_says_what_the_files_lack(tmp_path, capsys):
    path = gloo(tmp_path / "rank0.json", [[1, 8]] * 2, world=4)
    assert main(["simulate", str(path), "--link", "1gbit,50us"]) == 0
    out = capsys.readouterr().out
    assert "Not in the recording: 3 of 4 ranks" in out
    assert "; bucket_cap_mb (" in out and "; how busy a core was (" in out
    assert main(["simulate", *map(str, GLOO), "--link", "1gbit,50us", "--json"]) == 0
    assert "bucket_cap_mb" in json.loads(capsys.readouterr().out)[0]["unknown"][0]


def test_sizes_that_no_file_says_are_asked_for(tmp_path, capsys):
    events = [dict(e, args={}) for e in gloo_step(0, 0, [1, 8])]
    path = write(tmp_path / "rank0.json", events, world=1)
    assert main(["simulate", str(path), "--link", "1gbit"]) == 2
    assert "record_shapes=True" in capsys.readouterr().err
