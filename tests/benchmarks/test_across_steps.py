"""The benchmark across steps: its bound, its table, and a short run on this host."""

from pathlib import Path

import pytest

from benchmarks import across_steps
from dpcore.tools.records import load
from tests.ranks import python

ROOT = Path(__file__).resolve().parents[2]


def result(**times):
    alone = {"bytes": 20e6, "first_bytes": 1e6, "last_s": 0.002}
    alone |= {"first_module": "first", "last_module": "last"}
    names = {name.replace("_", " "): seconds for name, seconds in times.items()}
    return {"times": names, "states": dict.fromkeys(names, 4e6), "alone": alone}


def test_the_bound():
    """Of two ranks at 100 MB/s: an all-reduce of 20 MB takes 200 ms, of the first module 10."""
    ranks = [result(dpcore_oracle=[0.1, 0.1, 0.1]), result(dpcore_oracle=[0.1, 0.12, 0.13])]
    made = across_steps.bound_of(ranks, 100e6)
    assert made["computing_s"] == 0.12
    assert made["bound_s"] == pytest.approx(0.2 + 0.002 + 0.01)
    slow = [result(dpcore_oracle=[0.3] * 3)] * 2
    assert across_steps.bound_of(slow, 100e6)["bound_s"] == pytest.approx(0.3 + 0.01)
    four = [result(dpcore_oracle=[0.1] * 3)] * 4
    assert across_steps.bound_of(four, 100e6)["bound_s"] == pytest.approx(0.3 + 0.002 + 0.015)
    assert across_steps.bound_of(ranks, None)["bound_s"] == 0.12


def test_ratios_are_of_the_same_round():
    ranks = [
        result(
            dpcore_oracle=[0.1, 0.1, 0.1],
            dpcore_bucketed_1=[0.2, 0.4, 0.2],
            dpcore_zero1=[0.15, 0.3, 0.15],
        )
    ] * 2
    lines = across_steps.records("1gbit", "transformer", ranks, 100e6)
    assert lines[2]["of_bucketed"]["median"] == pytest.approx(0.75)
    assert lines[2]["of_bound"] == pytest.approx(0.15 / 0.212)
    assert "of_bucketed" not in lines[1]
    table = across_steps.table(lines)
    assert "dpcore zero1              150.0     0.708        0.750" in table
    assert "range of 3 rounds" in table and "95%" not in table


def test_the_modules_that_are_needed_first_and_last():
    seen = across_steps.seen_alone("transformer")
    assert (seen["first_module"], seen["last_module"]) == ("layers.0.self_attn", "layers.5.norm2")
    assert seen["first_bytes"] == 4 * (4 * 256 * 256 + 4 * 256)
    seen = across_steps.seen_alone("sleeping_short")
    assert (seen["first_module"], seen["last_module"]) == ("0", "11")
    assert seen["last_s"] > 0.012


def run(*arguments):
    command = ["-m", "benchmarks.across_steps", *arguments]
    return python.run(*command, capture_output=True, text=True, timeout=170, cwd=ROOT)


def test_a_short_run_on_this_host(tmp_path):
    path = tmp_path / "results.jsonl"
    names = "dpcore oracle,dpcore bucketed 1,dpcore priority,dpcore zero1,torch zero 1,torch fsdp"
    names += ",torch/dpcore zero overlap 1,dpcore examples/slices.py:P3"
    arguments = ("--places", "host", "--models", "sleeping_short", "--contenders", names)
    out = run(*arguments, "--rounds", "1", "--steps-per-round", "1", "--records", str(path))
    assert out.returncode == 0, out.stderr
    lines = {line["contender"]: line for line in load(path)}
    assert list(lines) == names.split(",")
    assert all(line["step_s"] > 0 for line in lines.values())
    whole = lines["dpcore bucketed 1"]["state_bytes"]
    for name in ("dpcore zero1", "torch zero 1", "torch fsdp", "torch/dpcore zero overlap 1"):
        assert whole / 2 <= lines[name]["state_bytes"] + 1e3 <= whole * 0.55


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--models", "nothing"), "no model nothing; there are sleeping"),
        (("--contenders", "dpcore zero1"), "has to be dpcore oracle"),
        (("--contenders", "dpcore oracle,mpi"), "no contender mpi"),
    ],
)
def test_mistakes_are_named(arguments, said):
    out = run(*arguments)
    assert out.returncode == 2
    assert said in out.stderr
