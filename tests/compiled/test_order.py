"""Where operations are in the code that Inductor writes: soon behind their gradients."""

import re

import torch
from torch import nn

from dpcore.ddp.compiled import torch_private
from dpcore.ddp.compiled.operations import AnnounceGradients, behind_producers

WIDTH = 4


class Convolutions(nn.Module):
    """Inductor would move all operations of this one to the end."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.relu(norm(layer(x)))
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(WIDTH, width) for width in (3 * WIDTH, WIDTH, WIDTH))
            for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x):
        for (project, mix, feed), norm in zip(self.layers, self.norms, strict=True):
            q, k, v = project(norm(x)).chunk(3, -1)
            x = x + mix(nn.functional.scaled_dot_product_attention(q, k, v))
            x = x + torch.tanh(feed(x))
        return x


def calls_of_backward(model, inputs, monkeypatch, announces=True):
    """The kernels and operations of backward, in the order of the code, without running them."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.graph import GraphLowering

    codes = []
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(codes.append))
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_: lambda *_: None)
    torch._dynamo.reset()
    run = torch.compile(model)
    backend = vars(torch)["_TorchCompileInductorWrapper"](None, None, None)
    assert torch_private.is_inductor(backend)
    with torch_private.passes(backend, AnnounceGradients, behind_producers):
        options = dict(backend.config) if announces else {}
    with config.patch({**options, "fx_graph_cache": False}):
        run(inputs).sum().backward()
    body = codes[-1].partition("def call(")[2]
    calls = r"gradient_computed|cpp_fused\w*\(|extern_kernels\.\w+|aten\.\w+backward"
    return re.findall(calls, body)


def assert_early(calls, gradients):
    places = [at for at, call in enumerate(calls) if call == "gradient_computed"]
    assert len(places) == gradients
    # A bucket with the first sixth of the gradients is complete before a third of backward.
    assert places[gradients // 6] < len(calls) / 3
    behind = [call for call in calls[places[0] :] if call != "gradient_computed"]
    assert len(behind) > 2 * gradients / 3


def test_operations_divide_no_function(monkeypatch):
    """Inductor writes loops that follow each other into one, which compile faster than two."""
    both = [
        calls_of_backward(Attention(), torch.ones(2, 5, WIDTH), monkeypatch, announces)
        for announces in (True, False)
    ]
    with_operations, without = ([c for c in calls if c.startswith("cpp")] for calls in both)
    assert with_operations == without


def test_of_convolutions(monkeypatch):
    calls = calls_of_backward(Convolutions(), torch.ones(2, WIDTH, 6, 6), monkeypatch)
    assert_early(calls, 4 * 2 + 4 * 2 + 2)


def test_of_a_transformer(monkeypatch):
    calls = calls_of_backward(Attention(), torch.ones(2, 5, WIDTH), monkeypatch)
    assert_early(calls, 2 * 6 + 2 * 2)
