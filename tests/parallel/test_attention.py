"""Attention over ranks is that of one process: values, gradients, work and time."""

import time

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

import dpcore as dp
from dpcore.parallel import attention
from dpcore.parallel.attention import block_of, ring_attention, ulysses_attention, zigzag
from dpcore.parallel.functional import cut
from tests.faults.tries import in_time, three_tries


def tensors(heads, shared, tokens, dtype=torch.float64, batch=2, dim=8):
    made = torch.Generator().manual_seed(1)
    shapes = [(batch, n, tokens, dim) for n in (heads, shared, shared, heads)]
    return [torch.randn(*shape, generator=made, dtype=torch.float64).to(dtype) for shape in shapes]


def alone(q, k, v, gradient, causal):
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    out.backward(gradient)
    return out.detach(), q.grad, k.grad, v.grad


def of_ranks(run, world, places, whole):
    """The four results, put together from all ranks' parts."""

    def body(comm):
        mine = places[comm.rank]
        q, k, v, gradient = (x[:, :, mine].clone() for x in whole)
        for x in (q, k, v):
            x.requires_grad_()
        out = run(q, k, v, comm)
        out.backward(gradient)
        return out.detach(), q.grad, k.grad, v.grad

    parts = dp.spawn(body, world, mode="threads")
    order = torch.cat([torch.as_tensor(p) for p in places]).argsort()
    return [torch.cat(part, 2)[:, :, order] for part in zip(*parts, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ring_attention_rounds_no_more_than_one_process(dtype):
    """Its error against float64 is at most 4 times that of one process."""
    whole = tensors(2, 2, 32, dtype)
    exact = alone(*(x.double() for x in whole), True)
    places = [zigzag(32, 4, rank) for rank in range(4)]
    found = of_ranks(
        lambda q, k, v, comm: ring_attention(q, k, v, comm=comm, causal=True), 4, places, whole
    )
    for got, other, wanted in zip(found, alone(*whole, True), exact, strict=True):
        assert (got - wanted).norm() <= 4 * (other - wanted).norm()


SIZES = {"batch": st.integers(1, 3), "dim": st.integers(2, 20)}
# MKL may add up in an order that depends on where a vector lies in memory. Heads of 16 numbers
# begin on a cache line, in one process and on every rank.
SIZES_THAT_LIE_ALIKE = {"batch": st.integers(1, 3), "dim": st.sampled_from([16, 32])}


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.booleans(),
       st.fixed_dictionaries(SIZES))  # fmt: skip
@example(2, 2, 2, 6, True, {"batch": 2, "dim": 8})
@example(3, 3, 1, 4, False, {"batch": 2, "dim": 8})
def test_a_ring_of_any_shape_is_one_process(world, shared, group, half, causal, sizes):
    tokens = 2 * world * half
    whole = tensors(shared * group, shared, tokens, **sizes)
    places = [zigzag(tokens, world, rank) for rank in range(world)]
    found = of_ranks(
        lambda q, k, v, comm: ring_attention(q, k, v, comm=comm, causal=causal),
        world, places, whole,
    )  # fmt: skip
    for got, wanted in zip(found, alone(*whole, causal), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(0, 3), st.integers(1, 3), st.integers(1, 30), st.booleans(),
       st.fixed_dictionaries(SIZES_THAT_LIE_ALIKE))  # fmt: skip
@example(3, 2, 1, 22, True, {"batch": 2, "dim": 16})  # neither heads nor tokens can be cut evenly
@example(3, 0, 2, 24, False, {"batch": 2, "dim": 16})
def test_ulysses_of_any_shape_has_the_bits_of_one_process(
    world, more, group, tokens, causal, sizes
):
    """Groups of heads can be cut where each rank has as many."""
    shared = world + more if group == 1 else world * (1 + more)
    tokens = max(tokens, world)
    whole = tensors(shared * group, shared, tokens, torch.float32, **sizes)
    lengths = cut(tokens, world)
    found = of_ranks(
        lambda q, k, v, comm: ulysses_attention(
            q, k, v, comm=comm, causal=causal, lengths=lengths
        ),
        world, torch.arange(tokens).split(lengths), whole,
    )  # fmt: skip
    for got, wanted in zip(found, alone(*whole, causal), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_zigzag_shares_the_work(world):
    tokens = 8  # on each rank
    work = []
    for rank in range(world):
        of_turn = []
        for source in range(world):
            rows, columns, masked = block_of(rank, source, True, tokens)
            mine = zigzag(tokens * world, world, rank)[rows]
            theirs = zigzag(tokens * world, world, source)[columns]
            seen = mine[:, None] >= theirs[None, :]
            assert masked or seen.all()  # no block computes what a mask throws away
            of_turn.append(int(seen.sum()))
        work.append(of_turn)
    assert sum(map(sum, work)) == tokens * world * (tokens * world + 1) // 2  # and none is missing
    for of_ranks_ in ([sum(turns) for turns in work], *zip(*work, strict=True)):
        assert max(of_ranks_) / (sum(of_ranks_) / world) <= 1.3
    totals = [sum(turns) for turns in work]
    assert max(totals) / (sum(totals) / world) <= 1.05


@pytest.mark.alone
@three_tries
def test_a_shift_hides_under_a_block(monkeypatch):
    """Where a block takes as long as the link, 90% of all shifts are hidden."""
    block, taken = attention.block, 0.03

    def slow(*arguments):
        time.sleep(taken)
        return block(*arguments)

    monkeypatch.setattr(attention, "block", slow)
    world, tokens = 4, 1000
    bits = 2 * 4 * tokens * 8 * 32  # keys and values, heads, tokens, dim, float32

    def body(comm):
        q, k, v = (torch.ones(1, 4, tokens, 8) for _ in range(3))
        comm.barrier()
        with dp.trace(comm=comm) as trace:
            ring_attention(q, k, v, comm=comm, causal=True)
        return trace.exposed_ms

    link = f"{bits / taken / 1e6:.3f}mbit"
    exposed = max(dp.spawn(body, world, mode="threads", link=link))
    in_time(exposed < 0.1 * (world - 1) * taken * 1e3, f"{exposed} ms are exposed")


def test_what_cannot_be_shared_is_refused_with_words():
    def body(comm):
        x = torch.ones(1, 2, 5, 4)
        with pytest.raises(dp.Unsupported, match="zigzag"):
            ring_attention(x, x, x, comm=comm, causal=True)
        with pytest.raises(dp.Unsupported, match=r"5 tokens can't .* pad them to 8"):
            zigzag(5, 2, 0)
        with pytest.raises(ValueError, match=r"zigzag: rank 2 is not a rank: 0\.\.1"):
            zigzag(8, 2, 2)
        with pytest.raises(dp.Unsupported, match="3 heads of queries can't share 2 heads of keys"):
            ring_attention(torch.ones(1, 3, 5, 4), x, x, comm=comm)
        with pytest.raises(dp.Unsupported, match=r"needs \[batch, heads, tokens, dim\]"):
            ulysses_attention(x[0], x[0], x[0], comm=comm)
        if comm.world_size == 3:
            with pytest.raises(dp.Unsupported, match="2 heads of keys for 3 ranks"):
                ulysses_attention(x, x, x, comm=comm)
        with pytest.raises(dp.Unsupported, match="groups of heads can't be cut"):
            four = torch.ones(1, 4, 5, 4)
            ulysses_attention(four.repeat(1, 2, 1, 1), four, four, comm=comm)

    dp.spawn(body, 3, mode="threads")


def test_a_trace_shows_the_blocks_over_the_shifts(tmp_path):
    """Own keys first, then those of the rank before; each shift begins before its block."""
    world = 3

    def body(comm):
        q, k, v = (x.requires_grad_() for x in tensors(2, 2, 4)[:3])
        with dp.trace(tmp_path / "run.json", comm=comm) as trace:
            ring_attention(q, k, v, comm=comm, causal=True, span=trace.span).sum().backward()
        blocks = [event for event in trace.events if event.kind == "compute"]
        shifts = [e for e in trace.events if (e.kind, e.name) == ("operation", "send")]
        assert all(event.peer == (comm.rank + 1) % world for event in shifts)
        for block, shift in zip(blocks[: world - 1], shifts, strict=False):
            assert shift.begin_ns <= block.begin_ns
        return [event.name for event in blocks]

    for rank, names in enumerate(dp.spawn(body, world, mode="threads")):
        turns = [f"block {(rank - turn) % world}" for turn in range(world)]
        assert names == [*turns, *(f"{name} back" for name in turns)]
