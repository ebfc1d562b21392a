"""Every example runs, as its first lines say, and says what it promises."""

import json
import os
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import dpcore
from dpcore.base.own_algorithm import schedule_of
from dpcore.tools.show import figures_of, read_run
from tests.ranks import python
from tests.swing import SWING

pytestmark = pytest.mark.usefixtures("mistakes_are_errors")
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run_example(name, *arguments, launcher=()):
    command = [*launcher, EXAMPLES / name, *arguments]
    out = python.run(*command, capture_output=True, text=True, timeout=180)
    assert out.returncode == 0, out.stderr
    return out.stdout


def test_all_reduce():
    (line,) = run_example("all_reduce.py", launcher=TORCHRUN).splitlines()
    assert line.startswith("1.5 [0.0, 1.0, 2.0, 3.0] ")


def test_all_reduce_is_short_enough_for_the_first_page():
    tree = (EXAMPLES / "all_reduce.py").read_text().split('"""')[2]
    assert len([line for line in tree.splitlines() if line.strip()]) <= 12


@pytest.mark.parametrize("world", ["3"])
def test_own_schedule(world):
    out = run_example("own_schedule.py", world)
    assert "reverse_ring" in out
    assert ": proven" in out
    assert "without its last move: " in out
    priced = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line[:1].isalpha()}
    assert len(re.findall(r"\bright\b", out)) == 3
    assert "WRONG" not in out
    assert priced["two_shot"][0] == "2"


def test_swing():
    """The commands in its head are those of test_command_line.py and show/test_moves_page.py."""
    by_default, per_bucket = run_example("swing.py", "2").splitlines()
    assert by_default.startswith("all_reduce: swing, a schedule of the program's own, asked for by")
    assert per_bucket == "buckets: {'one_shot/stage': 1, 'moves': 1}"
    for world in (2, 4, 8, 16, 32):
        plan = schedule_of(SWING, "all_reduce", world)
        doubling = schedule_of("halving_doubling", "all_reduce", world)
        assert len(plan.moves) == len(doubling.moves)
        assert plan.moves[-1].step == doubling.moves[-1].step


def test_overlap(tmp_path):
    path = tmp_path / "overlap.json"
    out = run_example("overlap.py", str(path), launcher=TORCHRUN)
    assert "one after the other: " in out
    assert "overlapped: " in out
    events = json.loads(path.read_text())["traceEvents"]
    operations = [event for event in events if event.get("cat") == "operation"]
    assert len(operations) == 2 * 5 * 8  # ranks, steps, layers
    steps = [event for event in events if event.get("cat") == "compute"]
    assert len(steps) == 2 * 5


def test_launch_schedules():
    header, _, *lines = run_example("launch_schedules.py").splitlines()
    assert "1 Gbit/s" in header
    sent = {line.split()[0]: int(line.split()[1]) for line in lines}
    assert list(sent) == ["sequential", "bucketed", "Window", "Adaptive", "Merging"]
    assert sent["bucketed"] == sent["Window"] == 24
    assert 1 < sent["Merging"] < 24


def test_local_updates():
    header, _, *lines = run_example("local_updates.py").splitlines()
    assert "20 Mbit/s" in header
    rows = {line[:20].strip(): [float(cell) for cell in line[20:].split()] for line in lines}
    assert list(rows) == ["DataParallel", "LocalSGD", "DiLoCo", "DiLoCo, streamed"]
    every, local, outer, streamed = (rows[name] for name in rows)
    assert max(row[0] for row in rows.values()) < 0.5  # all have learnt: the variance is 2 / 3
    assert every[1] > 10 * local[1] and local[1] == outer[1] > 2 * streamed[1]
    assert every[2] > max(local[2], outer[2], streamed[2])


def test_elastic():
    (line,) = run_example("elastic.py").splitlines()
    steps, loss = re.fullmatch(
        r"(\d+) steps, the last on ranks 0, 2 with equal weights: loss (.+)", line
    ).groups()
    assert int(steps) == 55  # 10 of 3 ranks, and then 2 for all 960 x 4 samples
    assert float(loss) < 0.05


def test_virtual_ranks():
    two = run_example("virtual_ranks.py", launcher=TORCHRUN)
    alone = run_example("virtual_ranks.py")
    assert two.partition(" ")[2] == alone.partition(" ")[2] and "sha256" in alone


def test_see_overlap(tmp_path):
    run_example("see_overlap.py", str(tmp_path))
    for schedule in ("bucketed", "sequential"):
        events = json.loads((tmp_path / f"{schedule}.json").read_text())["traceEvents"]
        assert {event.get("cat") for event in events} >= {"compute", "operation", "exposed"}


def test_compiled():
    _, eager, before, after = run_example("compiled.py").splitlines()
    assert eager.startswith("eager ") and "one by one" in eager
    assert "come at its end" in before
    assert "6 of 6 gradients left while their graph ran" in after


