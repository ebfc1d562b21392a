"""dpcore show of files of torch's profiler: figures, ranks, clocks, and files that are damaged."""

import gzip
import json
import subprocess
import sys

import pytest

from dpcore.__main__ import main
from dpcore.errors import Error
from dpcore.tools.show import figures_of
from dpcore.tools.show.buckets import bucket_spans, parameters_of
from dpcore.tools.show.figures import steps_of
from dpcore.tools.show.reading import read_runs

from .profiles import DDP_MS, GLOO, gpu_steps, span, write


def after_backward_ms(rank):
    """Exposed time of each step that is not part of a forward."""
    result = []
    for begin, end in steps_of(rank):
        backward = next(
            e for e in rank.compute if e.name == "backward" and begin <= e.begin_ns < end
        )
        waits = [e for e in rank.exposed if backward.begin_ns <= e.begin_ns < end]
        result.append(sum(e.ms for e in waits))
    return result


# ---- Gloo ----------------------------------------------------------------------------------------


def test_exposed_time_of_gloo_is_what_ddp_measured():
    (run,) = read_runs(GLOO)
    assert (run.world_size, run.transport, len(run.ranks)) == (2, "gloo", 2)
    for rank, measured in zip(run.ranks, DDP_MS, strict=True):
        assert after_backward_ms(rank) == pytest.approx(measured, rel=0.01)


def test_buckets_of_gloo():
    (run,) = read_runs(GLOO)
    spans = bucket_spans(run, run.ranks[0])
    assert [s.bucket for s in spans if s.model == 1] == 3 * [0, 1, 2]
    assert [s.bytes for s in spans[:3]] == [4 * 4216842, 4 * 4200448, 4 * 1607680]
    names = parameters_of(run, 0, spans[0].bytes, 1)
    assert names == "gradient 6 (2048 x 2048), gradient 7 (2048), gradient 8 (10 x 2048) and 1 more"
    for s in spans:
        assert s.first_ready_ns <= s.last_ready_ns <= s.launch_ns < s.end_ns
    # The parts of the buckets are the whole, but for the moments after the last one has come.
    exposed = sum(e.ms for e in run.ranks[0].exposed if e.name == "all_reduce")
    assert sum(s.exposed_ns for s in spans) * 1e-6 == pytest.approx(exposed, rel=0.05)


def test_figures_of_gloo():
    (run,) = read_runs(GLOO)
    figures = figures_of(run)
    assert (figures.steps, figures.world_size) == (3, 2)
    names = {line.name: line.count for line in figures.operations}
    assert names == {"all_reduce": 18, "broadcast": 12}
    waits = {line.name for line in figures.waits}
    assert waits == {"a thread of gloo", "every rank to enter"}
    assert 0 < figures.overlap < 1


def test_without_calls_nothing_is_said_of_exposed_time(tmp_path, capsys):
    """Files that somebody has filtered."""
    path = write(tmp_path / "rank0.json", [span("gloo:all_reduce", "user_annotation", 7, 0, 5)])
    assert main(["show", str(path)]) == 0
    assert "exposed time is not known" in capsys.readouterr().out


def test_a_program_waits_for_collectives_of_its_own(tmp_path):
    """A synchronous one is exposed from the call to its end; an asynchronous one, beside which the
    thread sorts, is not, and one that is waited for after some work is from there on."""
    events = []
    for call, end, work in ((0, 5, (5.1, 6)), (10, 18, (10.2, 20)), (30, 39, (30.2, 35))):
        events += [
            span("c10d::allreduce_", "cpu_op", 1, call, call + 0.1),
            span("gloo:all_reduce", "user_annotation", 2, call + 0.1, end),
            span("aten::sort", "cpu_op", 1, *work),
        ]
    events.append(span("aten::add", "cpu_op", 1, 39.1, 40))
    (run,) = read_runs([write(tmp_path / "rank0.json", events, world=1)])
    exposed = [(e.operation, e.ms) for e in run.ranks[0].exposed]
    assert exposed == [(0, pytest.approx(4.9)), (2, pytest.approx(4))]


# ---- NCCL ----------------------------------------------------------------------------------------


def test_figures_of_nccl_are_those_of_the_streams(tmp_path):
    paths = [write(tmp_path / f"rank{r}.json", gpu_steps(), rank=r) for r in range(2)]
    (run,) = read_runs(paths)
    figures = figures_of(run)
    assert (figures.steps, figures.step_ms) == (3, pytest.approx(20, abs=2))
    assert figures.communication_ms_per_step == pytest.approx(8)
    assert figures.exposed_ms_per_step == pytest.approx(3)
    assert figures.overlap == pytest.approx(5 / 8)  # a copy of memory hides nothing
    first = figures.ranks[0]
    assert (first.forward_ms, first.backward_ms) == (pytest.approx(5), pytest.approx(10))
    spans = bucket_spans(run, run.ranks[0])
    assert [(s.bucket, s.bytes) for s in spans] == 3 * [(0, 4000), (1, 4000)]
    assert [s.exposed_ns * 1e-6 for s in spans] == pytest.approx(3 * [0, 3])


