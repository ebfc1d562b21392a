"""Launch schedules of one's own in the simulator: the twins of those that come with dpcore."""

import random
from pathlib import Path

import pytest

import dpcore
from dpcore.__main__ import main
from dpcore.base.link import Speed
from dpcore.errors import Error, Mismatch, Unsupported
from dpcore.tools.simulate import Gradients, predict
from dpcore.tools.simulate.command import named_or_own
from tests.show.traces import write_trace

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "launch_schedules.py"
LINKS = (Speed(1.25e8, 50e-6), Speed(1.25e9, 50e-6), Speed(1.25e7, 1e-3))


class Bucketed(dpcore.LaunchSchedule):
    def bucket_ready(self, control, bucket):
        control.launch(bucket)

    def backward_end(self, control):
        control.wait_for_all()


class Sequential(dpcore.LaunchSchedule):
    def backward_end(self, control):
        for bucket in range(control.buckets):
            control.launch(bucket, background=False)
        control.wait_for_all()


class AsOne(Sequential):
    def backward_end(self, control):
        control.launch(range(control.buckets))


class OneAtATime(dpcore.LaunchSchedule):
    """Backward stands still while a bucket travels."""

    def bucket_ready(self, control, bucket):
        control.launch(bucket)
        control.wait(bucket)


def work(world):
    of = random.Random(1)
    sizes = [of.choice([1_000, 200_000, 1_500_000]) for _ in range(30)]
    ready = [sorted(of.uniform(0, 0.08) for _ in sizes) for _ in range(2)]
    return Gradients(sizes, [0] * 30, [0.02, 0.03], [0.08, 0.1], ready).on(world)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("own", [Bucketed, Sequential])
def test_they_take_what_the_named_ones_take(own, world, link):
    named = predict(work(world), link, own.__name__.lower(), 1)
    mine = predict(work(world), link, own, 1)
    assert mine.step_ms == named.step_ms
    assert mine.exposed_ms == named.exposed_ms
    assert (mine.schedule, mine.buckets) == (own.__name__, named.buckets)


def test_buckets_that_go_as_one_take_what_one_bucket_takes():
    one = predict(work(2), LINKS[0], "sequential", 1000)
    as_one = predict(work(2), LINKS[0], AsOne(), 1)
    assert as_one.buckets > one.buckets == 1
    assert as_one.step_ms == pytest.approx(one.step_ms, rel=1e-3)


def test_backward_stands_still_in_a_wait():
    even = Gradients([1_250_000] * 4, [0] * 4, [0.0], [0.04], [[0.01, 0.02, 0.03, 0.04]]).on(2)
    predicted = predict(even, Speed(1.25e8), OneAtATime, 1)
    assert predicted.step_ms == pytest.approx(80, rel=0.01)  # each takes 10 ms, and none is hidden
    assert predicted.exposed_ms == pytest.approx(40, rel=0.02)


class Learns(Bucketed):
    """Decides by what all ranks measured; the slowest rank's last gradient comes after 80 ms."""

    seen: list[list[float]] = []  # noqa: RUF012

    def backward_end(self, control):
        super().backward_end(control)
        Learns.seen.append(control.max_over_ranks([control.elapsed_ms, control.rank]))


def test_ranks_exchange_what_they_measured():
    Learns.seen.clear()
    predict(work(2), LINKS[1], Learns)
    assert len(Learns.seen) == 2 * 20
    assert Learns.seen[0] == Learns.seen[1]  # both heard the same
    end, rank = Learns.seen[0]
    assert end > 70
    assert rank == 1


class Differs(Sequential):
    def backward_end(self, control):
        half = 2 + control.rank
        control.launch(range(half))
        control.launch(range(half, control.buckets))


class Forgets(Sequential):
    def backward_end(self, control):
        control.launch(0)


class TooEarly(Sequential):
    def gradient_ready(self, control, gradient):
        control.launch(control.buckets - 1)


class Twice(Sequential):
    def backward_end(self, control):
        control.launch(0)
        control.launch([0, 1])


class Between(AsOne):
    def order(self, buckets):
        return [0, 2, 1, *range(3, buckets)]

    def backward_end(self, control):
        control.launch([0, 1])


