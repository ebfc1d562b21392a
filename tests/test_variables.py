"""DPCORE_TRACE, DPCORE_LINK, DPCORE_SCHEDULE: what can be asked of a script that is not edited."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import dpcore as dp
from dpcore.base.link import link_or_variable
from dpcore.ddp.wrapper import launch_schedule
from dpcore.recorder import joining
from dpcore.recorder.file import RankRecord, chrome_trace, joined
from dpcore.reference import launches
from dpcore.reference.buckets import plan_buckets
from dpcore.tools.show import figures_of, read_run
from tests.ranks import python

ROOT = Path(__file__).resolve().parent.parent

# As in tutorials: nothing of dpcore but the import, and the model is gone before the program ends.
SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
from dpcore import DistributedDataParallel as DDP

def train(how, rank):
    torch.manual_seed(rank)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(8, 40)).sum().backward()
        optimizer.step()
        if step == 4 and rank == 1 and how == "raises":
            raise ArithmeticError("loss is nan")
        if step == 4 and rank == 1 and how == "exits":
            sys.exit(3)
    if how == "ends":
        dist.destroy_process_group()
    if how == "terminated":
        dist.barrier()
        print("ready", flush=True)
        while True:  # signal.pause() would not notice one that came just before it
            time.sleep(0.1)

if __name__ == "__main__":
    dist.init_process_group(sys.argv[2])
    train(sys.argv[1], dist.get_rank())
"""


@pytest.fixture
def ranks(tmp_path, free_port):
    """Starts the script on two ranks, as torchrun does but for its own start."""
    (tmp_path / "train.py").write_text(SCRIPT)

    def start(how, backend="gloo", **variables):
        plain = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        plain |= {f"DPCORE_{name.upper()}": value for name, value in variables.items()}
        return [
            python.start(
                "train.py", how, backend, cwd=tmp_path,
                env={**os.environ, **plain, "RANK": str(rank)},
                stdout=-1, stderr=-1, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip

    return start


@pytest.fixture
def free_port():
    import socket

    def find():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            return listener.getsockname()[1]

    return find


def ended(processes):
    said = [process.communicate(timeout=60) for process in processes]
    return [process.returncode for process in processes], [errors for _, errors in said]


@pytest.mark.parametrize("backend", ["gloo", "dpcore"])
def test_a_run_is_one_file_with_everything_that_pages_need(ranks, tmp_path, backend):
    variables = {"trace": "run.json", "link": "1gbit,2ms", "schedule": "sequential"}
    codes, errors = ended(ranks("ends", backend, **variables))
    assert codes == [0, 0], errors
    said = [text for text in errors if "DPCORE_TRACE" in text]
    assert len(said) == 1 and "shows 2 ranks" in said[0]  # the last one says it
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", "train.py"]
    run = read_run(tmp_path / "run.json")
    assert run.world_size == 2
    about = json.loads((tmp_path / "run.json").read_text())["otherData"]
    (model,) = about["models"]
    assert model["schedule"] == "sequential"
    assert [len(bucket["gradients"]) for bucket in model["buckets"]] == [4]
    assert "error" not in about
    if backend == "gloo":  # of the communicator that DataParallel has made for it
        assert about["link"] == "1gbit,2ms"
        assert figures_of(run).ranks[0].exposed_ms > 6 * 2  # two messages per step, at least


@pytest.mark.parametrize(("how", "code"), [("raises", 1), ("exits", 3)])
def test_a_rank_that_fails_is_in_the_file_with_the_others(ranks, tmp_path, how, code):
    codes, errors = ended(ranks(how, trace="run.json"))
    assert codes[1] == code and codes[0] != 0, errors
    about = json.loads((tmp_path / "run.json").read_text())
    assert {event["pid"] for event in about["traceEvents"]} == {0, 1}
    # An exit is no error; the error is that of the rank that waits for the one that has left.
    reason = {"raises": "rank 1: ArithmeticError: loss is nan", "exits": "rank 0: PeerLost: bucket"}
    assert about["otherData"]["error"].startswith(reason[how])
    assert len(about["otherData"]["models"]) == 1


def test_the_error_of_the_file_is_the_cause():
    """A rank that has lost another may end, and write, before the one that had the error."""

    def part(rank, error):
        record = RankRecord(rank, process=1, threads={}, dropped=0, events=[])
        return chrome_trace([record], 2, {"models": [], "error": error})

    cause, effect = "rank 1: ValueError: no data", "rank 0: PeerLost: bucket 0: rank 1 gave up"
    for texts in ((cause, effect), (effect, cause)):
        assert joined([*map(part, (0, 1), texts)])["otherData"]["error"] == cause


def test_ranks_that_a_launcher_ends_are_in_the_file(ranks, tmp_path):
    processes = ranks("terminated", trace="run.json")
    for process in processes:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
    codes, _ = ended(processes)
    assert codes == [-signal.SIGTERM] * 2  # as without a trace
    about = json.loads((tmp_path / "run.json").read_text())
    assert {event["pid"] for event in about["traceEvents"]} == {0, 1}


def add_ones(comm, times=3):
    for _ in range(times):
        comm.all_reduce(np.ones(100, np.float32))


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_a_second_run_replaces_the_file(monkeypatch, tmp_path, mode):
    monkeypatch.setenv("DPCORE_TRACE", str(tmp_path / "run.json"))
    for world, times in ((3, 3), (2, 5)):
        dp.spawn(add_ones, world, times, mode=mode)
        entries = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
        operations = [entry for entry in entries if entry.get("cat") == "operation"]
        assert len(operations) == world * times
        assert {entry["pid"] for entry in entries} == set(range(world))
        assert min(entry["ts"] for entry in entries) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_communicator_after_the_first_has_a_file_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("DPCORE_TRACE", str(tmp_path / "run.json"))
    for _ in range(2):
        add_ones(dp.init(rank=0, world_size=1))
        dp.finalize()
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "run.2.json"}


def test_a_trace_of_the_program_goes_first(monkeypatch, tmp_path):
    monkeypatch.setenv("DPCORE_TRACE", str(tmp_path / "run.json"))
    comm = dp.init(rank=0, world_size=1)
    add_ones(comm)
    with (
        pytest.warns(UserWarning, match="DPCORE_TRACE is ignored: the program records itself"),
        dp.trace(tmp_path / "own.json") as trace,
    ):
        add_ones(comm)
    assert trace.by_operation()["all_reduce"]["count"] == 3
    dp.finalize()
    assert [path.name for path in tmp_path.iterdir()] == ["own.json"]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("nowhere/run.json", "there is no folder .*nowhere; name the file"),
        (".", "is a folder; name the file"),
        ("/dev/null", "is not a regular file; name the file"),
    ],
)
def test_a_file_that_cannot_be_written_is_named_at_the_start(monkeypatch, value, says):
    monkeypatch.setenv("DPCORE_TRACE", value)
    with pytest.raises(dp.Unsupported, match=f"^DPCORE_TRACE={re.escape(value)}: .*{says}"):
        dp.init(rank=0, world_size=1)
    monkeypatch.delenv("DPCORE_TRACE")
    dp.init(rank=0, world_size=1)  # nothing was left open
    dp.finalize()


