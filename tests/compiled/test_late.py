"""A model that was compiled before it was wrapped: what a trace, `show` and `advise` say of it."""

import pytest
import torch

import dpcore
from dpcore.__main__ import main
from dpcore.ddp.compiled.tracing import LATE
from dpcore.tools.advise.evidence import Evidence, Step, evidence_of
from dpcore.tools.advise.of_buckets import at_end
from dpcore.tools.show.reading import read_run
from tests.compiled.test_cases import WIDTH, Layers


def late_run(comm, path):
    torch._dynamo.reset()
    module = Layers()
    torch.compile(module, dynamic=False)(torch.ones(2, WIDTH)).sum().backward()
    model = dpcore.DataParallel(module, comm=comm)
    run = torch.compile(model, dynamic=False)
    with dpcore.trace(path, comm=comm):
        for _ in range(2):
            model.zero_grad()
            run(torch.ones(2, WIDTH)).sum().backward()


def test_a_trace_of_a_late_model_says_what_to_do(tmp_path, capsys):
    path = tmp_path / "late.json"
    dpcore.spawn(late_run, 2, path, timeout=200)
    assert evidence_of(read_run(path)).graphs == LATE
    assert main(["show", str(path)]) == 0
    assert LATE in capsys.readouterr().out


@pytest.mark.parametrize(
    ("graphs", "change"),
    [
        (LATE, "before its first compiled forward"),
        ("torch.compile: graphs are cut where buckets end, because of this", "docs/compile.md"),
        ("", "optimize_ddp"),
    ],
)
def test_the_advice_is_of_what_dpcore_says(graphs, change):
    step = Step(
        ms=100, forward_ms=20, backward_ms=60, exposed_ms=30, arrivals=((58.0, 9), (59.0, 9))
    )
    ranks = ((step,), (step,))
    found = at_end(Evidence("dpcore", "tcp", False, 2, ranks, (0, 1), compiled=True, graphs=graphs))
    assert found is not None and graphs in found.evidence
    assert change in found.change
