"""The command as a user runs it: which files it takes, what it prints, and mistakes."""

import json
import re
from pathlib import Path

import pytest
import torch

import dpcore
from benchmarks.harness.sleeping import layers
from dpcore.__main__ import main
from dpcore.tools import advise, help_texts
from tests.faults.tries import in_time, three_tries
from tests.show.profiles import span, write
from tests.show.traces import write_trace

from .planted import MIB, Planted

STRAGGLER = {"compute": lambda rank, step: 80 if rank == 1 else 60}


def said(capsys, *arguments, status=0):
    assert main(["advise", *map(str, arguments)]) == status
    captured = capsys.readouterr()
    return captured.out if status == 0 else captured.err


@pytest.mark.parametrize("options", [{}, {"steps": False}, {"compressed": True}], ids=str)
def test_a_folder_of_torchs_profiler(tmp_path, capsys, options):
    """With and without profiler.step(), compressed or not, beside JSON of other programs."""
    (tmp_path / "config.json").write_text('{"lr": 0.1}')
    out = said(capsys, Planted(0, **STRAGGLER).write(tmp_path, **options))
    first, cause, *_ = out.splitlines()
    assert first.startswith("2 ranks of torch DDP over gloo, ")
    assert cause.startswith("1. straggler: Rank 1 computes longer")


def test_files_one_by_one_and_as_json(tmp_path, capsys):
    files = sorted(Planted(0, **STRAGGLER).write(tmp_path).iterdir())
    (entry,) = json.loads(said(capsys, *files, "--json"))
    assert entry["findings"][0]["cause"] == "straggler"
    assert not entry["nothing_to_gain"] and entry["steps"] == 6


def test_nothing_to_gain_is_said(tmp_path, capsys):
    assert "Nothing to gain here." in said(capsys, Planted(0).write(tmp_path))


def test_one_rank_alone_is_advised_on_as_far_as_it_goes(tmp_path, capsys):
    slow = {**STRAGGLER, "loading": lambda rank, step: 60}
    out = said(capsys, Planted(0, **slow).write(tmp_path, ranks=[0]))
    assert "1. data loading: Ranks wait for data." in out
    assert "straggler" not in out
    assert "Not known: late ranks, since only 1 of 2 ranks were recorded." in out


def test_without_shapes_sizes_are_not_known(tmp_path, capsys):
    out = said(capsys, Planted(0, shapes=False).write(tmp_path))
    assert "Nothing to gain here." in out and "record_shapes=True" in out


def test_a_profile_without_steps_of_training(tmp_path, capsys):
    events = [
        span("c10d::allreduce_", "cpu_op", 1, 0, 0.1),
        span("gloo:all_reduce", "user_annotation", 2, 0.1, 5),
    ]
    out = said(capsys, write(tmp_path / "rank0.json", events, world=1))
    assert "Nothing can be said." in out and "none has both forward and backward" in out


def test_what_the_network_should_carry(tmp_path, capsys):
    folder = Planted(0, rate=100_000, sizes=[MIB // 2] * 40, sends=[0, 20, 39]).write(tmp_path)
    assert "slow link" not in said(capsys, folder)
    out = said(capsys, folder, "--expect", "10gbit")
    assert "1. slow link: The link carries less than half of what it should" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["missing.json"], "there is no file missing.json"),
        (["missing.py:make"], "there is no file missing.py"),
        (["missing.py:make", "run.json"], "is recorded and advised on by itself"),
        (["run.json", "--world", "2"], "--world is for a model, such as my.py:make"),
        (["run.json", "--stack", "torch"], "--stack is for a model"),
    ],
    ids=str,
)
def test_a_mistake_is_one_sentence(tmp_path, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(tmp_path)
    (line,) = said(capsys, *arguments, status=2).splitlines()
    assert line.startswith("dpcore advise: ") and says in line


@pytest.mark.parametrize("arguments", [["run", "--stack", "jax"], ["run", "--expect", "fast"], []])
def test_a_wrong_option_ends_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["advise", *arguments])
    assert ended.value.code == 2 and "dpcore advise --help has examples" in capsys.readouterr().err


def test_show_ends_with_the_advice(tmp_path, capsys):
    folder = Planted(0, **STRAGGLER).write(tmp_path)
    assert main(["show", str(folder), "--html", str(tmp_path / "page.html")]) == 0
    assert "1. straggler: Rank 1 computes longer" in capsys.readouterr().out


