"""Layers and rings in dpcore show: which layer waits for its all-reduces, which shift is hidden."""

import itertools
import json

import pytest
import torch
from torch import nn

import dpcore as dp
from dpcore.__main__ import main
from dpcore.parallel import tags
from dpcore.parallel.attention import ring_attention
from dpcore.parallel.functional import copy_to, reduce_from
from dpcore.recorder import file as trace_file
from dpcore.recorder.file import RankRecord
from dpcore.tools.show import figures_of, read_run
from dpcore.tools.show.page import page_text

from .browser import needs_browser
from .traces import page_of, span


def write(path, of_ranks, **facts):
    records = [
        RankRecord(rank, 100 + rank, {1: "main"}, 0, sorted(events, key=lambda e: e.begin_ns))
        for rank, events in enumerate(of_ranks)
    ]
    trace_file.write(path, records, len(records), {"transport": "shm", **facts})
    return path


def layers_of(rank):
    """Two layers, of 10 ms forward and 20 back; their all-reduces take 3 and 4 ms, of which 2 and 3
    are exposed on rank 0, and all on rank 1. Behind them, one that is no layer's."""
    events = [span("forward", "compute", 0, 20), span("backward", "compute", 20, 60)]
    for layer in range(2):
        at, back = 10 * layer, 20 + 20 * (1 - layer)
        events += [
            span(f"layer {layer}", "compute", at, at + 10),
            span("all_reduce", "operation", at + 6, at + 9, layer, 1 << 20),
            span("all_reduce", "exposed", at + 7 - rank, at + 9, layer, 1 << 20),
            span(f"layer {layer} back", "compute", back, back + 20),
            span("all_reduce", "operation", back + 10, back + 14, 2 + layer, 1 << 20),
            span("all_reduce", "exposed", back + 11 - rank, back + 14, 2 + layer, 1 << 20),
        ]
    return [*events, span("all_reduce", "operation", 61, 70, 9), span("quiet", "compute", 80, 90)]


