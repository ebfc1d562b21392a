"""Planted causes: the first line names each of them, and nothing else is said to be wrong."""

import re
from dataclasses import replace

import pytest

from dpcore.base.machine import clock
from dpcore.tools.advise.advice import advice_on
from dpcore.tools.show.reading import read_run

from .planted import DATA, MIB, Planted, gpu_run

SEEDS = range(2)
LATE_SIZES = [2 * MIB] * 20
CASES = {
    "straggler": ("straggler", {"compute": lambda rank, step: 80 if rank == 1 else 60}),
    "slow loader": ("data loading", {"loading": lambda rank, step: 40}),
    "a last step that ends before it loads": (
        "data loading",
        {"loading": lambda rank, step: 40 if step < 6 else 0},
    ),
    "a loader without annotation": ("data loading", {"quiet": 50}),
    "tiny buckets": (
        "tiny buckets",
        {"sizes": [MIB // 4] * 80, "sends": [*range(80)], "latency": 2.5},
    ),
    "one giant bucket": ("one giant bucket", {"sends": [9]}),
    "slow link": ("slow link", {"rate": 11_000, "sizes": [MIB // 2] * 10}),
    "latency": ("latency", {"latency": 40, "sizes": [12_000] * 10}),
    "large first bucket": (
        "first bucket late",
        {"sizes": LATE_SIZES, "sends": [12, 19], "rate": MIB / 2},
    ),
    "unused parameters searched": (
        "unused parameters searched",
        {"searches": True, "sends": [7, 9]},
    ),
    "oversubscribed threads": ("oversubscribed threads", {"product": 48}),
    "batches that vary": (
        "unequal batches",
        {
            "batch": lambda rank, step: (16, 48)[(rank + step) % 2],
            "compute": lambda rank, step: (30, 90)[(rank + step) % 2],
        },
    ),
    "a rank with large batches": (
        "unequal batches",
        {
            "batch": lambda rank, step: 48 if rank == 1 else 32,
            "compute": lambda rank, step: 90 if rank == 1 else 60,
        },
    ),
    "copies": ("copies out of buckets", {"copies": 0.5}),
}


def causes(folder):
    advice = advice_on(read_run(folder), [folder])
    return [finding.cause for finding in advice.wrong], advice.lines()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_the_first_line_names_the_planted_cause(tmp_path, name, world):
    cause, options = CASES[name]
    for seed in SEEDS:
        folder = tmp_path / str(seed)
        folder.mkdir()
        found, lines = causes(Planted(seed, world, **options).write(folder))
        assert found == [cause], lines
        assert lines[0].startswith(f"1. {cause}: ")
        assert [line.split()[0] for line in lines[1:4]] == ["seen", "gain", "change"]


@pytest.mark.parametrize("jitter", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("world", [2, 4])
def test_nothing_is_found_where_nothing_is_wrong(tmp_path, world, jitter):
    for seed in range(4):
        folder = tmp_path / str(seed)
        folder.mkdir()
        found, lines = causes(Planted(seed, world, jitter=jitter).write(folder))
        assert found == [] and lines[0] == "Nothing to gain here.", lines


@pytest.mark.parametrize(
    "options",
    [
        {"sizes": [400_000_000, 1000], "sends": [0, 1]},  # one gradient is not divided
        {"sizes": [MIB // 64] * 4, "sends": [3]},  # a small model
        {"steps": 2},
        {"batch": lambda rank, step: 32 - 16 * (step == 6)},  # the last batch of an epoch
        {"compute": lambda rank, step: 60 + 100 * (step == 3) * (rank == 1)},  # a checkpoint
        {"loading": lambda rank, step: 30 * (step == 0)},
    ],
    ids=["one gradient", "small", "two steps", "last batch", "one long step", "first batch"],
)
def test_what_happens_once_or_cannot_be_changed_is_no_finding(tmp_path, options):
    found, lines = causes(Planted(1, **options).write(tmp_path))
    assert found == [], lines


def test_torchs_default_for_a_small_model_is_not_wrong(tmp_path):
    """A bucket of 1 MiB and one with all else: smaller ones could be tried."""
    folder = Planted(1, sizes=[MIB] * 16, sends=[0, 15], rate=MIB / 4).write(tmp_path)
    found, lines = causes(folder)
    assert found == [] and "Could be tried: Smaller buckets than torch's default" in "".join(lines)


@pytest.mark.parametrize(("governor", "pace"), [("powersave", 0.5), ("performance", 0.5), ("", 1)])
def test_a_clock_that_is_slowed_down_is_named(tmp_path, governor, pace):
    """By dp.trace, which reads what the system says; torch's profiler does not."""
    run = read_run(Planted(1).write(tmp_path))
    machine = {**run.machine, "governor": governor, "pace": pace}
    advice = advice_on(replace(run, machine=machine), [tmp_path])
    found = [finding.cause for finding in advice.wrong]
    assert found == (["CPU governor"] if governor == "powersave" else []), advice.lines()


def test_the_clock_is_what_the_system_says(tmp_path):
    assert clock(tmp_path) == {}
    for cpu, now in ((0, 1_000_000), (1, 3_000_000)):
        place = tmp_path / f"cpu{cpu}" / "cpufreq"
        place.mkdir(parents=True)
        (place / "scaling_governor").write_text("powersave\n")
        assert clock(tmp_path)["governor"] == "powersave"
        (place / "scaling_cur_freq").write_text(f"{now}\n")
        (place / "cpuinfo_max_freq").write_text("4000000\n")
    assert clock(tmp_path) == {"governor": "powersave", "pace": 0.5}


def test_a_whole_optimizer_can_be_divided(tmp_path):
    """Nothing is wrong with it."""
    folder = Planted(1, sizes=[100 * MIB] * 10, rate=100 * MIB, copies=0.0).write(tmp_path)
    found, lines = causes(folder)
    assert found == [], lines
    (line,) = (line for line in lines if "step a part of the parameters" in line)
    assert line.startswith("Could be tried: ")
    assert "ZeroRedundancyOptimizer" in "".join(lines) and "50% of which" in "".join(lines)


def test_a_gpu_that_waits_for_the_host(tmp_path):
    found, lines = causes(gpu_run(tmp_path, item_ms=5))
    assert found == ["GPU-CPU synchronisation"], lines
    assert ".item()" in lines[0]


def test_a_gpu_that_is_busy(tmp_path):
    found, lines = causes(gpu_run(tmp_path))
    assert found == [], lines


REAL = {
    "ok": [],
    "straggler": ["straggler"],
    "loader": ["data loading"],
    "tiny": ["tiny buckets"],
    "giant": ["one giant bucket"],
    "slow_link": ["slow link"],
    "unused": ["unused parameters searched"],
    "threads": ["oversubscribed threads"],
    "batches": ["unequal batches"],
    "compiled": ["gradients at the end"],
    "late": ["first bucket late"],
}


@pytest.mark.parametrize("name", REAL)
def test_real_runs(name):
    found, lines = causes(DATA / name)
    assert found[:1] == REAL[name], lines


def test_gains_are_bounds_of_the_planted_time(tmp_path):
    """Rank 1 computes 20 ms longer in forward and 30 in backward."""
    compute = {"compute": lambda rank, step: 80 if rank == 1 else 60}
    folder = Planted(0, jitter=0.0, **compute).write(tmp_path)
    (finding,) = advice_on(read_run(folder), [folder]).findings
    assert finding.basis == "bound"
    assert finding.low_ms == pytest.approx(50, abs=1) == finding.high_ms


def test_one_giant_bucket_may_cost_all_that_is_exposed(tmp_path):
    """Several smaller operations may be faster than one as well: this was seen of Gloo."""
    folder = Planted(0, jitter=0.0, sends=[9]).write(tmp_path)
    (finding,) = advice_on(read_run(folder), [folder]).wrong
    (exposed,) = re.findall(r"; ([\d.]+) ms of a step are exposed", finding.evidence)
    assert finding.high_ms == pytest.approx(float(exposed), rel=0.01)
