"""Runs in which a cause is planted: files as torch's profiler writes them, with noise from a seed.

``data/*`` are real: two ranks of torch DDP over Gloo (torch 2.13, layers that sleep, two processors
that others used as well), cut down to what is read of them.
"""

import gzip
import json
import random
from pathlib import Path

from tests.show.profiles import span

DATA = Path(__file__).parent / "data"
LEAF = "torch::autograd::AccumulateGrad"
NODE = f"autograd::engine::evaluate_function: {LEAF}"
MAIN, WORK, STREAM, NCCL = 1, 2, 7, 20
MIB = 1 << 20


def floats(nbytes):
    return {"Input Dims": [[nbytes // 4]], "Input type": ["float"]}


class Planted:
    """A run of torch DDP over Gloo. Milliseconds. ``compute(rank, step)``: of forward, and half of
    that of backward. ``sizes``: bytes of the gradients in order of arrival; ``sends``: after which
    of them a bucket leaves. ``rate``: bytes per ms on the link, after ``latency``."""

    def __init__(self, seed=0, world=2, steps=7, **options):
        self.random = random.Random(seed)
        self.world, self.steps = world, steps
        self.sizes = options.get("sizes", [4 * MIB] * 10)
        self.sends = options.get("sends", [0, 6, 9])
        self.compute = options.get("compute", lambda rank, step: 60)
        self.loading = options.get("loading", lambda rank, step: 0.5)
        self.quiet = options.get("quiet", 0)
        self.rate = options.get("rate", MIB)
        self.latency = options.get("latency", 0.4)
        self.at_end = options.get("at_end", False)
        self.searches = options.get("searches", False)
        self.batch = options.get("batch", lambda rank, step: 32)
        self.product = options.get("product", 1.0)
        self.jitter = options.get("jitter", 0.02)
        self.copies = options.get("copies", 0.05)
        self.shapes = options.get("shapes", True)
        self.events = [[] for _ in range(world)]
        begin = 1000.0
        for step in range(steps):
            begin = self._step(begin, step)

    def write(self, folder, steps=True, compressed=False, ranks=None):
        for rank in range(self.world) if ranks is None else ranks:
            events = [e for e in self.events[rank] if steps or "ProfilerStep" not in e["name"]]
            if not self.shapes:
                events = [dict(e, args={}) for e in events]
            content = {
                "schemaVersion": 1,
                "host_name": "one",
                "distributedInfo": {"backend": "gloo", "rank": rank, "world_size": self.world},
                "traceEvents": events,
            }
            data = json.dumps(content).encode()
            if compressed:
                (folder / f"rank{rank}.pt.trace.json.gz").write_bytes(gzip.compress(data, 1))
            else:
                (folder / f"rank{rank}.pt.trace.json").write_bytes(data)
        return folder

    def _about(self, ms):
        return ms * (1 + self.jitter * abs(self.random.gauss(0, 1)))

    def _step(self, begin, number):
        """Writes a step of all ranks; when the next begins."""
        launches, filled, over = [], [], []
        for rank in range(self.world):
            add = self.events[rank].append
            at = begin + self.random.random() * 0.2
            loading = self._about(self.loading(rank, number))
            add(span("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
                     "user_annotation", MAIN, at, at + loading))  # fmt: skip
            at += loading + self.quiet + 0.1
            forward = self._about(self.compute(rank, number))
            add(span("DistributedDataParallel.forward", "user_annotation", MAIN, at, at + forward))
            weight = {"Input Dims": [[256, 256]]}
            add(span("aten::mean", "cpu_op", MAIN, at + 0.01, at + 0.02, **weight))
            shape = [[self.batch(rank, number), 256], [256, 256]]
            add(span("aten::linear", "cpu_op", MAIN, at, at + forward, **{"Input Dims": shape}))
            count = self._about(self.product)
            add(span("aten::mm", "cpu_op", MAIN, at + 0.1, at + 0.1 + count,
                     **{"Input Dims": [[8, 1024], [1024, 1024]]}))  # fmt: skip
            at += forward
            if self.searches:
                name = "torch.distributed.ddp.reducer::search_unused_parameters"
                add(span(name, "cpu_op", MAIN, at, at + 0.1))
                at += 0.2
            backward = forward * 1.5
            add(span("autograd::engine::evaluate_function: Sum", "cpu_op", MAIN, at, at + 0.05))
            mine = []
            for gradient, nbytes in enumerate(self.sizes):
                share = (gradient + 1) / len(self.sizes)
                came = at + backward * (1 - 0.04 * (1 - share) if self.at_end else share)
                add(span(NODE, "cpu_op", MAIN, came - 0.05, came + 0.08))
                add(span(LEAF, "cpu_op", MAIN, came - 0.04, came, **floats(nbytes)))
                if gradient in self.sends:
                    mine.append(came + 0.03)
            launches.append(mine)
            filled.append(at + backward)
        end = 0.0
        last = -1
        done = []
        for bucket, send in enumerate(self.sends):
            nbytes = sum(self.sizes[last + 1 : send + 1])
            last = send
            entered = max([end, *(mine[bucket] for mine in launches)])
            end = entered + self._about(self.latency + nbytes / self.rate)
            done.append((nbytes, end))
        for rank in range(self.world):
            add = self.events[rank].append
            queue = 0.0
            for (nbytes, until), at in zip(done, launches[rank], strict=True):
                told = {"Input Dims": [[[nbytes // 4]], []], "Input type": ["TensorList", ""]}
                add(span("c10d::allreduce_", "cpu_op", MAIN, at, at + 0.02, **told))
                work = max(queue, at + 0.02)
                add(span("gloo:all_reduce", "user_annotation", WORK, work, until, **told))
                queue = until
            at = max(filled[rank] + 0.1, done[0][1] + 0.01)
            for (nbytes, until), send in zip(done, self.sends, strict=True):
                at = max(at, until + 0.01)
                copy = self.copies * nbytes / MIB
                name = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
                add(span(name, "cpu_op", MAIN, at, at + copy))
                at += copy + 0.001 * send
            over.append(at)
            add(span("Optimizer.step#SGD.step", "user_annotation", MAIN, at + 0.1, at + 2.1))
            add(span("aten::add_", "cpu_op", MAIN, at + 0.1, at + 2.1))
            name = f"ProfilerStep#{number}"
            add(span(name, "user_annotation", MAIN, begin, at + 2.3))
        return max(over) + 2.5


def gpu_run(folder, world=2, steps=6, item_ms=0.0, quiet_ms=0.0):
    """A run over NCCL. ``item_ms``: how long the GPU is idle after an .item() in forward."""
    for rank in range(world):
        events = []
        for number in range(steps):
            events += _gpu_step(1000 + number * (42 + item_ms + quiet_ms), number, item_ms)
        content = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0}],
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world},
            "traceEvents": events,
        }
        (folder / f"rank{rank}.json").write_text(json.dumps(content))
    return folder


def _gpu_step(b, number, item_ms):
    ids = iter(range(100 * number + 1, 100 * number + 100))
    events = []

    def kernel(name, stream, at, end, launched, thread=MAIN, **more):
        n = next(ids)
        events.extend(
            [
                span("cudaLaunchKernel", "cuda_runtime", thread, launched, launched + 0.01,
                     correlation=n),
                span(name, "kernel", stream, at, end, correlation=n, stream=stream, **more),
            ]
        )  # fmt: skip

    events.append(span("DistributedDataParallel.forward", "user_annotation", MAIN, b, b + 11))
    kernel("gemm", STREAM, b + 0.2, b + 10, b + 0.1)
    if item_ms:
        events += [
            span("aten::item", "cpu_op", MAIN, b + 0.3, b + 10.1),
            span("aten::_local_scalar_dense", "cpu_op", MAIN, b + 0.3, b + 10.1),
            span("cudaMemcpyAsync", "cuda_runtime", MAIN, b + 0.3, b + 0.32),
            span("cudaStreamSynchronize", "cuda_runtime", MAIN, b + 0.33, b + 10.01),
        ]
    c = b + 10 + item_ms
    kernel("gemm2", STREAM, c, c + 2, c - 0.1 if item_ms else b + 0.5)
    c += 2
    told = {"Collective name": "allreduce", "In msg nelems": 4 * MIB, "dtype": "Float"}
    leaf = span(LEAF, "cpu_op", 3, c + 0.2, c + 0.25)
    events += [span(NODE, "cpu_op", 3, c - 1.5, c + 0.9), leaf]
    kernel("gemm", STREAM, c, c + 12, c - 1.4, thread=3)
    events.append(span("c10d::allreduce_", "cpu_op", 3, c - 1.3, c - 1.1))
    kernel("ncclDevKernel_AllReduce_Sum", NCCL, c + 12, c + 15, c - 1.2, thread=3, **told)
    kernel("gemm", STREAM, c + 12, c + 28, c - 1.0, thread=3)
    events.append(span("c10d::allreduce_", "cpu_op", 3, c + 0.3, c + 0.5))
    kernel("ncclDevKernel_AllReduce_Sum", NCCL, c + 26, c + 29, c + 0.4, thread=3, **told)
    return events
