"""Communication while computing, and a picture of it.

    torchrun --nproc-per-node 2 examples/overlap.py [overlap.json]

A backward pass in miniature: gradients become ready from the last layer to the first, and each is
reduced in the background while the next is computed. The first layer's gradient is ready last and
needed first, so later ones get a higher priority. Open the file with https://ui.perfetto.dev: the
track "operations" shows what was in flight, the track "main" what of it was not hidden.
"""

import sys

import torch

import dpcore as dp

LAYERS = 8
SIZE = 512

comm = dp.init()
torch.set_num_threads(1)
weights = [torch.randn(SIZE, SIZE) / SIZE**0.5 for _ in range(LAYERS)]
gradients = [comm.empty(SIZE, SIZE) for _ in range(LAYERS)]
batch = torch.randn(SIZE, SIZE)


def backward(overlapped: bool) -> None:
    flow = batch
    works = []
    for layer in reversed(range(LAYERS)):
        flow = flow @ weights[layer]
        torch.matmul(flow.T, batch, out=gradients[layer])
        if overlapped:
            priority = LAYERS - layer
            works.append(
                comm.all_reduce(gradients[layer], op="mean", async_op=True, priority=priority)
            )
        else:
            comm.all_reduce(gradients[layer], op="mean")
    for work in works:
        work.wait()


backward(overlapped=True)  # the first time memory is touched and threads are started
comm.barrier()
for overlapped in (False, True):
    path = sys.argv[1] if len(sys.argv) > 1 else "overlap.json"
    with dp.trace(path if overlapped else None) as t:
        for step in range(5):
            with t.span(f"step {step}"):
                backward(overlapped)
    if comm.rank == 0:
        name = "overlapped" if overlapped else "one after the other"
        print(f"{name}: {t.exposed_ms:.1f} ms exposed, {t.communication_ms:.1f} ms in flight")
    comm.barrier()
if comm.rank == 0:
    print(f"open {path} with https://ui.perfetto.dev")
dp.finalize()
