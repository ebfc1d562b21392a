"""dp.trace around torch's own DDP: what it says, and that it changes nothing."""

import gc
import itertools
import json
import math
import os
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dpcore as dp
from dpcore.recorder import torch_trace
from dpcore.tools.show import figures_of, read_run
from dpcore.tools.show.buckets import bucket_spans, parameters_of
from dpcore.tools.show.figures import steps_of
from dpcore.tools.show.reading import read_runs
from tests.faults.tries import in_time, three_tries
from tests.ranks import python
from tests.ranks.groups import in_group

STEPS = 4
MS = 1e6


class Model(torch.nn.Module):
    def __init__(self, with_unused):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(600, 600) for _ in range(3)])
        if with_unused:
            self.unused = torch.nn.Linear(600, 600)

    def forward(self, x):
        return self.layers(x)


def wrapped(views=True, unused=False):
    torch.manual_seed(7)
    torch.set_num_threads(1)
    return DistributedDataParallel(
        Model(unused), bucket_cap_mb=1.5, gradient_as_bucket_view=views,
        find_unused_parameters=unused,
    )  # fmt: skip


def is_near(ours, ddp):
    """Within 5% and the half millisecond for which a busy machine may take a thread off its
    processor."""
    return all(abs(a - b) < 0.05 * b + 0.5 for a, b in zip(ours, ddp, strict=True))


def train(model, steps):
    """Some steps; of each, what DDP measured from the end of its computation to the end of its
    communication. It says so in the step after."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    waited = []
    for step in range(steps):
        torch.manual_seed(step + 100 * dist.get_rank())
        optimizer.zero_grad(set_to_none=False)
        model(torch.randn(64, 600)).square().mean().backward()
        optimizer.step()
        log = model._get_ddp_logging_data()
        ends = (log.get(f"backward_{what}_time_end", 0) for what in ("comm", "compute"))
        waited.append((next(ends) - next(ends)) / MS)
    return waited


def bits(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def traced(path):
    alone = wrapped()
    train(alone, 2)
    train(alone, STEPS)
    expected = bits(alone)
    del alone
    gc.collect()  # of one model alone the parameters' names are known
    model = wrapped()
    train(model, 2)
    with dp.trace(path) as t:
        waited = train(model, STEPS)
    same = all(torch.equal(a, b) for a, b in zip(expected, bits(model), strict=True))
    return waited, t.exposed_ms, t.communication_ms, sorted(t.by_operation()), same


@three_tries
def test_a_run_of_torch_ddp_over_gloo(tmp_path):
    path = tmp_path / "run.json"
    said = in_group(traced, 2, path, backend="gloo")
    run = read_run(path)
    assert (run.world_size, run.transport, len(run.ranks)) == (2, "gloo", 2)
    figures = figures_of(run)
    assert figures.steps == STEPS
    for rank, (waited, exposed_ms, communication_ms, names, same) in zip(
        run.ranks, said, strict=True
    ):
        assert same, "the trace changed the parameters"
        assert names == ["all_reduce"]
        mine = figures.ranks[rank.rank]
        assert mine.exposed_ms == pytest.approx(exposed_ms, abs=1e-3)
        assert mine.communication_ms == pytest.approx(communication_ms, abs=1e-3)
        steps = steps_of(rank)
        ours = [sum(e.ms for e in rank.exposed if b <= e.begin_ns < end) for b, end in steps]
        # DDP's numbers are those of the step before; the views that it makes are in them.
        in_time(is_near(ours[:-1], waited[1:]), f"{ours[:-1]} ms exposed, DDP says {waited[1:]}")
    spans = bucket_spans(run, run.ranks[0])
    assert len(spans) == STEPS * len({span.bucket for span in spans})
    assert all(span.launch_ns == span.sent_by.begin_ns for span in spans)
    names = parameters_of(run, 0, spans[0].bytes, spans[0].model)
    assert names == "layers.1.weight, layers.1.bias, layers.2.weight and 1 more"


def profiled(folder, unused):
    model = wrapped(views=False, unused=unused)
    train(model, 2)
    with torch.profiler.profile(record_shapes=True) as profiler:
        waited = train(model, STEPS)
    profiler.export_chrome_trace(str(folder / f"rank{dist.get_rank()}.json"))
    return waited


def copies_ms(path):
    """Of each step, the time of the copies out of the buckets, which is not waiting."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    forwards = sorted(e["ts"] for e in events if e["name"] == "DistributedDataParallel.forward")
    copies = [e for e in events if "copy_bucket_to_grad" in e["name"]]
    steps = itertools.pairwise([*forwards, math.inf])
    return [sum(e["dur"] for e in copies if b <= e["ts"] < end) / 1000 for b, end in steps]


