"""Records runs of torch DDP over Gloo in which a cause is planted, cut down to what is read:

    python -m tests.advise.recorded

writes ``data/compiled/rank0.json.gz`` and so on. Two ranks, a few seconds each.
"""

import gzip
import json
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness.sleeping import Nap
from tests.advise.planted import DATA
from tests.ranks.groups import in_group

CAUSES = ("compiled", "late")
STEPS = 6
VIEWS = {"gradient_as_bucket_view": True}
READ = ("autograd::", "torch::autograd", "torch.distributed", "c10d::", "aten::mean", "Compiled")
ARGUMENTS = ("Input Dims", "Input type")


class Sleeping(nn.Module):
    """A layer that sleeps in the place of computing, 4 ms in backward."""

    def __init__(self, elements):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements))

    def forward(self, x):
        return Nap.apply(x + self.weight.mean(), 0.002, 0.004)


@torch.library.custom_op("planted::nap", mutates_args=())
def nap(x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
    """Sleeps in forward, and twice as long in backward. A compiler does not look into it."""
    time.sleep(seconds)
    return x.clone()


@nap.register_fake
def _(x, weight, seconds):
    return torch.empty_like(x)


def _backward(ctx, gradient):
    return nap(gradient, gradient, 2 * ctx.seconds), gradient.new_zeros(ctx.shape), None


def _remember(ctx, inputs, output):
    ctx.shape, ctx.seconds = inputs[1].shape, inputs[2]


nap.register_autograd(_backward, setup_context=_remember)


class Opaque(nn.Module):
    """The same as the compiler sees it."""

    def __init__(self, elements):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements))

    def forward(self, x):
        return nap(x, self.weight, 0.002)


def compiled():
    """The compiler makes one graph of forward and one of backward, inside DDP, which cannot see
    where its buckets end."""
    layers = nn.Sequential(*(Opaque(1 << 19) for _ in range(12)))
    module = torch.compile(layers, backend="aot_eager")
    return nn.parallel.DistributedDataParallel(module, **VIEWS), torch.ones(4, requires_grad=True)


def late():
    """The first bucket has as much as bucket_cap_mb allows."""
    module = nn.Sequential(*(Sleeping(1 << 19) for _ in range(24)))
    return nn.parallel.DistributedDataParallel(module, bucket_cap_mb=30, **VIEWS), torch.ones(4)


def record(make, folder):
    torch.set_num_threads(1)
    model, x = make()

    def step():
        model.zero_grad()
        model(x).sum().backward()

    for _ in range(4):
        step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(STEPS):
            step()
            profiler.step()
    profiler.export_chrome_trace(f"{folder}/rank{dist.get_rank()}.json")
    dist.barrier()


def cut(content):
    """Without most operators inside of others, and with two arguments of each."""
    kept = ("schemaVersion", "distributedInfo", "baseTimeNanoseconds")
    events = [
        {name: event[name] for name in ("ph", "cat", "name", "tid", "ts", "dur")}
        | {"args": {name: event["args"][name] for name in ARGUMENTS if name in event["args"]}}
        for event in content["traceEvents"]
        if event.get("cat") == "user_annotation"
        or (event.get("cat") == "cpu_op" and event["name"].startswith(READ))
    ]
    return {name: content[name] for name in kept} | {"host_name": "one", "traceEvents": events}


def main():
    for cause in CAUSES:
        make = globals()[cause]
        with tempfile.TemporaryDirectory() as folder:
            in_group(partial(record, make, folder), 2, backend="gloo")
            (DATA / cause).mkdir(exist_ok=True)
            for path in sorted(Path(folder).glob("rank*.json")):
                text = json.dumps(cut(json.loads(path.read_text())), separators=(",", ":"))
                packed = gzip.compress(text.encode(), 9, mtime=0)
                (DATA / cause / f"{path.name}.gz").write_bytes(packed)


if __name__ == "__main__":
    from tests.advise import recorded  # by its name, under which ranks find what they run

    recorded.main()
