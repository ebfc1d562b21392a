"""Files as torch's profiler writes them, whose numbers are known.

``data/gloo_rank*`` are real: two ranks of torch DDP over Gloo (torch 2.13, three steps, shapes
recorded), cut down to what their calls leave on the main thread and on Gloo's. ``DDP_MS`` is what
DDP itself measured in these steps, from the end of the computation of backward to the end of its
communication.
"""

import json
from pathlib import Path

DATA = Path(__file__).parent / "data"
GLOO = [DATA / "gloo_rank0.json", DATA / "gloo_rank1.json.gz"]
DDP_MS = [[24.66, 63.40, 39.16], [44.41, 30.06, 57.16]]
MS = 1000  # microseconds


def span(name, category, tid, begin, end, **args):
    """Times are in milliseconds."""
    return {
        "ph": "X", "name": name, "cat": category, "pid": 100, "tid": tid,
        "ts": begin * MS, "dur": (end - begin) * MS, "args": args,
    }  # fmt: skip


def write(path, events, rank=0, world=2, base_ns=0, **more):
    content = {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world},
        "baseTimeNanoseconds": base_ns,
        "traceEvents": events,
        **more,
    }
    path.write_text(json.dumps(content))
    return path


def gpu_step(begin, number, main=100, autograd=101):
    """Of 20 ms on the device: forward 0 to 5, backward 5 to 15, and two buckets: 10 to 14, which
    is hidden, and 14 to 18, of which 3 ms are exposed. The host is done after 3 ms."""
    launches = iter(range(100 * number, 100 * number + 100))

    def kernel(name, stream, at, end, thread, launched, **more):
        n = next(launches)
        return [
            span("cudaLaunchKernel", "cuda_runtime", thread, launched, launched, correlation=n),
            span(name, "kernel", stream, at, end, correlation=n, stream=stream, device=0, **more),
        ]  # fmt: skip

    def reduce(at, end, launched):
        told = {"Collective name": "allreduce", "In msg nelems": 1000, "dtype": "Float"}
        call = span("c10d::allreduce_", "cpu_op", autograd, launched, launched + 0.1)
        name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        return [call, *kernel(name, 20, at, end, autograd, launched + 0.05, **told)]

    node = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
    leaf = "torch::autograd::AccumulateGrad"
    b = begin
    return [
        span(f"ProfilerStep#{number}", "user_annotation", main, b, b + 20),
        span("DistributedDataParallel.forward", "user_annotation", main, b + 0.1, b + 1),
        *kernel("sgemm", 7, b, b + 5, main, b + 0.2),
        span(node, "cpu_op", autograd, b + 1.5, b + 2),
        span(leaf, "cpu_op", autograd, b + 1.6, b + 1.7),
        *kernel("sgemm", 7, b + 5, b + 10, autograd, b + 1.65),
        *reduce(b + 10, b + 14, b + 1.8),
        *kernel("sgemm", 7, b + 10, b + 15, autograd, b + 1.95),
        span(node, "cpu_op", autograd, b + 2.1, b + 2.9),
        span(leaf, "cpu_op", autograd, b + 2.2, b + 2.3),
        *reduce(b + 14, b + 18, b + 2.5),
        span("Memcpy DtoH", "gpu_memcpy", 7, b + 16, b + 17, stream=7),
    ]


def gpu_steps(count=3, shift_ms=0.0):
    return [event for n in range(count) for event in gpu_step(1000 + 20 * n + shift_ms, n)]
