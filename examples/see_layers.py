"""Where the time of shared layers goes: two traces, over emulated links.

python examples/see_layers.py
dpcore show layers.json ring.json --open

`layers.json`: two ranks share the matrices of four layers (tensor parallel). No layer can go on
before its all-reduces are there, in forward and in backward. `ring.json`: four ranks share a
sequence (ring attention), over a link on which keys and values take about as long as a block of
arithmetic. They travel under it.
"""

import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import dpcore as dp
from dpcore.parallel.attention import block, ring_attention
from dpcore.parallel.functional import copy_to, reduce_from

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
WIDTH, LAYERS, TOKENS = 256, 4, 512
HEADS, DIM, OF_A_RANK = 4, 32, 1024


class Layer(nn.Module):
    """Two matrices: the first by columns, the second by rows, and one sum."""

    def __init__(self, comm: dp.Communicator) -> None:
        super().__init__()
        self.comm, inner = comm, 4 * WIDTH // comm.world_size
        self.up = nn.Parameter(torch.randn(WIDTH, inner) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(inner, WIDTH) / inner**0.5)

    def forward(self, x: Tensor) -> Tensor:
        features = nn.functional.gelu(copy_to(x, self.comm) @ self.up)
        return x + reduce_from(features @ self.down, self.comm)


def layers(comm: dp.Communicator) -> str:
    torch.set_num_threads(1)
    model = nn.Sequential(*(Layer(comm) for _ in range(LAYERS)))
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)

    model(x).square().mean().backward()
    with dp.trace(FOLDER / "layers.json", comm=comm) as trace:
        trace.layers(model)
        for _ in range(3):
            with trace.span("forward"):
                loss = model(x).square().mean()
            with trace.span("backward"):
                loss.backward()
    exposed = f"{trace.exposed_ms / 3:.1f} ms exposed"
    return f"layers: {exposed} in a step, which has {2 * LAYERS} all-reduces"


def ring(comm: dp.Communicator) -> str:
    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, HEADS, OF_A_RANK, DIM, requires_grad=True) for _ in range(3))
    for turn in range(2):
        with dp.trace(FOLDER / "ring.json" if turn else None, comm=comm) as trace:
            out = ring_attention(q, k, v, comm=comm, causal=True, span=trace.span)
            out.sum().backward()  # type: ignore[no-untyped-call]
    return f"ring: {trace.exposed_ms:.1f} ms exposed of {trace.communication_ms:.1f}"


def link_like_a_block() -> str:
    """On which a shift takes as long as a block does when two ranks share a processor."""
    torch.set_num_threads(1)
    q, k, v = torch.randn(3, 1, HEADS, OF_A_RANK, DIM)
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        block(q[:, :, : OF_A_RANK // 2], k, v, False, DIM**-0.5)
        times.append(time.perf_counter() - begin)
    seconds = 2 * min(times)
    return f"{2 * k.numel() * 4 * 8 / seconds / 1e6:.0f}mbit"


if __name__ == "__main__":
    print(dp.spawn(layers, 2, link="2gbit,50us")[0])
    print(dp.spawn(ring, 4, link=link_like_a_block())[0])