def part(rank, monotonic, unix, error=None, began=0):
    """A file with one rank, one event at its begin and one a millisecond later."""
    events = [
        {"ph": "M", "pid": rank, "ts": 0, "name": "process_name"},
        {"ph": "X", "pid": rank, "ts": 0.0},
        {"ph": "X", "pid": rank, "ts": 1000.0},
    ]
    other = {"monotonicBaseNanoseconds": monotonic, "dropped": {str(rank): 0}, "schedules": {}}
    other |= {"models": [rank], "machine": {}} | ({"error": error} if error else {})
    base = {"baseTimeNanoseconds": unix, "distributedInfo": {"world_size": 3}}
    return {"traceEvents": events, "otherData": other, **base}


def test_ranks_are_joined_on_one_clock(tmp_path):
    path, hour = tmp_path / "run.json", 3600 * 10**9
    now = time.time_ns()
    joining.add(path, part(1, 5_000_000, now, "rank 1: it fails"), "run", now)
    # Of the same host, whose Unix clock was set in between: the monotonic one counts.
    joining.add(path, part(0, 3_000_000, now - 50_000_000, "rank 0: PeerLost"), "run", now)
    # Of another host, which was started an hour before.
    ranks = joining.add(path, part(2, 5_000_000 + hour, now + 7_000_000), "run", now)
    assert ranks == {0, 1, 2}
    content = json.loads(path.read_text())
    times = {
        rank: [e["ts"] for e in content["traceEvents"] if e["pid"] == rank] for rank in range(3)
    }
    assert times[0] == [0, 0, 1000]
    assert times[1] == [0, 2000, 3000]
    assert times[2][1] == pytest.approx(57000)
    assert content["otherData"]["error"] == "rank 1: it fails"
    assert content["otherData"]["models"] == [0]
    assert [e["pid"] for e in content["traceEvents"]] == sorted([0, 1, 2] * 3)


def test_what_another_run_has_left_is_replaced(tmp_path):
    path = tmp_path / "run.json"
    for text in ("", "[]", '{"traceEvents": []}', "{"):
        path.write_text(text)
        assert joining.add(path, part(0, 0, 0), "run", time.time_ns()) == {0}
    assert joining.add(path, part(1, 0, 0), "another", time.time_ns()) == {1}
    assert joining.add(path, part(0, 0, 0), "another", time.time_ns()) == {0}  # ended before
    began = time.time_ns() - 10**9
    assert joining.add(path, part(0, 0, 0), "another", began) == {0}  # its rank 0 ended once more


