"""The command line, as a shell calls it; dpcore show is in tests/show."""

import json
import os
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dpcore as dp
from benchmarks.harness.options import parser as script_parser_of
from dpcore.__main__ import _parser, main
from dpcore.tools.compare.bench import OwnRanks, Plan, measurements
from dpcore.tools.compare.collectives import loop
from dpcore.tools.compare.collectives.cells import COLLECTIVES, Cell
from dpcore.tools.compare.collectives.contenders import PLAIN
from dpcore.tools.compare.collectives.summary import summarise
from dpcore.tools.compare.collectives.workers.layout import layout
from dpcore.tools.diagnose import black_box
from dpcore.tools.sizes import parse_sizes
from tests.command_line import status_of
from tests.ranks import python
from tests.swing import SWING

COMMANDS = list(_parser()._subparsers._group_actions[0].choices)
COLUMNS = "size count type redop root algorithm time algbw busbw #wrong"


def dpcore(*arguments, launcher=()):
    command = ["-m", *launcher, "dpcore", *arguments]
    return python.run(*command, capture_output=True, text=True, timeout=180)


def bench(*arguments, **options):
    out = dpcore("bench", "--json", "--seconds", "0.002", *arguments, **options)
    assert out.returncode == 0, out.stderr
    return [json.loads(line) for line in out.stdout.splitlines()]


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=str)
def test_help(command):
    out = dpcore(*command, "--help")
    assert out.returncode == 0
    assert "usage: dpcore" in out.stdout
    assert not command or "examples:" in out.stdout


def test_help_names_every_command_behind_a_door_and_fits_on_a_screen():
    said = _parser().format_help()
    lines = said.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    named = re.findall(r"^  ([a-z]+)(?: ring)?  +[a-z]", said, re.MULTILINE)
    assert set(named) == set(COMMANDS)
    for door in ("I train", "I study overlap", "I teach or learn", "I compare"):
        assert door in lines


def test_an_option_means_and_looks_the_same_in_all_commands():
    """Whatever a command adds by itself is of that command alone."""
    parsers = _parser()._subparsers._group_actions[0].choices | {
        "benchmarks": script_parser_of("", sizes="8", quick_sizes="8")
    }
    forms = {}
    for command, parser in parsers.items():
        for action in parser._actions:
            meaning = action.help.partition(" (")[0]
            form = (type(action), action.type, action.nargs, action.metavar, meaning)
            for option in action.option_strings:
                forms.setdefault(option, {}).setdefault(form, []).append(command)
    shared = {option: found for option, found in forms.items() if len(found) > 1}
    assert shared == {}
    several = {option for option, found in forms.items() if len(*found.values()) > 1}
    assert {"--world", "--link", "--rounds", "--sizes", "--out", "--json", "--seconds"} <= several


def test_version_needs_nothing_heavy():
    code = "import sys, dpcore.__main__ as m; m.main(['--version'])"
    checked = f"import sys\ntry:\n    {code}\nfinally:\n    assert 'torch' not in sys.modules"
    out = subprocess.run([sys.executable, "-c", checked], capture_output=True, text=True)
    assert (out.returncode, out.stdout) == (0, f"dpcore {dp.__version__}\n"), out.stderr


def test_no_command_says_where_to_begin():
    out = dpcore()
    assert (out.returncode, out.stderr) == (0, "")
    assert "Where to begin" in out.stdout
    named = set(re.findall(r"(?<!from )dpcore ([a-z]+)\b", out.stdout))
    assert {"show", "doctor", "bench"} <= named
    for command in named:
        assert dpcore(command, "--help").returncode == 0, command
    assert max(map(len, out.stdout.splitlines())) <= 100


def test_a_command_that_does_not_exist_shows_the_usage():
    out = dpcore("train")
    assert out.returncode == 2
    assert "usage: dpcore" in out.stderr


BARE = """
import importlib.abc, sys

class Bare(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "rich", "cloudpickle", "matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Bare())
from benchmarks.harness.options import parser as script_parser_of
from dpcore.__main__ import _parser, main
sys.exit(main(sys.argv[1:]))
"""