@pytest.mark.parametrize("unused", [False, True], ids=["used", "unused"])
@three_tries
def test_files_of_the_profiler_of_a_script_that_knows_nothing_of_us(tmp_path, unused):
    said = in_group(profiled, 2, tmp_path, unused, backend="gloo")
    (run,) = read_runs([tmp_path])
    assert figures_of(run).steps == STEPS
    for rank, waited in zip(run.ranks, said, strict=True):
        copied = copies_ms(tmp_path / f"rank{rank.rank}.json")
        steps = steps_of(rank)
        ours = [sum(e.ms for e in rank.exposed if b <= e.begin_ns < end) for b, end in steps]
        ddp = [ms - copy for ms, copy in zip(waited[1:], copied, strict=False)]
        in_time(is_near(ours[:-1], ddp), f"{ours[:-1]} ms exposed, DDP says {ddp}")


def beside_a_profiler():
    with torch.profiler.profile(), pytest.raises(dp.Error, match="profiler is recording already"):
        dp.trace().__enter__()
    with dp.trace(comm=wrapped()) as t, t.span("mine"):
        dist.all_reduce(torch.ones(10))
    return t.by_operation()["all_reduce"]["count"], [e.name for e in t.events if e.name == "mine"]


def test_one_profiler_at_a_time_and_no_file(tmp_path):
    assert in_group(beside_a_profiler, 2, backend="gloo") == 2 * [(1, ["mine"])]


def failing(path):
    with pytest.raises(ZeroDivisionError), dp.trace(path):
        dist.all_reduce(torch.ones(10))
        1 / 0  # noqa: B018


def test_every_rank_writes_its_own_file_after_an_error(tmp_path):
    in_group(failing, 2, tmp_path / "run.json", backend="gloo")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.rank0.json", "run.rank1.json"]
    assert "ZeroDivisionError" in read_run(tmp_path / "run.rank1.json").error


WITHOUT_A_CORE = """
import sys
sys.modules["dpcore._C"] = None  # importing it raises
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import dpcore

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(10, 10))
with dpcore.trace("run.json") as t:
    model(torch.randn(4, 10)).sum().backward()
assert t.by_operation()["all_reduce"]["count"] == 1
del model  # it holds the group
dist.destroy_process_group()
"""


def test_it_needs_no_core(tmp_path):
    """Where no compiled module fits, one's own run of torch DDP can still be seen."""
    (tmp_path / "train.py").write_text(WITHOUT_A_CORE)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    own = os.environ | {"PYTHON_EXEC": sys.executable}  # ranks that have imported nothing yet
    done = python.run(*command, cwd=tmp_path, env=own, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert read_run(tmp_path / "run.json").world_size == 2


def test_a_trace_ends_when_nobody_holds_its_tensors():
    """Gloo's thread lets go of them late. A saved tensor stands for that: C++ holds it as well."""
    mine = torch.ones(3)
    holders = [torch.ones(3, requires_grad=True) * mine]
    assert mine._use_count() > 1
    release = threading.Timer(0.1, holders.clear)
    release.start()
    torch_trace._wait_until_free([mine])
    assert not holders
    assert mine._use_count() == 1


def test_a_trace_ends_although_somebody_holds_its_tensors(monkeypatch):
    monkeypatch.setattr(torch_trace, "_PATIENCE_SECONDS", 0.05)
    mine = torch.ones(3)
    holder = torch.ones(3, requires_grad=True) * mine
    torch_trace._wait_until_free([mine])
    assert holder.requires_grad and mine._use_count() > 1


def test_the_file_has_what_the_profiler_saw_beside_the_events(tmp_path):
    """On the clock of the events: a search for unused parameters lies within each step."""
    path = tmp_path / "run.json"

    def body():
        torch.manual_seed(0)
        model = DistributedDataParallel(Model(True), find_unused_parameters=True)
        model(torch.ones(2, 600)).sum().backward()
        with dp.trace(path):
            for _ in range(STEPS):
                model.zero_grad()
                model(torch.ones(2, 600)).sum().backward()

    in_group(body, 2, backend="gloo")
    run = read_run(path)
    for rank in run.ranks:
        assert rank.facts is not None
        searches = [begin for begin, _ in rank.facts.searches]
        backward = [event for event in rank.compute if event.name == "backward"]
        assert len(searches) == STEPS == len(rank.facts.batches)
        assert all(abs(s - b.begin_ns) < 1e9 for s, b in zip(searches, backward, strict=True))
        assert rank.facts.batches[0][1][0] == (2, 600) and rank.facts.products
    content = json.loads(path.read_text())
    content["otherData"]["profiled"]["0"]["searches"] = [[2, 1]]
    path.write_text(json.dumps(content))
    with pytest.raises(dp.Error, match="what torch's profiler showed"):
        read_run(path)