def test_kernels_without_launches_are_shown_all_the_same(tmp_path):
    events = [e for e in gpu_steps() if e["cat"] != "cuda_runtime"]
    (run,) = read_runs([write(tmp_path / "rank0.json", events, world=1)])
    assert figures_of(run).overlap == pytest.approx(5 / 8)


def test_names_of_kernels_through_the_versions(tmp_path):
    old = "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)"
    new = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
    rccl = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"
    events = [
        span(name, "kernel", 20, 10 * i, 10 * i + 5) for i, name in enumerate((old, new, rccl))
    ]
    (run,) = read_runs([write(tmp_path / "rank0.json", events, world=1)])
    names = {line.name for line in figures_of(run).operations}
    assert names == {"all_gather", "send_recv", "communication"}


# ---- ranks, runs, clocks -------------------------------------------------------------------------


def test_hosts_are_put_on_one_clock(tmp_path):
    write(tmp_path / "a0.json", gpu_steps(), rank=0, host_name="one")
    write(tmp_path / "a1.json", gpu_steps(shift_ms=7.5), rank=1, host_name="two")
    (run,) = read_runs([tmp_path])
    first, second = ([e.end_ns for e in rank.operations] for rank in run.ranks)
    assert first == pytest.approx(second, abs=1000)
    assert "aligned on 6 collectives, by up to 7.5 ms" in run.about


def test_ranks_of_a_host_keep_their_clock(tmp_path):
    """A rank that is late is late, and no clock is wrong."""
    write(tmp_path / "a0.json", gpu_steps(), rank=0, host_name="one")
    write(tmp_path / "a1.json", gpu_steps(shift_ms=1.5), rank=1, host_name="one")
    (run,) = read_runs([tmp_path])
    assert run.ranks[1].operations[0].begin_ns - run.ranks[0].operations[0].begin_ns == 1_500_000
    wait = next(e for e in run.ranks[0].waits if e.name == "every rank to enter")
    assert (wait.peer, wait.ms) == (1, pytest.approx(1.5))


def test_a_clock_that_cannot_be_is_corrected_whoever_says_so(tmp_path):
    """Without names of hosts: an operation cannot end before another rank enters it."""
    write(tmp_path / "a0.json", gpu_steps(), rank=0)
    write(tmp_path / "a1.json", gpu_steps(shift_ms=500), rank=1)
    (run,) = read_runs([tmp_path])
    assert run.ranks[0].operations[0].end_ns == run.ranks[1].operations[0].end_ns


def test_windows_of_the_schedule_are_runs_of_their_own(tmp_path):
    for window in range(2):
        for rank in range(2):
            events = gpu_steps(shift_ms=1000 * window + rank)
            write(tmp_path / f"host_{rank}.{window}.pt.trace.json", events, rank=rank)
    runs = read_runs([tmp_path])
    assert [[r.rank for r in run.ranks] for run in runs] == [[0, 1], [0, 1]]
    assert [run.name for run in runs] == [f"{tmp_path.name}-1", f"{tmp_path.name}-2"]


def test_folders_are_runs_to_compare(tmp_path):
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
        for rank in range(2):
            write(tmp_path / name / f"{rank}.pt.trace.json", gpu_steps(), rank=rank)
    runs = read_runs([tmp_path / "before", tmp_path / "after"])
    assert [run.name for run in runs] == ["before", "after"]


def test_folders_that_are_called_alike_are_told_apart(tmp_path):
    for name in ("before", "after"):
        (tmp_path / name / "log").mkdir(parents=True)
        write(tmp_path / name / "log" / "0.pt.trace.json", gpu_steps())
        write(tmp_path / name / "log" / "1.pt.trace.json", gpu_steps(), rank=1)
    runs = read_runs([tmp_path / "before" / "log", tmp_path / "after" / "log"])
    assert [run.name for run in runs] == ["before-log", "after-log"]


def test_other_json_in_a_folder_is_left_aside(tmp_path):
    (tmp_path / "config.json").write_text('{"lr": 0.1}')
    with pytest.raises(Error, match="has no traces, of dpcore"):
        read_runs([tmp_path])
    write(tmp_path / "rank0.json", gpu_steps(), world=1)
    (run,) = read_runs([tmp_path])
    assert len(run.ranks) == 1


def test_a_missing_rank_is_said(tmp_path):
    (run,) = read_runs([write(tmp_path / "rank0.json", gpu_steps(), rank=0, world=4)])
    assert "only 1 of 4 ranks" in run.about


def test_a_file_without_a_rank_has_it_in_its_name_or_gets_one(tmp_path):
    for name in ("rank-3.json", "rank-5.json"):
        write(tmp_path / name, gpu_steps(), distributedInfo={})
    (run,) = read_runs([tmp_path])
    assert [rank.rank for rank in run.ranks] == [3, 5]


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_makes_one_page_of_all_ranks(tmp_path, capsys):
    for path in GLOO:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    given = sorted(str(path) for path in tmp_path.iterdir())
    assert main(["show", *given]) == 0
    out = capsys.readouterr().out
    assert "exposed" in out and "rank 1" in out and "a thread of gloo" in out
    assert (tmp_path / "gloo.html").stat().st_size > 20_000