def in_a_bare_python(*arguments):
    """As in an environment that has Python alone."""
    command = [sys.executable, "-c", BARE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "arguments", [[], ["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)], ids=str
)
def test_help_needs_nothing_but_python(arguments):
    out = in_a_bare_python(*arguments)
    assert (out.returncode, out.stderr) == (0, "")
    assert "dpcore" in out.stdout


def test_a_package_that_is_missing_is_named(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    out = in_a_bare_python("show", str(tmp_path / "run.json"))
    assert out.returncode == 1
    assert out.stderr.startswith("dpcore show: numpy is not installed for ")
    assert out.stderr.endswith("pip install numpy\n")


def test_bench_prints_the_columns_of_nccl_tests():
    out = dpcore("bench", "--sizes", "8,64K", "--seconds", "0.002")
    assert out.returncode == 0, out.stderr
    lines = out.stdout.splitlines()
    header = next(line for line in lines if "algbw" in line)
    assert header.lstrip("#").split() == COLUMNS.split()
    rows = [line.split() for line in lines if not line.startswith("#")]
    assert [(row[0], row[1], row[-1]) for row in rows] == [("8", "2", "0"), ("65536", "16384", "0")]
    assert "# wrong elements: 0 OK" in lines


def test_bench_json():
    first, second = bench("--sizes", "1K", "--algorithm", "auto,ring")
    assert first["algorithm"] == "auto"
    assert second["algorithm"] == "ring"
    assert (first["bytes"], first["count"], first["type"]) == (1024, 256, "float32")
    assert first["wrong"] == 0
    assert first["contender"] == "dpcore arena"
    assert first["algbw"] == pytest.approx(1024 / first["median_s"] / 1e9)
    assert first["busbw"] == pytest.approx(first["algbw"])  # 2 (n-1)/n, n = 2
    assert {"commit", "command", "date", "machine", "versions", "rounds_s"} <= set(first)


def test_bench_of_an_algorithm_of_ones_own():
    first, second = bench("--sizes", "1K", "--world", "4", "--algorithm", f"ring,{SWING}")
    assert (first["algorithm"], second["algorithm"]) == ("ring", SWING)
    assert second["wrong"] == 0
    assert set(second["facts"]["stats"]["all_reduce"]) == {"moves"}


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {"op": "mean", "dtype": "bfloat16"}),
        (3, {"op": "max", "dtype": "int16", "plain": True}),
        (3, {"op": "prod", "dtype": "float64"}),
        (4, {"dtype": "uint8"}),
    ],
)
def test_bench_of_every_collective_is_right(world, options):
    plan = Plan(tuple(COLLECTIVES), (10, 30000), seconds=0.002, **options)
    found = dp.spawn(lambda comm: list(measurements(comm, plan)), world, mode="threads")[0]
    assert [one.wrong or 0 for one in found] == [0] * len(found)
    assert [one.cell.collective for one in found if one.wrong is None] == ["barrier"]
    assert {one.cell.collective for one in found} == set(COLLECTIVES)
    factors = {"broadcast": 1, "reduce": 1, "send_recv": 1, "barrier": 0}
    factors |= {"all_reduce": 2 * (world - 1) / world}
    for one, figures in zip(found, summarise(found), strict=True):
        factor = factors.get(one.cell.collective, (world - 1) / world)
        assert figures.busbw == pytest.approx(figures.algbw * factor)
        assert (one.cell.redop == "none") != one.cell.kind.reduces


def test_bench_sees_wrong_results():
    """The check itself: a collective that does nothing must not pass."""
    comm = dp.init(rank=0, world_size=1)
    try:
        measured = loop.Measurement(Cell("all_gather", 4000, 1), PLAIN)
        loop.prepare(OwnRanks(comm), measured)
        assert measured.wrong == 0
        ranks = OwnRanks(comm)
        ranks.backend.comm = SimpleNamespace(all_gather=lambda *_: None, barrier=comm.barrier)
        loop.prepare(ranks, measured)
        assert measured.wrong == 1000
    finally:
        dp.finalize()


