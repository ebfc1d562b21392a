"""`dpcore compare` and `dpcore demo` as they are called: small runs, and what they leave."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dpcore.__main__ import main
from dpcore.errors import Unsupported
from dpcore.tools import argument_types, hosts
from dpcore.tools.compare import running
from dpcore.tools.compare.store import Store
from tests.command_line import status_of
from tests.ranks import python
from tests.swing import SWING

OWN = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.never_used = nn.Linear(2, 2)

    def forward(self, x):
        return self.layers(x)

def make(rank, world):
    model = Model()
    x = torch.randn(4, 8)
    return model, lambda model: model(x).square().mean()
"""
SHORT = ["--rounds", "2", "--seconds", "0.001"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(OWN)
    (tmp_path / "mine.py").write_text(
        "import dpcore\nclass Late(dpcore.LaunchSchedule):\n    def backward_end(self, control):\n"
        "        for bucket in range(control.buckets):\n            control.launch(bucket)\n"
        "        control.wait_for_all()\n"
    )
    return tmp_path


def test_a_model_of_ones_own_with_a_schedule_of_ones_own(folder, capsys):
    """All contenders run, everything named lies there, an unused parameter is no obstacle."""
    names = "torch,torch:1,default,bucketed:1,mine.py:Late"
    assert main(["compare", "my.py:make", "--contenders", names, *SHORT]) == 0
    said = capsys.readouterr().out
    assert "2 ranks on this machine" in said
    assert "never_used.weight and 1 more got no gradient" in said
    assert "too few to conclude anything" in said
    rows = list(csv.DictReader((folder / "compare/my-make/compare.csv").open()))
    assert [row["contender"] for row in rows] == names.split(",")
    for row in rows:
        assert float(row["step_ms_low"]) <= float(row["step_ms"]) <= float(row["step_ms_high"])
        assert (row["world"], row["rounds"], row["reference"]) == ("2", "2", "torch")
    single = list(csv.DictReader((folder / "compare/my-make/rounds.csv").open()))
    assert [(row["contender"], row["round"]) for row in single] == [
        (name, number) for name in names.split(",") for number in ("1", "2")
    ]
    lines = [json.loads(line) for line in (folder / "compare/my-make/compare.jsonl").open()]
    assert [float(row["step_ms"]) for row in single[:2]] == pytest.approx(
        lines[0]["rounds_ms"], rel=1e-4
    )
    assert {"machine", "commit", "command", "rounds_ms", "overlap"} <= set(lines[0])
    page = (folder / "compare/my-make/compare.html").read_text()
    assert all(name in page for name in names.split(","))


def test_one_rank_shows_what_a_wrapper_costs_it(folder, capsys):
    own = OWN.replace("lambda model: model", "lambda model: checked() or model")
    checked = "def checked():\n    assert torch.is_autocast_enabled('cpu')\n"
    (folder / "my.py").write_text(own + checked)
    command = ["compare", "my.py:make", "--world", "1", "--amp", "--contenders", "torch,bucketed"]
    assert main([*command, "--rounds", "6", "--seconds", "0.001"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1 rank on this machine" in said and "One rank sends nothing" in said
    assert "under torch.autocast in bfloat16" in said
    assert "Communication adds" not in said
    for row in csv.DictReader((folder / "compare/my-make/compare.csv").open()):
        assert (row["world"], row["exposed_ms"], row["overlap"]) == ("1", "", "")
        assert float(row["step_ms"]) > 0


WAYS = """
import torch
import torch.distributed as dist
import dpcore

def hook(state, bucket):
    sent = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return sent.get_future().then(lambda future: future.value()[0])

def wrap(model):
    return dpcore.DataParallel(model), torch.optim.AdamW(model.parameters(), lr=1e-3)
"""
SLICES = Path(__file__).resolve().parents[2] / "examples/slices.py"
P3, BYTE_SCHEDULER = f"{SLICES}:P3", f"{SLICES}:ByteScheduler:1"
EXACT = ["torch", "priority", "dear", "zero1", "zero2:1", "torch-zero1", P3, BYTE_SCHEDULER]
EXACT += ["hook:ways.py:hook"]
OTHERS = ["local_sgd:2", "diloco:4", "hook:fp16", "hook:powersgd:2", "torch-hook:fp16"]


def test_whole_steps_of_schedules_hooks_and_a_recipe(folder, capsys):
    """What computes the same has the same loss, the rest says what it computes instead. A round has
    a multiple of the steps after which ranks agree."""
    (folder / "my.py").write_text(OWN.replace("self.never_used = nn.Linear(2, 2)", ""))
    (folder / "ways.py").write_text(WAYS)
    names = [*EXACT, *OTHERS, "ways.py:wrap"]
    assert main(["compare", "my.py:make", "--contenders", ",".join(names), *SHORT]) == 0
    said = capsys.readouterr().out
    assert "ranks agree every 4 steps" in said and "sent as matrices of rank 2" in said
    assert "Every step includes that of the optimizer, adamw" in said
    kept = folder / "compare/my-make"
    rows = {row["contender"]: row for row in csv.DictReader((kept / "compare.csv").open())}
    assert list(rows) == names
    losses = {name: float(row["loss"]) for name, row in rows.items()}
    same = [*EXACT, "ways.py:wrap"]
    assert [losses[name] for name in same] == pytest.approx([losses["torch"]] * len(same), rel=1e-4)
    assert all(losses[name] != losses["torch"] for name in ("local_sgd:2", "diloco:4"))
    assert [name for name, row in rows.items() if not row["changes"]] == EXACT[:-1]
    assert {row["optimizer"] for row in rows.values()} == {"adamw"}
    assert [name for name in names if not rows[name]["exposed_ms"]] == [*EXACT[1:8], "ways.py:wrap"]
    lines = [json.loads(line) for line in (kept / "rounds.jsonl").open()]
    assert lines[-1]["result"]["steps"] % 4 == 0


def test_an_interrupted_comparison_goes_on_where_it_was(folder, capsys, monkeypatch):
    """And one with more rounds adds to those that are there."""
    command = ["compare", "my.py", "--contenders", "torch,sequential", "--seconds", "0.001"]
    add, left = Store.add, [2]

    def add_two(self, **line):
        add(self, **line)
        left[0] -= "round" in line
        if left[0] == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(Store, "add", add_two)
    assert main([*command, "--rounds", "3"]) == 130
    assert "2 of 3 rounds are in compare/my" in capsys.readouterr().err
    monkeypatch.setattr(Store, "add", add)
    kept = folder / "compare/my/rounds.jsonl"
    with kept.open("a") as file:
        file.write('{"cell": "half of a li')
    first = kept.read_text().splitlines()[1:3]
    measured = []
    monkeypatch.setattr(running, "run_job", counted(running.run_job, measured))
    for rounds, job_rounds in (("3", (2, 3)), ("4", (3, 4))):
        assert main([*command, "--rounds", rounds]) == 0
        assert f"continuing: {job_rounds[0]} of {rounds} rounds" in capsys.readouterr().out
        assert measured.pop() == job_rounds
        assert kept.read_text().splitlines()[1:3] == first
    assert main([*command, "--rounds", "4"]) == 0  # complete: begins anew
    assert measured.pop() == (0, 4)
    assert kept.read_text().splitlines()[1:3] != first


def counted(run_job, measured):
    def run(job, *arguments):
        measured.append((job.first_round, job.rounds))
        return run_job(job, *arguments)

    return run


def test_two_comparisons_do_not_share_a_folder(tmp_path):
    path = tmp_path / "rounds.jsonl"
    first, second = Store(path, {"model": "mlp"}), Store(path, {"model": "mlp"})
    first.open()
    first.add(cell="machine/none/2", round={"seconds": {}})
    with pytest.raises(Unsupported, match=r"another comparison writes to .*--out"):
        second.open()
    first.close()
    second = Store(path, {"model": "mlp"})
    second.open()
    assert second.begun == 1
    second.close()


def test_another_model_begins_anew(tmp_path):
    path = tmp_path / "rounds.jsonl"
    store = Store(path, {"model": "mlp"})
    store.open()
    store.add(cell="machine/none/2", round={"seconds": {}})
    assert Store(path, {"model": "mlp"}).begun == 1
    assert Store(path, {"model": "many"}).begun == 0


def test_over_an_emulated_link(folder, capsys, monkeypatch):
    monkeypatch.setattr(hosts, "why_not", lambda: "needs rights that nobody has")
    command = ["compare", "my.py:make", "--contenders", "torch,default", "--link", "100mbit,1ms"]
    assert main([*command, "--json", *SHORT]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["contender"] for line in lines] == ["torch", "default"]
    for line in lines:
        assert (line["kind"], line["link"]) == ("emulated", "100mbit,1ms")
        assert line["step"]["median"] > 1  # milliseconds: both are as slow as the link
        assert "A real link needs rights that nobody has" in line["notes"][0]
        assert "not Gloo" in line["notes"][0]


@pytest.mark.skipif(bool(hosts.why_not()), reason=hosts.why_not() or "namespaces can be made")
def test_between_hosts_of_their_own(folder, capsys):
    command = ["compare", "my.py:make", "--contenders", "torch,default", "--link", "100mbit"]
    assert main([*command, *SHORT]) == 0
    assert "between hosts of their own (network namespaces), 100mbit" in capsys.readouterr().out
    assert main([*command[:-1], "100mbit,1ms"]) == 2
    assert "--emulated" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tranformer"], "did you mean 'transformer'"),
        (["none.py:make"], "there is no file none.py"),
        (["my.py:make", "--contenders", "bucketd"], "did you mean 'bucketed'"),
        (["--world", "1", "--link", "1gbit"], "one rank sends nothing over a link"),
        (["--world", "two"], "--world: 'two' is not a whole number of ranks"),
        (["--rounds", "0"], "--rounds: '0' is not a whole number from 1"),
        (["--seconds", "nan"], "--seconds: 'nan' is not a time in seconds"),
        (["--threads", "-1"], "--threads: '-1' is not a whole number from 1"),
        (["--link", "50us"], "'50us' is not a link"),
        (["--link", "1gbit,wrong"], "'wrong' is not understood"),
        (["--link", "0gbit"], "'0gbit' is out of range"),
        (["--link", "1gbit,1gbit"], "names a link twice"),
        (["--link", "none,50us"], "'50us' is not a link"),
        (["--link", "fast"], "'fast' is not a link"),
        (["--optimizer", "lion"], "--optimizer: invalid choice: 'lion'"),
        (["--contenders", "hook:fp8"], "no hook 'fp8'"),
        (["--contenders", "hook:my.py:make"], "hook:my.py:make: communication hook make: it needs"),
        (["--contenders", "my.py:Model"], "neither a dpcore.LaunchSchedule nor a function wrap"),
        (["--emulated", "--link", "1gbit", "--contenders", "torch-zero1"], "over an emulated link"),
        (["--emulated"], "--emulated: there is no link to emulate"),
        (["all_reduce", "--peers", "horovod"], "--peers 'horovod'"),
        (["all_reduce", "--sizes", "many"], "is not a size"),
        (["all_reduce", "--sizes", "8:64:nan"], "with a factor above 1"),
        (["all", "--link", "1gbit", "--threads", "2"], "--link, --threads: for models only"),
        (["all_reduce", "--algorithm", SWING, "--world", "2,3"], "swing for 3 ranks: swing.py:"),
        (["all", "--algorithm", SWING], "it is for all_reduce, not for reduce_scatter"),
        (["--algorithm", "ring"], "--algorithm: for collectives only, and this is a model"),
        (["--peers", "gloo"], "--peers: for collectives only, and this is a model"),
    ],
)
def test_mistakes(folder, capsys, arguments, said):
    assert status_of("compare", *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("my.py:forget", "has no 'forget'; it has"),
        ("wrong.py:make", "returned the model alone"),
        ("fails.py:make", "step(model) raised RuntimeError: mat1 and mat2"),
        ("my.py --contenders wrong.py:wrap", "has to return (wrapped, optimizer)"),
    ],
)
def test_mistakes_that_ranks_find(folder, capsys, model, said):
    text = OWN.replace(", lambda model: model(x).square().mean()", "")
    (folder / "wrong.py").write_text(f"{text}\ndef wrap(model):\n    return model\n")
    (folder / "fails.py").write_text(OWN.replace("torch.randn(4, 8)", "torch.randn(4, 9)"))
    assert main(["compare", *model.split()]) == 1
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_links_and_worlds_in_words():
    assert argument_types.links("none,1gbit,50us,100mbit") == ["", "1gbit,50us", "100mbit"]
    assert argument_types.worlds("2,4,2") == [2, 4]