def test_a_layer_has_its_exposed_all_reduces(tmp_path, capsys):
    path = write(tmp_path / "run.json", [layers_of(0), layers_of(1)])
    found = figures_of(read_run(path)).spans
    assert [s.name for s in found] == ["layer 0", "layer 1", "layer 1 back", "layer 0 back"]
    assert {(s.count, s.operations["all_reduce"], s.bytes) for s in found} == {(2, 2, 1 << 20)}
    assert [s.ms for s in found] == [10, 10, 20, 20]
    assert [s.communication_ms for s in found] == pytest.approx([3, 3, 4, 4])
    assert [s.exposed_ms for s in found] == pytest.approx([2.5, 2.5, 3.5, 3.5])
    assert found[0].exposed_share == pytest.approx(0.25)
    picture = tmp_path / "run.png"
    assert main(["show", str(path), "--png", str(picture), "--html", str(tmp_path / "p.html")]) == 0
    said = capsys.readouterr().out
    assert "Layers and other spans that communicate" in said
    row = next(line for line in said.splitlines() if line.strip().startswith("layer 0 back"))
    assert row.split() == ["layer", "0", "back", "2", "20.0", "4.00", "3.50", "18%", "1.00",
                           "all_reduce", "1"]  # fmt: skip
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["show", str(path), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert run["spans"][0]["exposed_ms"] == pytest.approx(2.5) and run["ring"] == []


def test_passes_of_a_stage_are_counted_together(tmp_path):
    events = [
        span("1F0", "compute", 0, 10),
        span("1F1", "compute", 10, 20),
        span("layer 3", "compute", 11, 19),
        span("all_reduce", "operation", 12, 16),
        span("all_reduce", "exposed", 12, 16),
        span("1B0", "compute", 20, 30),
    ]
    found = figures_of(read_run(write(tmp_path / "run.json", [events]))).spans
    assert [(s.name, s.count, s.exposed_ms) for s in found] == [
        ("stage 1, forward", 2, 2),  # of two passes, one has waited
        ("layer 3", 1, 4),
    ]


def ring_of(rank, ranks=3, rounds=2):
    """Blocks of 4 ms in forward and 8 in backward, 2 ms apart. Keys and values take 5 ms from a
    millisecond before a block on: in forward, 0.5 ms of that are waited for. Gradients begin 1.5 ms
    before a block; the last ones are waited for, 0.8 ms."""
    events, at, size = [], 0.0, 5000
    for _ in range(rounds):
        for back, takes in ((False, 4), (True, 8)):
            for turn in range(ranks):
                at += 2
                name = f"block {(rank - turn) % ranks}{' back' * back}"
                events.append(span(name, "compute", at, at + takes))
                if turn < ranks - 1:
                    events.append(span("recv", "operation", at - 1, at + 4, tags.SHIFT, size, 0))
                    if not back:
                        events.append(span("recv", "exposed", at + 3.5, at + 4, tags.SHIFT))
                if back and turn:
                    begin = at - 1.5
                    events.append(span("recv", "operation", begin, at + 2, tags.GRADIENTS, size, 0))
                at += takes
            if back:
                begin, end = at + 0.1, at + 0.9
                events.append(span("recv", "operation", begin, end, tags.GRADIENTS, 1000, 0))
                events.append(span("recv", "exposed", begin, end, tags.GRADIENTS))
    return events


def test_what_of_a_shift_is_hidden_stands_beside_the_link(tmp_path, capsys):
    path = write(tmp_path / "run.json", [ring_of(rank) for rank in range(3)], link="8mbit,1ms")
    found = {turn.name: turn for turn in figures_of(read_run(path)).ring}
    assert list(found) == [
        *(f"forward, block {turn}" for turn in range(3)),
        *(f"backward, block {turn}" for turn in range(3)),
        "backward, gradients home",
    ]
    assert {turn.count for turn in found.values()} == {6}  # rounds and ranks
    first = found["forward, block 0"]
    assert (first.block_ms, first.shift_ms, first.link_ms) == pytest.approx((4, 5, 6))
    assert (first.exposed_ms, first.hidden) == pytest.approx((0.5, 0.9))
    last = found["forward, block 2"]
    assert last.shift_ms == 0 and last.hidden is None and last.link_ms is None
    both = found["backward, block 1"]  # keys and values, and gradients of the block before
    assert (both.shift_ms, both.link_ms, both.hidden) == pytest.approx((5.5, 11, 1.0))
    assert found["backward, block 2"].shift_ms == pytest.approx(3.5)
    home = found["backward, gradients home"]
    assert (home.block_ms, home.shift_ms, home.hidden) == pytest.approx((0, 0.8, 0))
    assert main(["show", str(path)]) == 0
    said = capsys.readouterr().out
    assert "Ring attention: what of each shift is hidden" in said
    row = next(line for line in said.splitlines() if "gradients home" in line)
    assert row.split()[3:] == ["6", "–", "0.800", "2.00", "0.800", "0%"]
    assert "Layers and other spans" not in said  # blocks have a table of their own


def test_without_a_link_or_a_shift_nothing_is_said_of_it(tmp_path):
    events = [span("block 0", "compute", 0, 4), span("block 0 back", "compute", 5, 9)]
    assert figures_of(read_run(write(tmp_path / "one.json", [events]))).ring == []
    path = write(tmp_path / "run.json", [ring_of(rank) for rank in range(3)], link="file:links.txt")
    assert {turn.link_ms for turn in figures_of(read_run(path)).ring} == {None}


class Shared(nn.Module):
    def __init__(self, comm, width=8):
        super().__init__()
        self.comm = comm
        made = torch.Generator().manual_seed(1)
        self.up = nn.Parameter(torch.randn(width, width, generator=made) / width)
        self.down = nn.Parameter(torch.randn(width, width, generator=made) / width)

    def forward(self, x, scale=1.0):
        inner = torch.relu(copy_to(x, self.comm) @ self.up)
        return (x + reduce_from(inner @ self.down, self.comm)) * scale


def test_layers_are_recorded_in_both_directions(tmp_path):
    def body(comm):
        def gradients(recorded):
            model = nn.Sequential(*(Shared(comm) for _ in range(3)))
            x = torch.ones(4, 8, requires_grad=True)
            with dp.trace(tmp_path / "run.json", comm=comm) as trace:
                if recorded:
                    trace.layers(model)
                for _ in range(2):
                    model(x).square().sum().backward()
                late = model(x).sum()
            late.backward()  # behind the block: in no trace
            hooks = [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in model]
            assert hooks == [0] * 3
            return trace, [p.grad for p in model.parameters()]

        plain, (trace, with_hooks) = gradients(False)[1], gradients(True)
        assert all(torch.equal(a, b) for a, b in zip(plain, with_hooks, strict=True))
        found = [event for event in trace.events if event.kind == "compute"]
        for one, following in itertools.pairwise(found):
            assert one.end_ns <= following.begin_ns  # also where both are of one gradient
        return [event.name for event in found]

    step = [*(f"layer {n}" for n in range(3)), *(f"layer {n} back" for n in (2, 1, 0))]
    assert dp.spawn(body, 2, mode="threads") == [step * 2 + step[:3]] * 2
    found = {s.name: s for s in figures_of(read_run(tmp_path / "run.json")).spans}
    assert set(found) == set(step)
    for name, of_layer in found.items():
        assert of_layer.operations == {"all_reduce": of_layer.count}, name
        assert 0 < of_layer.exposed_ms <= of_layer.ms


def test_layers_have_names_and_what_has_none_is_refused():
    def body(comm):
        model = nn.ModuleDict({"head": Shared(comm), "tail": nn.Embedding(3, 8)})
        with dp.trace(comm=comm) as trace:
            for wrong in (model["tail"], [], [3], "model"):
                with pytest.raises(dp.Unsupported, match="holds no modules; pass a list of layers"):
                    trace.layers(wrong)
            trace.layers(model)
            model["head"](scale=2.0, x=model["tail"](torch.tensor([1, 2]))).sum().backward()
        with pytest.raises(dp.Error, match="not recording"):
            trace.layers(model)
        return [event.name for event in trace.events if event.kind == "compute"]

    # What an embedding is given gets no gradient, so nobody knows when its backward ends.
    wanted = ["layer tail", "layer head", "layer head back"]
    assert dp.spawn(body, 1, mode="threads") == [wanted]


def test_a_ring_that_ran_has_all_turns(tmp_path):
    def body(comm):
        q, k, v = (torch.ones(1, 2, 4, 8, requires_grad=True) for _ in range(3))
        with dp.trace(tmp_path / "run.json", comm=comm) as trace:
            for _ in range(2):
                out = ring_attention(q, k, v, comm=comm, causal=True, span=trace.span)
                out.sum().backward()

    dp.spawn(body, 3, mode="threads", link="1gbit,100us")
    found = figures_of(read_run(tmp_path / "run.json")).ring
    assert [turn.count for turn in found] == [6] * 7
    has_shift = [True, True, False, True, True, True, True]
    assert [turn.link_ms is not None for turn in found] == has_shift
    size = 2 * 2 * 4 * 8 * 4  # keys and values
    assert found[0].link_ms == pytest.approx(0.1 + size / 125e6 * 1e3)
    assert found[4].link_ms == pytest.approx(0.1 + 2 * size / 125e6 * 1e3)


@needs_browser
def test_the_page_draws_layers_in_the_colours_of_passes(browser, tmp_path):
    browser.open(page_of(tmp_path, write(tmp_path / "run.json", [layers_of(0), ring_of(1)])))
    assert "Layers and other spans" in browser.text("#tables")
    assert "gradients home" in browser.text("#tables")
    drawn = browser.run("""(() => { const t = page.timelines[0];
      const bands = t.layout.bands.filter((b) => b.kind === "compute");
      const names = (b) => [...b.lane.label].map((_, i) => [t.nameOf(b.lane, i), t.colourOf(b)(i)]);
      const told = bands.flatMap(names);
      return { told, colours: t.painter.colour }; })()""")
    colour = drawn["colours"]
    for name, shade in drawn["told"]:
        if name.startswith(("layer", "block")):
            assert shade == colour["backward" if name.endswith(" back") else "forward"], name
    assert sum(name.startswith("layer") for name, _ in drawn["told"]) == 4
    assert browser.problems == []


def test_a_page_without_layers_has_no_table_of_them(tmp_path):
    path = write(tmp_path / "run.json", [[span("forward", "compute", 0, 4)]])
    assert "Layers and other spans" not in page_text([read_run(path)])