def test_a_mean_that_is_no_number_is_wrong():
    plan = layout(Cell("all_reduce", 12, 3, op="mean"), rank=0)
    right = np.array([64.0, 65.0, 66.0], np.float32)
    assert plan.count_wrong(right * np.float32(1 + 2**-22)) == 0
    assert plan.count_wrong(np.array([64.0, np.nan, 66.0], np.float32)) == 1


def test_a_file_that_cannot_be_written_is_named_without_a_number_of_the_system(capsys):
    lesson = Path(__file__).parents[1] / "docs" / "learn" / "transformer.json"
    assert main(["simulate", str(lesson), "--link", "1gbit", "--html", "/no/x.html"]) == 2
    assert capsys.readouterr().err == "dpcore simulate: /no/x.html: No such file or directory\n"


def test_ctrl_c_shows_no_traceback(monkeypatch, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr("dpcore.tools.compare.bench.run", interrupted)
    assert main(["bench"]) == 130
    assert capsys.readouterr().err == "dpcore bench: interrupted\n"


def test_bench_on_the_ranks_of_torchrun():
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    (row,) = bench("--sizes", "1K", launcher=launcher)
    assert (row["world"], row["wrong"]) == (2, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "float12"], "choose from float64, float32"),
        (["--op", "median"], "choose from sum, mean"),
        (["--collective", "all_rejuice"], "choose from all_reduce"),
        (["--sizes", "8:1M:0.5"], "factor above 1"),
        (["--sizes", "8:64:nan"], "factor above 1"),
        (["--sizes", "8:64:inf"], "factor above 1"),
        (["--sizes", "8:1M:1B"], "holds more than 1000 sizes"),
        (["--sizes", "many"], "is not a size"),
        (["--sizes", "1025G"], "at most 1024G"),
        (["--seconds", "-1"], "--seconds: '-1' is not a time in seconds, more than 0"),
        (["--seconds", "inf"], "'inf' is not a time in seconds"),
        (["--seconds", "nan"], "'nan' is not a time in seconds"),
        (["--world", "-3"], "--world: '-3' is not a whole number of ranks from 1 to 4096"),
        (["--world", "1e9"], "'1e9' is not a whole number of ranks"),
        (["--algorithm", "circle", "--sizes", "8"], "circle"),
        (["--algorithm", SWING, "--world", "2,6"], "swing for 6 ranks: swing.py:"),
        (["--algorithm", SWING, "--collective", "broadcast"], "is for all_reduce, not for broadc"),
        (["--algorithm", "nowhere.py:swing"], "there is no file nowhere.py"),
    ],
)
def test_bench_explains_mistakes(arguments, message, capsys):
    assert status_of("bench", *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dpcore bench: ") and message in line


def test_default_sizes():
    sizes = parse_sizes("8:64M:4")
    assert sizes[:3] == (8, 32, 128)
    assert (len(sizes), sizes[-1]) == (12, 1 << 25)


# ---- inspect ---------------------------------------------------------------------------------

WAITING_RANK = """
import sys
import numpy as np
import dpcore as dp
comm = dp.init()
comm.all_reduce(np.ones(100, np.float32), "max")
group = comm.split(0)
group.broadcast(np.ones(7), 1)
if comm.rank == 1:
    sys.stdin.readline()
comm.barrier(timeout=120)
"""


@pytest.fixture
def hanging_rank():
    """A process whose rank 0 waits in a barrier for rank 1, which waits for a line of text."""
    ranks = []
    for rank in range(2):
        place = {
            "RANK": rank,
            "WORLD_SIZE": 2,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": os.getpid(),
        }
        environment = os.environ | {key: str(value) for key, value in place.items()}
        ranks.append(
            python.start("-c", WAITING_RANK, env=environment, stdin=subprocess.PIPE, text=True)
        )
    yield ranks[0].pid
    ranks[1].communicate("go on\n", timeout=60)
    assert [rank.wait(timeout=60) for rank in ranks] == [0, 0]


def _waits_at_the_end(boxes):
    """Whether a rank is in its last operation: ``split`` has operations of its own before."""
    return any(box["in_flight"] for box in boxes) and any(
        entry["collective"] == "broadcast" for box in boxes for entry in box["finished"]
    )


def test_inspect_shows_where_a_rank_hangs(hanging_rank, tmp_path, capsys):
    boxes = []
    deadline = time.monotonic() + 60
    while not _waits_at_the_end(boxes) and time.monotonic() < deadline:
        time.sleep(0.2)
        try:
            boxes = black_box.read(hanging_rank)
        except dp.Error:
            continue  # still on its way to init()
    assert main(["inspect", "--json", str(hanging_rank)]) == 0
    root, group = (json.loads(line) for line in capsys.readouterr().out.splitlines())

    assert (root["rank"], root["world_size"], root["pid"]) == (0, 2, hanging_rank)
    assert root["communicator"] == "init"
    (barrier,) = root["in_flight"]
    assert barrier["collective"] == "barrier"
    assert barrier["number"] == root["operations_entered"] - 1
    assert 0 < barrier["since_seconds"] < 60
    reduce = root["finished"][0]
    expected = {"collective": "all_reduce", "dtype": "float32", "count": 100, "bytes": 400}
    assert reduce == reduce | expected | {"number": 0, "op": "max"}
    assert root["abort"] is None

    assert (group["communicator"], group["in_flight"]) == ("split", [])
    (broadcast,) = group["finished"]
    assert (broadcast["collective"], broadcast["root"]) == ("broadcast", 1)

    text = dpcore("inspect", str(hanging_rank)).stdout
    assert f"process {hanging_rank}: rank 0 of 2" in text
    assert f"operation {barrier['number']} (barrier)" in text
    assert "operation 0 (all_reduce of 100 x float32, max)" in text

    written = ["--flight-recorder", str(tmp_path / "dump")]
    assert main(["inspect", str(hanging_rank), *written]) == 2
    assert main(["inspect", "--job", str(hanging_rank), *written]) == 0
    first, other = (
        pickle.loads((tmp_path / f"dump/rank_{rank}").read_bytes())["entries"] for rank in (0, 1)
    )
    assert first[0]["input_sizes"] == [[100]] and first[0]["input_dtypes"] == ["Float"]
    (started,) = (entry for entry in first if entry["state"] == "started")
    assert started["profiling_name"] == "gloo:barrier"
    assert [entry["state"] for entry in other].count("started") == 0


def test_inspect_shows_why_a_rank_gave_up(capsys):
    comm = dp.init(rank=0, world_size=1)
    try:
        comm.all_reduce(np.ones(3))
        comm.abort("the loss is not a number")
        # Other tests of this process may have left communicators of their own behind.
        boxes = [box for box in black_box.read(os.getpid()) if box["abort"] is not None]
        (box,) = [box for box in boxes if "not a number" in box["abort"]["reason"]]
        assert box["abort"]["error"] == "PeerLost"
        assert box["abort"]["culprit"] == 0
        assert "the loss is not a number" in box["abort"]["reason"]
        assert main(["inspect", str(os.getpid())]) == 0
        out = capsys.readouterr().out
        assert "rank 0 is to blame" in out
        assert "the loss is not a number" in out
    finally:
        dp.finalize()


def test_inspect_shows_ranks_that_are_threads():
    def work(comm):
        comm.barrier()
        boxes = black_box.read(os.getpid()) if comm.rank == 0 else []
        comm.barrier()
        return [box["rank"] for box in boxes if box["world_size"] == 3]

    def in_a_clean_process(comm):  # nobody else's communicators are there
        dp.finalize()
        return dp.spawn(work, 3, mode="threads")[0]

    (ranks,) = dp.spawn(in_a_clean_process, 1)
    assert sorted(ranks) == [0, 1, 2]


def test_inspect_of_a_process_without_ranks(capsys):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert main(["inspect", str(other.pid)]) == 1
        assert "no dpcore communicator" in capsys.readouterr().err
        other.communicate(b"\n")
    assert main(["inspect", str(other.pid)]) == 1
    assert "there is no process" in capsys.readouterr().err
