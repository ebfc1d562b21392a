"""torch.compile: graphs are split where buckets end, so that there is something to overlap with."""

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

import dpcore
from dpcore.ddp.torch_face import dynamo
from dpcore.ddp.wrapper import rebuilding
from tests.data_parallel.contract import Watching

LAYERS = 6
WIDTH = 512  # a weight is 1 MiB: a bucket each


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Noting(Watching):
    """Puts launches of gradients in the list that parts of backward are in."""

    def __init__(self, comm, events):
        super().__init__(comm)
        self.events = events

    def all_reduce(self, tensor, op="sum", *, async_op=False):
        if op == "mean":
            self.events.append("launch")
        return super().all_reduce(tensor, op, async_op=async_op)


def compiler_that_notes(events):
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def compile_backward(graph, _):
        def run(*inputs):
            events.append("backward")
            return graph(*inputs)

        return make_boxed_func(run)

    return aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=compile_backward
    )


def first_launch(comm, wrapped_is_compiled):
    """(parts of backward before the first launch, all parts), and whether the values are right."""
    events = []
    compiler = compiler_that_notes(events)
    module = Deep()
    inner = module if wrapped_is_compiled else torch.compile(module, backend=compiler)
    model = dpcore.DataParallel(
        inner, comm=Noting(comm, events), bucket_cap_mb=1.5, schedule="bucketed"
    )
    run = torch.compile(model, backend=compiler) if wrapped_is_compiled else model
    alone = Deep()
    alone.load_state_dict(module.state_dict())
    for step in range(2):
        events.clear()
        model.zero_grad()
        alone.zero_grad()
        inputs = [torch.full((1, WIDTH), 0.1 * (rank + step + 1)) for rank in range(2)]
        run(inputs[comm.rank]).sum().backward()
        (sum(alone(x).sum() for x in inputs) / 2).backward()
    for mine, other in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    return events.index("launch"), events.count("backward")


def both_ways(comm):
    return [first_launch(comm, wrapped_is_compiled) for wrapped_is_compiled in (True, False)]


@pytest.mark.alone
def test_the_first_launch_comes_before_half_of_backward():
    """Whether what is compiled is the wrapped model or the module within."""
    for of_rank in dpcore.spawn(both_ways, 2, timeout=120):
        for before, parts in of_rank:
            assert parts >= 4
            assert before <= parts / 2


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.drop(self.first(x)))


def test_a_graph_is_compiled_again_after_small_buckets_were_chosen():
    def body(comm):
        rebuilding._measured_caps = lambda *_: ([1000], "as measured")
        model = dpcore.DataParallel(Dropping())
        run = torch.compile(model, backend="eager")
        for _ in range(3):  # the step that compiles is not measured
            run(torch.ones(1, 4)).sum().backward()
        assert model._caps[-1] < 2**20
        model.eval()
        return run(torch.ones(1, 4)).shape

    assert dpcore.spawn(body, 1, timeout=120) == [(1, 2)]


def test_an_import_that_another_thread_has_begun(monkeypatch):
    monkeypatch.setattr(dynamo, "knows_us", False)
    monkeypatch.setitem(sys.modules, "torch._dynamo", ModuleType("torch._dynamo"))
    dynamo.introduce()
    assert not dynamo.knows_us  # the next forward tries again


def test_compiled_autograd_is_refused_by_the_name_of_its_switch():
    def body(comm):
        from torch._dynamo import compiled_autograd

        model = dpcore.DataParallel(nn.Linear(4, 2))
        loss = model(torch.ones(1, 4)).sum()
        with (
            pytest.raises(dpcore.Unsupported, match=r"_dynamo\.config\.compiled_autograd = False"),
            compiled_autograd._enable(lambda graph: graph),
        ):
            loss.backward()

    dpcore.spawn(body, 1, timeout=120)
