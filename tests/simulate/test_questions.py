"""What the command answers: the best schedule, how many ranks pay, how sure a prediction is."""

import json
import re
from pathlib import Path

import pytest

from dpcore.__main__ import main
from dpcore.base.link import Speed
from dpcore.comm.communicators import costs
from dpcore.reference.launches import ACROSS_STEPS
from dpcore.tools.simulate import Gradients, Hook, LocalUpdates, Processors, Stragglers
from dpcore.tools.simulate.gradients import gradients_of
from dpcore.tools.simulate.links import Links
from dpcore.tools.simulate.questions import candidates, interval, on_ranks, ranks_tried, until
from dpcore.tools.simulate.residuals import CALIBRATIONS, measured_between
from dpcore.tools.simulate.training import predict
from tests.command_line import status_of
from tests.simulate.test_calibration import MEASURED


@pytest.fixture
def described(tmp_path):
    path = tmp_path / "gradients.json"
    gradients = [{"bytes": 1 << 20, "ready_ms": 10 * n} for n in range(1, 7)]
    path.write_text(json.dumps({"forward_ms": 30, "backward_ms": 60, "gradients": gradients}))
    return str(path)


def answers(capsys, *arguments):
    assert main(["simulate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_best_comes_first_and_none_twice(described, capsys):
    lines = answers(capsys, described, "--link", "1gbit,50us", "--best")
    steps = [line["step_ms"] for line in lines]
    assert steps == sorted(steps)
    assert all(line["step_ms"] >= line["bound_ms"] for line in lines)
    kinds = [(line["schedule"], line["algorithm"], line["buckets"]) for line in lines]
    assert len(set(kinds)) == len(kinds)


def test_it_says_what_is_extrapolated(described, capsys):
    for world in (8, 16):
        (line,) = answers(
            capsys, described, "--link", "1gbit,50us", "--world", str(world), "--schedule", "flat"
        )
        assert line["extrapolated"] == (world > 8)
        assert "memory bandwidth" in line["not_modelled"]
    assert main(["simulate", described, "--link", "1gbit", "--world", "16"]) == 0
    assert "Extrapolated: no run on more than 8 ranks" in capsys.readouterr().out


def test_until_finds_how_many_ranks_pay(described, capsys):
    asked = [
        described,
        "--link",
        "1gbit,50us",
        "--schedule",
        "per_parameter",
        "--algorithm",
        "ring",
    ]
    (line,) = answers(capsys, *asked, "--until", "0.8")
    by_world = {each["world"]: 90 / each["step_ms"] for each in line["steps"]}
    assert by_world[line["world"]] >= 0.8
    assert all(share < 0.8 for world, share in by_world.items() if world > line["world"])
    (line,) = answers(capsys, *asked, "--until", "0.9999")
    assert line["world"] == 0


def test_until_closes_in():
    work = Gradients([8], [0], [0.1], [0.8], [[0.5]])
    found = until(work, 0.9, lambda world: 900 + world / 7)
    assert 0.97 * 700 < found.world <= 700
    assert len(found.steps) < 25


def test_until_knows_the_optimizer(described, capsys):
    content = json.loads(Path(described).read_text())
    Path(described).write_text(json.dumps({**content, "update_ms": 60}))
    asked = ["simulate", described, "--link", "1000gbit,1us", "--schedule", "bucketed"]
    assert main([*asked, "--until", "0.9"]) == 0
    said = capsys.readouterr().out
    assert "keeps 90% of each rank's speed up to 4096 ranks" in said
    assert re.search(r" 2 ranks +150 ms +100%", said)
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert "forward, backward and the optimizer of all parameters take at least 150 ms" in said


@pytest.mark.parametrize(
    ("algorithm", "most"), [("recursive_doubling", 4096), ("halving_doubling", 4096), ("tree", 64)]
)
def test_until_goes_as_far_as_an_algorithm_can_be_simulated(algorithm, most):
    links = Links.of(Speed(1.25e8, 5e-5))
    assert ranks_tried(links, algorithm, False)[0] == most
    assert ranks_tried(links, algorithm, True)[0] == 64
    hosts = Links.levels(Speed(6e9, 2e-6), Speed(1.25e8, 5e-5), ranks_per_host=2)
    assert ranks_tried(hosts, algorithm, False)[0] == (64 if algorithm == "tree" else 1024)
    assert ranks_tried(hosts, algorithm, True)[0] == 64


@pytest.mark.parametrize(
    ("own", "algorithm", "most"),
    [(6, "ring", 768), (6, "tree", 48), (8, "ring", 1024), (80, "ring", 640), (100, "tree", 64)],
)
def test_until_ends_where_doubling_hosts_ends(own, algorithm, most):
    """So that it can say "and maybe more"."""
    links = Links.levels(Speed(6e9, 2e-6), Speed(1.25e8, 5e-5), own)
    assert ranks_tried(links, algorithm, False)[0] == most
    work = Gradients([8], [0], [0.1], [0.8], [[0.5]])
    assert until(work, 0.9, lambda world: 900, most, ranks_per_host=own).world == most


def test_until_in_shared_memory():
    assert ranks_tried(Links.memory(), "two_shot", False)[0] == 64


def test_until_takes_whole_hosts():
    work = Gradients([8], [0], [0.1], [0.8], [[0.5]])
    found = until(work, 0.9, lambda world: 900 + world / 3, 512, ranks_per_host=6)
    tried = [world for world, _ in found.steps]
    assert found.world == 300 and tried[:3] == [2, 4, 6]
    assert not any(world % 6 for world in tried[2:])
    # Three hosts are too many and one is not.
    found = until(work, 0.9, lambda world: 900 + world * 100 / 14, 512, ranks_per_host=6)
    assert found.world == 12


def test_on_hosts_of_several_ranks_the_algorithm_is_the_one_for_hosts(described, capsys):
    asked = [described, "--schedule", "flat", "--world", "4"]
    levels = ["--intra", "50gbit,2us", "--inter", "1gbit,50us", "--ranks-per-host", "2"]
    for words, algorithm in ((["--link", "1gbit,50us"], "two_shot"), (levels, "hierarchical")):
        (line,) = answers(capsys, *asked, *words)
        assert line["algorithm"] == algorithm
    (line,) = answers(capsys, *asked, *levels, "--algorithm", "ring")
    assert line["algorithm"] == "ring"


def test_until_by_recursive_doubling_tries_powers_of_two(described, capsys):
    asked = ["--link", "10gbit,5us", "--schedule", "flat", "--algorithm", "recursive_doubling"]
    (line,) = answers(capsys, described, *asked, "--until", "0.8")
    tried = [each["world"] for each in line["steps"]]
    assert tried == [1 << n for n in range(1, len(tried) + 1)]
    assert line["world"] == tried[-2]


def test_words_for_local_updates_stragglers_and_hooks(described, capsys):
    """They mean what the objects of ``predict`` mean."""
    work = gradients_of(Path(described)).on(2)
    link = Speed(1.25e8, 5e-5)
    for words, keywords in (
        (["--schedule", "local:4"], {"schedule": LocalUpdates(4)}),
        (["--schedule", "bucketed:1", "--hook", "0.5,0.2,0.1"],
         {"schedule": "bucketed", "bucket_cap_mb": 1.0,
          "hook": Hook(0.5, 0.2e-3 / (1 << 20), 0.1e-3 / (1 << 20))}),
        (["--schedule", "flat", "--straggler", "factors:1,1.5"],
         {"schedule": "flat", "stragglers": Stragglers(factors=(1, 1.5))}),
        (["--schedule", "flat", "--straggler", "exponential:0.3"],
         {"schedule": "flat", "stragglers": Stragglers(exponential=0.3)}),
    ):  # fmt: skip
        (line,) = answers(capsys, described, "--link", "1gbit,50us", *words)
        assert line["step_ms"] == predict(work, link, **keywords).step_ms


def test_a_calibration_charges_processors(described, tmp_path, capsys):
    path = costs.save(MEASURED | {"operation": 5e-3}, tmp_path / "costs.json")
    asked = [described, "--link", "1gbit,50us", "--schedule", "per_parameter"]
    (free,) = answers(capsys, *asked)
    (costly,) = answers(capsys, *asked, "--calibration", str(path))
    # Of the last of six operations, 5 ms, and more where the link waits for it.
    assert costly["step_ms"] > free["step_ms"] + 5
    assert "other calibrations" in costly["interval"]
    assert costly["high_ms"] - costly["low_ms"] > free["high_ms"] - free["low_ms"]


def test_without_words_schedules_across_steps_are_predicted_too(described, capsys):
    lines = answers(capsys, described, "--link", "1gbit,50us")
    assert [line["schedule"] for line in lines][:2] == ["bucketed", "sequential"]
    assert set(ACROSS_STEPS) < {line["schedule"] for line in lines}


def test_with_a_hook_only_schedules_that_work_with_one_are_predicted(described, capsys):
    """The example of ``simulate --help``."""
    asked = [described, "--link", "1gbit,50us", "--straggler", "exponential:0.1", "--hook", "0.5"]
    for more in ([], ["--best"]):
        found = {line["schedule"] for line in answers(capsys, *asked, *more)}
        assert {"bucketed", "sequential"} <= found and found.isdisjoint(ACROSS_STEPS)


def test_hosts_that_share_a_card(described, capsys):
    levels = ["--intra", "50gbit,2us", "--inter", "1gbit,50us", "--world", "4"]
    levels += ["--algorithm", "two_shot"]
    (shared,) = answers(capsys, described, *levels, "--ranks-per-host", "2", "--schedule", "flat")
    (own,) = answers(
        capsys, described, "--link", "1gbit,50us", "--world", "4", "--schedule", "flat"
    )
    assert shared["step_ms"] > own["step_ms"]
    assert shared["link"] == "50gbit,2us in hosts of 2, 1gbit,50us between them"


def test_more_ranks_than_were_recorded_compute_as_the_slowest():
    recorded = Gradients([8], [0], [0.1, 0.2], [0.3, 0.3], [[0.2], [0.2]])
    assert on_ranks(recorded, 4).forward == [0.1, 0.2, 0.1, 0.2]
    assert on_ranks(recorded, 16).forward == [0.2] * 16


def test_an_interval_comes_from_recorded_steps_or_from_jitter():
    def once(seconds):
        return Gradients([1 << 20], [0], [seconds], [0.02], [[0.02]]).on(2)

    def again(work, links, processors):
        return predict(work, links, processors=processors)

    def within(low_ms, high_ms):
        return tuple(pytest.approx(ms, abs=1e-3) for ms in measured_between(low_ms, high_ms, False))

    links = Links.of(Speed(1.25e8, 1e-3))
    work = once(0.01)
    first = predict(work, links)
    alone = interval(work, links, first, again)
    assert (alone.low_ms, alone.high_ms) == within(first.step_ms, first.step_ms)
    assert alone.source == CELLS
    object.__setattr__(work, "spread", (once(0.011), once(0.013)))
    found = interval(work, links, first, again)
    assert (found.low_ms, found.high_ms) == within(first.step_ms, first.step_ms + 3)
    assert found.source == f"the shortest and longest of 2 recorded steps, {CELLS}"
    varying = Links.of(Speed(1.25e8, 1e-3, jitter=5e-4))
    found = interval(once(0.01), varying, first, again)
    assert found.high_ms - found.low_ms > alone.high_ms - alone.low_ms
    assert found.source == f"jitter and loss, {CELLS}"


CELLS = "what nine of ten measured cells were off"


def test_an_interval_takes_in_other_calibrations():
    """Where what they measure is all that takes time: an operation in memory."""
    work = Gradients([1 << 24], [0], [0.0], [0.0], [[0.0]]).on(2)
    processors = Processors(memory_operation=1e-6, fused_byte=1e-9)
    first = predict(work, Links.memory(), processors=processors)

    def again(work, links, processors):
        return predict(work, links, processors=processors)

    found = interval(work, Links.memory(), first, again, processors)
    share = CALIBRATIONS["fused_byte"]
    low_ms, high_ms = first.step_ms * (1 - share), first.step_ms * (1 + share)
    ends = measured_between(low_ms, high_ms, across=False)
    assert (found.low_ms, found.high_ms) == pytest.approx(ends, rel=1e-3)
    assert found.source == f"other calibrations, {CELLS}"


def test_nine_of_ten_runs_lie_around_a_prediction():
    for across in (False, True):
        low_ms, high_ms = measured_between(100.0, 110.0, across)
        assert low_ms <= 100 < 110 <= high_ms


def test_candidates_are_what_can_be_chosen():
    work = Gradients([8], [0], [0.1], [0.3], [[0.2]])
    card, hosts = Links.of(Speed(1.25e8)), Links.levels(Speed(6e9), Speed(1.25e8), 3)
    assert {one.algorithm for one in candidates(work.on(6), card)} == {"two_shot", "ring"}
    assert "halving_doubling" in {one.algorithm for one in candidates(work.on(8), card)}
    assert "hierarchical" in {one.algorithm for one in candidates(work.on(6), hosts)}
    assert "hierarchical" not in {one.algorithm for one in candidates(work.on(3), hosts)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--link 1gbit,50us, or for --intra and --inter"),
        (["--intra", "1gbit"], "write both"),
        (["--link", "1gbit", "--inter", "1gbit"], "or for --intra and --inter"),
        (["--link", "1gbit", "--ranks-per-host", "8"], "go with --intra and --inter"),
        (["--link", "1gbit", "--until", "1.5"], "'1.5' is not a share"),
        (["--intra", "1gbit,10gbit", "--inter", "1gbit"], "is not one link"),
        (["--link", "1gbit", "--schedule", "local:soon"], "'soon' .* for example .*local:16"),
        (["--link", "1gbit", "--schedule", "local:10001"], "local:10001: at most 10,000 steps"),
        (["--link", "1gbit", "--straggler", "late"], "recorded, exponential:0.1"),
        (["--link", "1gbit", "--straggler", "normal:-1"], "for example --straggler normal:0.1"),
        (["--link", "1gbit", "--hook", "half"], "'half' .* for example --hook 0.5"),
        (["--link", "1gbit", "--best", "--schedule", "flat"], "--schedule .* --best tries all"),
        (["--link", "1gbit", "--best", "--algorithm", "ring"], "--algorithm .* --best tries all"),
        (["--link", "1gbit", "--until", "0.9", "--best"], "--best .* --until asks for ranks"),
        (["--link", "1gbit", "--until", "0.9", "--world", "4"], "--world .* --until asks"),
    ],
)
def test_mistakes_are_explained(described, capsys, options, message):
    assert status_of("simulate", described, *options) == 2
    assert re.search(message, capsys.readouterr().err)