# ---- the link --------------------------------------------------------------------------------


def test_the_link_of_the_program_wins(monkeypatch):
    monkeypatch.setenv("DPCORE_LINK", "1gbit,50us")
    assert link_or_variable(None, 2) == "1gbit,50us"
    assert link_or_variable("10gbit,2ms", 2) == "10gbit,2ms"
    monkeypatch.setenv("DPCORE_LINK", "")
    assert link_or_variable(None, 2) is None


def test_a_link_makes_ranks_slow(monkeypatch):
    def seconds(comm):
        begin = time.perf_counter()
        comm.all_reduce(np.ones(1 << 20, np.uint8), "max")
        return time.perf_counter() - begin

    monkeypatch.setenv("DPCORE_LINK", "100mbit,1ms")
    least = 2 * (1 << 19) * 8 / 100e6  # half of it, there and back
    assert min(dp.spawn(seconds, 2, mode="threads")) > least


def test_a_link_that_means_nothing_is_an_error_that_names_the_variable(monkeypatch):
    monkeypatch.setenv("DPCORE_LINK", "fast")
    with pytest.raises(dp.Unsupported, match=r"^DPCORE_LINK=fast: .*write '10gbit,50us'"):
        dp.init(rank=0, world_size=1)


@pytest.mark.parametrize("backend", ["nccl", "cuda", "torch"])
def test_a_link_that_would_have_no_effect_is_an_error(monkeypatch, backend):
    monkeypatch.setenv("DPCORE_LINK", "1gbit")
    with pytest.raises(dp.Unsupported, match=f"^DPCORE_LINK=1gbit: .* not backend='{backend}'"):
        dp.init(backend, rank=0, world_size=1)


# ---- the schedule ----------------------------------------------------------------------------


@pytest.fixture
def alone():
    yield dp.init(rank=0, world_size=1)
    dp.finalize()