def test_it_needs_neither_torch_nor_the_core(tmp_path):
    code = "import sys; from dpcore.__main__ import main; assert main(sys.argv[1:]) == 0; "
    code += "assert not {'torch', 'dpcore._C'} & set(sys.modules)"
    given = ["show", *map(str, GLOO), "--html", str(tmp_path / "page.html")]
    subprocess.run([sys.executable, "-c", code, *given], check=True, stdout=subprocess.DEVNULL)
    assert (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("empty.json", b"", "is empty"),
        ("cut.json", GLOO[0].read_bytes()[:20_000], "it was cut off"),
        ("cut.json.gz", GLOO[1].read_bytes()[:2000], "it was cut off"),
        ("text.json", b"hello", "is not a trace"),
        ("list.json", b"[]", "was not written by dpcore.trace nor by torch.profiler"),
        ("quiet.json", json.dumps({"schemaVersion": 1, "traceEvents": []}).encode(), "no comm"),
        (
            "quiet.json.gz",
            gzip.compress(b'{"schemaVersion":1,"traceEvents":[3]}', mtime=0),
            "no comm",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_one_sentence(tmp_path, capsys, name, data, says):
    path = tmp_path / name
    path.write_bytes(data)
    assert main(["show", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dpcore show: ") and says in line and name in line


def test_a_folder_without_traces_and_a_file_given_twice(tmp_path):
    with pytest.raises(Error, match="has no traces"):
        read_runs([tmp_path])
    path = write(tmp_path / "rank0.json", gpu_steps())
    with pytest.raises(Error, match="is named twice"):
        read_runs([path, tmp_path])
    with pytest.raises(Error, match="there is no file"):
        read_runs([path, tmp_path / "missing.json"])


# ---- torch.distributed.pipelining ----------------------------------------------------------------

EVALUATES = "autograd::engine::evaluate_function: MmBackward0"


def of_pipeline(stage, marks):
    """``marks``: name, begin and end of an annotation, and what ran in it."""
    events = []
    for name, begin, end, operators in marks:
        events.append(span(f"PP:{name}", "user_annotation", 1, begin, end))
        events += [span(what, "cpu_op", 1, at, until) for what, at, until in operators]
    events += [
        span("c10d::send" if stage == 0 else "c10d::recv_", "cpu_op", 1, 0, 0.1),
        span("gloo:send" if stage == 0 else "gloo:recv", "user_annotation", 7, 0.1, 2),
    ]
    return events


def test_passes_of_torchs_pipelines_begin_with_their_first_operator(tmp_path):
    """Before it, torch waits for what the pass needs, within the annotation."""
    first = [
        ("0F0", 0, 10, [("aten::mm", 0.5, 10)]),
        ("0SEND_F0", 10, 11, []),
        ("0B0", 11, 40, [(EVALUATES, 30, 40)]),
    ]
    last = [
        ("1RECV_F0", 0, 0.2, []),
        ("1F0", 0.2, 20, [("aten::mm", 12, 20)]),
        ("1I0", 20, 24, [(EVALUATES, 20, 24)]),
        ("1W0", 24, 28, [("aten::mm", 24, 28)]),
    ]
    write(tmp_path / "rank0.json", of_pipeline(0, first), rank=0)
    write(tmp_path / "rank1.json", of_pipeline(1, last), rank=1)
    (run,) = read_runs([tmp_path])
    passes = [[(e.name, round(e.ms, 3)) for e in rank.compute] for rank in run.ranks]
    assert passes == [[("0F0", 9.5), ("0B0", 10)], [("1F0", 8), ("1I0", 4), ("1W0", 4)]]
    pipeline = figures_of(run).pipeline
    assert pipeline.bubble == pytest.approx(1 - (19.5 + 16) / 2 / 39.5)
    assert [line.stages for line in pipeline.ranks] == [[0], [1]]
    assert pipeline.priced is not None


def test_a_forward_and_a_backward_in_one_annotation_are_two_passes(tmp_path):
    both = [("aten::mm", 1, 4), (EVALUATES, 6, 9), ("aten::mm", 6, 8)]
    marks = [
        ("0F0", 0, 0.5, [("aten::mm", 0, 0.5)]),
        ("(0F1;0B0)OVERLAP_F_B", 0.5, 10, both),
        ("0B1", 10, 14, [(EVALUATES, 10, 14)]),
    ]
    path = write(tmp_path / "rank0.json", of_pipeline(0, marks), rank=0, world=1)
    (run,) = read_runs([path])
    found = [(e.name, round(e.begin_ns * 1e-6, 3), round(e.ms, 3)) for e in run.ranks[0].compute]
    assert found == [("0F0", 0, 0.5), ("0F1", 1, 3), ("0B0", 6, 4), ("0B1", 10, 4)]