# ---- runs of dpcore ------------------------------------------------------------------------------


def test_a_trace_of_dpcore_in_which_nothing_is_wrong(tmp_path, capsys):
    out = said(capsys, write_trace(tmp_path / "run.json", steps=6, link="1mbit,50us"))
    assert "2 ranks of dpcore over tcp" in out and "Nothing to gain here." in out


def train(comm, path, seconds, sizes, schedule="bucketed", steps=7):
    """Layers that sleep: ``seconds`` of each rank in forward, and twice as long in backward."""
    module, loss = layers(sizes, seconds[comm.rank], 2 * seconds[comm.rank])
    model = dpcore.DataParallel(module, comm=comm, schedule=schedule, bucket_cap_mb=0.2)
    for _ in range(2):
        loss(model).backward()
    with dpcore.trace(path, comm=comm):
        for _ in range(steps):
            loss(model).backward()


def test_a_late_rank_of_dpcore(tmp_path, capsys):
    path = tmp_path / "run.json"
    dpcore.spawn(train, 2, path, [0.005, 0.01], [1000] * 4)
    assert "1. straggler: Rank 1 computes longer" in (out := said(capsys, path)), out


@three_tries
def test_a_run_of_dpcore_in_which_nothing_is_wrong(tmp_path, capsys):
    """On a busy machine one rank may wake up late in nearly every step, and then that is said."""
    path = tmp_path / "run.json"
    dpcore.spawn(train, 2, path, [0.01, 0.01], [1000] * 4)
    in_time("Nothing to gain here." in (out := said(capsys, path)), out)


def test_a_better_schedule_over_an_emulated_link_is_predicted(tmp_path, capsys):
    """Nothing is sent before backward is over, though the link has time for half of it."""
    path = tmp_path / "run.json"
    options = {"link": "100mbit,50us", "transport": "tcp"}
    dpcore.spawn(train, 2, path, [0.005, 0.005], [60_000] * 6, "sequential", **options)
    out = said(capsys, path)
    assert "1. schedule: Schedule 'bucketed' hides more" in out, out
    assert "(simulator: " in out and "dp.DataParallel(model, schedule='bucketed'" in out


@pytest.mark.parametrize("stack", ["torch", "dpcore"])
def test_a_model_is_recorded(tmp_path, monkeypatch, capsys, stack):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from benchmarks.harness.sleeping import layers\n"
        "def make(rank, world):\n"
        "    return layers([1000] * 3, 0.002, 0.01 if rank else 0.04)\n"
    )
    out = said(capsys, "mine.py:make", "--stack", stack)
    assert out.startswith(f"mine.py:make by {stack}: 2 ranks of ")
    assert "1. straggler: Rank 0 computes longer" in out, out


def crowd(comm, path):
    torch.set_num_threads(64)
    train(comm, path, [0.01, 0.01], [1000] * 4)


def test_threads_that_share_processors_are_counted_in_a_trace_of_dpcore(tmp_path, capsys):
    path = tmp_path / "run.json"
    dpcore.spawn(crowd, 2, path)
    machine = json.loads(path.read_text())["otherData"]["machine"]
    assert (machine["threads"], machine["local_ranks"]) == (64, 2)
    machine["processors"] = 4
    content = json.loads(path.read_text())
    content["otherData"]["machine"] = machine
    path.write_text(json.dumps(content))
    out = said(capsys, path)
    assert "1. oversubscribed threads: " in out, out
    assert "2 ranks with 64 threads each share 4 processors" in out
    assert "OMP_NUM_THREADS=2 in front of the command" in out


def test_the_help_and_the_page_name_every_cause():
    code = "".join(path.read_text() for path in Path(advise.__file__).parent.glob("*.py"))
    causes = set(re.findall(r'cause="([^"]+)"', code))
    page = (Path(dpcore.__file__).parents[1] / "docs" / "slow.md").read_text()
    helped = " ".join(help_texts.ADVISE.partition("causes: ")[2].split()).rstrip(".").split(", ")
    assert len(causes) > 10 and causes == set(helped)
    assert causes == set(
        re.findall(r"^\| ([\w -]+) \|", page.split("## What it says")[1], re.M)
    ) - {"cause"}