@pytest.mark.parametrize("name", [name for name in launch_schedule.NAMES if name != "auto"])
def test_the_schedule_of_the_program_wins(monkeypatch, alone, name):
    monkeypatch.setenv("DPCORE_SCHEDULE", name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the oracle
        assert dp.DataParallel(torch.nn.Linear(2, 1)).schedule == name
        assert dp.DataParallel(torch.nn.Linear(2, 1), schedule="flat").schedule == "flat"
        own = dp.DataParallel(torch.nn.Linear(2, 1), schedule=WhenAllIsThere())
    assert own.schedule == "WhenAllIsThere"


class WhenAllIsThere(dp.LaunchSchedule):
    def backward_end(self, control):
        for bucket in range(control.buckets):
            control.launch(bucket)
        control.wait_for_all()


def test_a_schedule_that_does_not_exist_is_an_error_that_names_the_variable(monkeypatch, alone):
    monkeypatch.setenv("DPCORE_SCHEDULE", "fastest")
    with pytest.raises(dp.Unsupported, match=r"^DPCORE_SCHEDULE=fastest: it must be one of auto"):
        dp.DataParallel(torch.nn.Linear(2, 1))
    dp.DataParallel(torch.nn.Linear(2, 1), schedule="flat")


@pytest.mark.parametrize("of_0, of_1", [("flat", "sequential"), (None, "per_parameter")])
def test_ranks_with_different_schedules_are_told_which(of_0, of_1):
    def body(comm):
        said = of_0 if comm.rank == 0 else of_1
        os.environ.pop("DPCORE_SCHEDULE", None)
        if said is not None:
            os.environ["DPCORE_SCHEDULE"] = said
        with pytest.raises(dp.Mismatch) as mismatch:
            dp.DataParallel(torch.nn.Linear(2, 1), comm=comm)
        dp.DataParallel(torch.nn.Linear(2, 1), comm=comm, schedule="flat")  # the program's wins
        return str(mismatch.value)

    for rank, text in enumerate(dp.spawn(body, 2)):
        assert text.startswith(f"rank {rank}: the models of ranks 0 and 1 differ. Rank 0 has 'sch")
        value = "unset or auto" if of_0 is None else f"= {of_0}"
        assert f"Rank 0 has 'schedule=auto, DPCORE_SCHEDULE {value}' where rank 1 has" in text
        assert f"'schedule=auto, DPCORE_SCHEDULE = {of_1}'" in text


def test_ranks_with_different_schedules_of_the_program_are_told_which():
    def body(comm):
        with pytest.raises(dp.Mismatch, match=r"'schedule=flat' where rank 1 has 'schedule=buck"):
            schedule = ["flat", "bucketed"][comm.rank]
            dp.DataParallel(torch.nn.Linear(2, 1), comm=comm, schedule=schedule)

    dp.spawn(body, 2, mode="threads")


def test_the_names_are_those_of_the_core(alone):
    with pytest.raises(dp.Unsupported, match=r"there are ([a-z0-9_, ]+), or write one") as refusal:
        dp.DataParallel(torch.nn.Linear(2, 1), schedule="fastest")
    listed = re.search(r"there are (.+), or write", str(refusal.value))[1].split(", ")
    assert listed == [*launches.SCHEDULES, *launches.ACROSS_STEPS]


def test_the_names_mean_the_same_in_the_core(alone):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the oracle
        wrapped = {
            name: dp.DataParallel(torch.nn.Linear(2, 1), schedule=name, bucket_cap_mb=1)
            for name in launches.SCHEDULES
        }
    exact = [name for name, model in wrapped.items() if model.is_exact]
    assert exact == list(launches.EXACT)
    # A weight of 8 bytes and a bias of 4: together, unless each parameter has a bucket.
    cut = {name: len(plan_buckets([8, 4], [0, 0], [1, 0], launches.caps_of(name, [1 << 20])))
           for name in launches.SCHEDULES}  # fmt: skip
    assert cut == {name: len(model.bucket_report()) for name, model in wrapped.items()}


@pytest.mark.parametrize(
    ("place", "names"),
    [
        ("docs/variables.md", launches.SCHEDULES),
        ("dpcore/ddp/data_parallel.py", launches.SCHEDULES),
        ("dpcore/tools/compare/arguments.py", launches.EXACT),
        ("dpcore/tools/simulate/command.py", launches.EXACT),
        ("dpcore/reference/launches.py", launches.SCHEDULES),
    ],
)
def test_who_lists_the_names_lists_all_of_them(place, names):
    """In the same order, with only punctuation, or a sentence in parentheses, in between."""
    text = (ROOT / place).read_text()
    between = r"[`\",\s]+(?:or )?`?" if place != "dpcore/reference/launches.py" else r" .*\n +"
    assert re.search(between.join(names), text)


# ---- switches and names ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["DPCORE_READ_PEERS", "DPCORE_JOIN"])
def test_a_switch_that_is_neither_0_nor_1_is_an_error(monkeypatch, name):
    monkeypatch.setenv(name, "no")
    with pytest.raises(dp.Unsupported, match=rf"^{name}=no: use 0 or 1$"):
        dp.init(rank=0, world_size=1)
    monkeypatch.setenv(name, "")
    dp.init(rank=0, world_size=1)
    dp.finalize()


def test_a_check_of_memory_that_is_neither_0_nor_1_is_an_error():
    script = "import dpcore as dp; dp.init(rank=0, world_size=1)"  # a process reads it once
    command = [sys.executable, "-c", script]
    environment = {**os.environ, "DPCORE_CHECK": "yes"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.endswith("dpcore.errors.Unsupported: DPCORE_CHECK=yes: use 0 or 1\n")


def test_a_look_for_nan_that_is_neither_0_nor_1_is_an_error(monkeypatch, alone):
    monkeypatch.setenv("DPCORE_CHECK_FINITE", "yes")
    with pytest.raises(dp.Unsupported, match=r"^DPCORE_CHECK_FINITE=yes: use 0 or 1$"):
        dp.DataParallel(torch.nn.Linear(2, 1))


@pytest.mark.parametrize("said", ["rings", "nowhere.py:swing"])
def test_an_algorithm_that_does_not_exist_is_an_error_that_names_the_variable(monkeypatch, said):
    monkeypatch.setenv("DPCORE_ALGORITHM", said)
    with pytest.raises(dp.Unsupported, match=rf"^DPCORE_ALGORITHM={said}: .*(rings|nowhere)"):
        dp.init(rank=0, world_size=1)
    dp.init(rank=0, world_size=1, algorithm="ring")
    dp.finalize()


# ---- the page --------------------------------------------------------------------------------


def test_every_variable_is_on_one_page():
    page = (ROOT / "docs" / "variables.md").read_text()
    sources = [ROOT / "setup.py"]
    for ending in ("py", "cpp", "h", "cu", "cuh"):
        sources += [*(ROOT / "dpcore").rglob(f"*.{ending}"), *(ROOT / "csrc").rglob(f"*.{ending}")]
    read = re.compile(r"(?:getenv\(|environ(?:\.get\(|\[)|env\.get\()\s*\"(DPCORE_[A-Z_]+)\"")
    found = {name for path in sources for name in read.findall(path.read_text())}
    assert {"DPCORE_TRACE", "DPCORE_SIMD", "DPCORE_SECRET"} <= found
    assert not [name for name in sorted(found) if f"`{name}`" not in page]