def test_the_example_runs(folder, capsys):
    assert main(["compare", "--example"]) == 0
    (folder / "example.py").write_text(capsys.readouterr().out)
    assert main(["compare", "example.py:make", "--contenders", "torch,default", *SHORT]) == 0


def test_a_collective_in_the_columns_of_nccl_tests(folder):
    """A peer that is missing shows what installs it."""
    command = ["-m", "dpcore", "compare", "all_reduce", "--peers", "gloo,mpich", "--sizes", "8,64K"]
    command += ["--algorithm", f"ring,{SWING}"]
    out = python.run(*command, "--quick", "--rounds", "1", capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    columns = "size count type redop contender time min algbw busbw #wrong x peer of bound"
    assert columns.split() in [line.lstrip("#").split() for line in out.stdout.splitlines()]
    rows = [
        line.split() for line in out.stdout.splitlines() if re.match(r" +\d+ +\d+ +float", line)
    ]
    assert {(row[0], row[3]) for row in rows} == {("8", "sum"), ("65536", "sum")}
    assert {"Gloo", "dpcore", "ring", "swing.py:swing"} <= {row[4] for row in rows}
    has_mpich = "# without mpich" not in out.stdout
    assert has_mpich or ".venv-mpich/bin/pip install numpy mpi4py mpich" in out.stdout


def test_the_arguments_load_nothing_heavy():
    code = "import sys, dpcore.tools.compare.arguments; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "rich", "dpcore._C"} & set(out.stdout.split())