def test_see_layers(tmp_path):
    """Each layer has an all-reduce in each direction, and each turn of the ring but one a shift."""
    layers, ring = run_example("see_layers.py", str(tmp_path)).splitlines()
    assert layers.startswith("layers: ") and ring.startswith("ring: ")
    found = figures_of(read_run(tmp_path / "layers.json")).spans
    names = [f"layer {n}" for n in range(4)]
    assert [s.name for s in found] == [*names, *(f"{name} back" for name in reversed(names))]
    assert all(s.operations == {"all_reduce": s.count} and s.exposed_ms > 0 for s in found)
    turns = figures_of(read_run(tmp_path / "ring.json")).ring
    assert [turn.shift_ms > 0 for turn in turns] == [True] * 3 + [False] + [True] * 5


def test_reverse_order():
    lines = run_example("reverse_order.py", "2").splitlines()
    assert len(lines) == 2
    for line in lines:
        usual, own = (json.loads(found) for found in re.findall(r"\[[\d, ]+\]", line))
        assert usual == list(range(len(usual)))
        assert own == usual[::-1]
        assert len(own) > 2
        assert line.endswith("the weights are equal")


def test_every_example_has_a_test():
    text = Path(__file__).read_text() + '"ray_train.py" is in tests/test_running.py'
    missing = [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in text]
    assert not missing


def test_train_goes_on_from_its_checkpoint(tmp_path):
    """In one process; tests/test_running.py has the launchers."""
    whole = run_example("train.py", "--steps", "6").partition(":")[2]
    file = tmp_path / "checkpoint"
    run_example("train.py", "--steps", "4", "--every", "2", "--checkpoint", file)
    rest = run_example("train.py", "--steps", "6", "--checkpoint", file)
    assert rest.startswith("steps 5 to 6 on 1 ranks")
    assert rest.partition(":")[2] == whole


def test_train_refuses_ranks_with_unequal_shares(monkeypatch, capsys):
    """Their samples would weigh unequally."""
    seven = SimpleNamespace(rank=0, world_size=7)
    monkeypatch.setattr(dpcore, "init", lambda **_: seven)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(EXAMPLES / "train.py"), run_name="__main__")
    assert "7 ranks can't have equal shares of 960 rows" in capsys.readouterr().err


def test_across_steps():
    """All train alike, and zero1 keeps half of the optimizer's state on each of two ranks."""
    rows = [line.split() for line in run_example("across_steps.py").splitlines()[2:]]
    assert [row[0] for row in rows] == ["bucketed", "priority", "dear", "zero1", "Own"]
    assert len({row[2] for row in rows}) == 1
    state = [float(row[3]) for row in rows]
    assert state[0] == state[1] == state[2]
    assert state[3] == state[4] < 0.52 * state[0]


def test_slices():
    """All train alike; those that cut buckets send more operations."""
    rows = [line.split() for line in run_example("slices.py").splitlines()[2:]]
    assert [row[0] for row in rows] == ["priority", "P3", "ByteScheduler"]
    assert len({row[3] for row in rows}) == 1
    sent = [int(row[1]) for row in rows]
    assert sent[0] + 10 < sent[1] == sent[2]


def test_domino(tmp_path):
    """The sum of one half travels under the arithmetic of the other, to the same gradients."""
    whole, halves, differ = run_example("domino.py", str(tmp_path)).splitlines()
    assert whole.startswith("whole") and halves.startswith("halves")
    assert whole.split()[-1] == halves.split()[-1]  # the loss
    assert float(differ.split()[-1]) < 1e-12
    (rank, *_) = read_run(tmp_path / "halves.json").ranks
    assert len(rank.operations) == 2 * 2 * 2 * 4  # steps, ways, halves, layers
    began_under_a_sum = {
        span.name.partition(" half ")[2]
        for event in rank.operations
        for span in rank.compute
        if event.begin_ns < span.begin_ns < event.end_ns
    }
    assert began_under_a_sum == {"0", "1", "0 back", "1 back"}
    (rank, *_) = read_run(tmp_path / "whole.json").ranks
    assert len(rank.operations) == 2 * 2 * 4


def test_three_dimensions(tmp_path):
    """Data x pipeline x tensor is one process; all 20 steps with DPCORE_TEST_FULL=1."""
    steps = 20 if os.environ.get("DPCORE_TEST_FULL") else 5
    path = tmp_path / "run.json"
    out = run_example("three_dimensions.py", str(steps), str(path))
    assert "1F1B: 2 stages on 2 ranks, 4 micro-batches" in out
    losses, weights = map(float, re.findall(r"([\d.e+-]+) in", out.splitlines()[-1]))
    assert losses < 1e-12 and weights < 1e-10
    spans = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") == "compute"]
    passes = [e for e in spans if not e["name"].startswith("layer ")]
    by_rank = {r: [e["name"] for e in passes if e["pid"] == r] for r in range(8)}
    assert by_rank[0] == ["0F0", "0F1", "0B0", "0F2", "0B1", "0F3", "0B2", "0B3"]  # stage 0
    assert by_rank[2] == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "1F3", "1B3"]  # stage 1
    layers = {e["name"] for e in spans if e["pid"] in (2, 6)} - set(by_rank[2])
    assert layers == {f"layer {n}{way}" for n in (3, 4, 5) for way in ("", " back")}