@pytest.mark.parametrize(
    ("schedule", "kind", "message"),
    (
        (Twice, Error, r"'Twice' launches \[0, 1\] as one, of which some are launched"),
        (Between, Error, r"'Between' launches \[0, 1\] as one; in order\(\) others come between"),
        (Differs, Mismatch, r"launch 0 of the step: one rank sends all_reduce of buckets \[0, 1\]"),
        (Forgets, Error, "'Forgets' has not launched bucket 1 by the end of backward"),
        (TooEarly, Error, "'TooEarly' launches bucket .* gradients are missing"),
    ),
)
def test_mistakes_are_told_as_in_a_run(schedule, kind, message):
    with pytest.raises(kind, match=message):
        predict(work(2), LINKS[0], schedule, 1)


class Misspelt(Sequential):
    def bucket_redy(self, control, bucket):
        control.launch(bucket)


def returns(method, what):
    """A schedule of which one method returns this."""
    return type("Mine", (Bucketed,), {method: lambda self, *arguments: what})


LEGAL = (
    r"\[all_reduce\], \[all_reduce, update\], \[reduce_scatter, all_gather, update\], "
    r"\[reduce_scatter, update, all_gather\]"
)


@pytest.mark.parametrize(
    ("schedule", "message"),
    (
        (Misspelt, "schedule Misspelt: bucket_redy is not an event, .* is it bucket_ready"),
        (Misspelt(), "bucket_redy is not an event"),
        (returns("phases", ["update", "all_reduce"]),
         rf"schedule 'Mine': phases \[update, all_reduce\]: a bucket may have {LEGAL}"),
        (returns("phases", []), r"phases \[\]: a bucket may have"),
        (returns("caps", []),
         r"'Mine': caps\(\) returns no size of buckets; return at least one, in bytes"),
        (returns("caps", [1 << 20, -5]), r"'Mine': caps\(\) returns -5; a size of buckets is"),
        (returns("caps", [1.5]), r"'Mine': caps\(\) returns 1.5; a size of buckets is"),
        (returns("caps", None), "'Mine': TypeError"),
    ),
)  # fmt: skip
def test_what_data_parallel_refuses_is_refused(schedule, message):
    with pytest.raises(Unsupported, match=message):
        predict(work(2), LINKS[0], schedule, 1)


class ByItsSize(Sequential):
    """Small buckets in one step, large ones in two."""

    def backward_end(self, control):
        for bucket in range(control.buckets):
            is_small = control.bytes(bucket) < 1000
            control.launch(bucket, algorithm="one_shot" if is_small else None)


def test_each_bucket_may_have_an_algorithm():
    slow = Speed(1.25e8, 10e-3)
    small = Gradients([100], [0], [0.0], [0.01], [[0.01]]).on(2)
    large = Gradients([1000], [0], [0.0], [0.01], [[0.01]]).on(2)
    assert predict(small, slow, ByItsSize).step_ms == pytest.approx(10 + 2 * 10, rel=0.01)
    assert predict(large, slow, ByItsSize).step_ms == pytest.approx(10 + 3 * 10, rel=0.01)


@pytest.mark.parametrize("name", ["Window", "Adaptive", "Merging"])
def test_the_command_takes_a_file(name, tmp_path, capsys):
    run = write_trace(tmp_path / "run.json")
    asked = [
        "simulate",
        str(run),
        "--link",
        "1gbit,50us",
        "--schedule",
        f"bucketed,{EXAMPLE}:{name}",
    ]
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert name in out
    assert "bucketed" in out


@pytest.mark.parametrize("name", ["P3", "ByteScheduler"])
@pytest.mark.parametrize("link", LINKS)
def test_slices_of_the_example_take_about_what_priority_takes(name, link):
    sliced = named_or_own(f"{EXAMPLE.with_name('slices.py')}:{name}")
    whole_ms = predict(work(2), link, "priority", 0).step_ms
    assert predict(work(2), link, sliced, 0).step_ms < 1.3 * whole_ms


@pytest.mark.parametrize(
    ("wish", "message"),
    (
        ("missing.py:Mine", "there is no file missing.py"),
        (f"{EXAMPLE}:Nothing", "has no 'Nothing'; it has"),
        (f"{EXAMPLE}:train", "is a function; a dpcore.LaunchSchedule is needed"),
        ("Mine", "or give one of your own as mine.py:MySchedule"),
    ),
)
def test_what_is_no_schedule_is_refused(wish, message):
    with pytest.raises(Unsupported, match=message):
        predict(work(2), LINKS[0], named_or_own(wish))


def test_each_schedule_of_the_example_is_short():
    text = EXAMPLE.read_text()
    for name in ("Window", "Adaptive", "Merging"):
        body = text.split(f"class {name}(")[1].split("\n\n\n")[0]
        assert len(body.splitlines()) <= 30, name
