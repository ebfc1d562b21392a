"""Is the advice right? `python -m benchmarks.advised [--json FILE] [--quick]`

Runs of torch DDP over Gloo with a planted cause, each as a process per rank. torch.profiler records
some steps, `dpcore advise` reads them, what it says is changed, and the same steps are recorded
again: the first line should name the cause, and what a step gains should be within what was said.
Layers have the gradients of ResNet-18 or of GPT-2 at a third of its width, and sleep in the place
of computing, so few processors are enough. With `link`, ranks are hosts with NICs that the kernel
shapes, which needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness.figures import source
from benchmarks.harness.sleeping import Nap
from dpcore.tools import hosts as namespaces
from dpcore.tools.advise.advice import Advice, advice_on
from dpcore.tools.records import keep, run_facts
from dpcore.tools.show.reading import read_run

_BLOCK = [256 * 768, 256 * 256, 256 * 1024, 1024 * 256]
SHAPES = {
    "resnet18": [
        *([9408] + [36864] * 4 + [73728, 147456, 8192, 147456, 147456]),
        *[294912, 589824, 32768, 589824, 589824, 1179648, 2359296, 131072, 2359296, 2359296],
        513000,
    ],
    "gpt2": [8192 * 256, *(_BLOCK * 6)],
}
_BATCH, _SAMPLE_MS = 8, 6.0
_PATIENCE = 300.0


@dataclass(frozen=True)
class Case:
    """``before`` and ``after``: bucket_cap_mb, workers of the loader, samples by rank."""

    cause: str
    shape: str
    world: int
    forward_ms: float
    before: dict[str, Any]
    after: dict[str, Any]
    link: str = ""


CASES = [
    Case("one giant bucket", "resnet18", 4, 250, {"cap": 1000.0}, {"cap": 11.0}, "1gbit"),
    Case("data loading", "gpt2", 4, 60, {}, {"workers": 1}),
    Case("unequal batches", "gpt2", 4, 120, {"samples": [4, 4, 4, 20]}, {}),
]


class Layer(nn.Module):
    """Sleeps as long as its gradient is large, and the batch."""

    def __init__(self, elements: int, forward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements))
        self.forward_s = forward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seconds = self.forward_s * len(x) / _BATCH
        made: torch.Tensor
        made = Nap.apply(x + self.weight.mean(), seconds, 2 * seconds)  # type: ignore[no-untyped-call]
        return made


class Samples(Dataset[torch.Tensor]):
    """Each takes some time to be made."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._seconds)
        return torch.zeros(4)


def rank_main(text: str) -> None:
    """On a rank: trains and writes its trace."""
    job = json.loads(text)
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sizes = SHAPES[job["shape"]]
    each = job["forward_ms"] * 1e-3 / len(sizes)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(*(Layer(elements, each) for elements in sizes)),
        bucket_cap_mb=job["setting"].get("cap"),
    )
    samples = job["setting"].get("samples")
    makes_them = job["cause"] == "data loading"
    loader = iter(
        DataLoader(
            Samples(_SAMPLE_MS * 1e-3 if makes_them else 0.0),
            batch_size=samples[rank] if samples else _BATCH,
            num_workers=job["setting"].get("workers", 0),
        )
    )

    def step() -> None:
        model.zero_grad()
        model(next(loader)).sum().backward()

    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(job["steps"]):
            step()
            profiler.step()
    profiler.export_chrome_trace(f"{job['folder']}/rank{rank}.json")
    dist.barrier()
    os._exit(0)  # workers of the loader, and threads of Gloo's, have nothing more to do


def recorded(case: Case, setting: dict[str, Any], steps: int) -> Advice:
    """The advice on a run."""
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        job = asdict(case) | {"setting": setting, "steps": steps, "folder": place}
        command = [sys.executable, "-m", "benchmarks.advised", "--rank", json.dumps(job)]
        port = str(namespaces.free_port())
        environment = {**os.environ, "WORLD_SIZE": str(case.world), "MASTER_PORT": port}
        made = None
        if case.link:
            made = stack.enter_context(namespaces.hosts(case.world))
            made.shape(case.link, namespaces.burst_of(case.link))
            environment |= {"MASTER_ADDR": made.address(0), "GLOO_SOCKET_IFNAME": "eth0"}
        else:
            environment |= {"MASTER_ADDR": "127.0.0.1"}
        ranks = [
            subprocess.Popen(
                made.inside(rank, *command) if made else command,
                env=environment | {"RANK": str(rank)},
                stdout=subprocess.DEVNULL,
            )
            for rank in range(case.world)
        ]
        try:
            if any(rank.wait(_PATIENCE) for rank in ranks):
                raise SystemExit(f"{case.cause}: a rank ended with an error")
        finally:
            for rank in ranks:
                rank.kill()
        return advice_on(read_run(Path(place)), [])


def measured(case: Case, rounds: int, steps: int) -> dict[str, Any]:
    """Before and after in turns."""
    befores = []
    afters = []
    for _ in range(rounds):
        befores.append(recorded(case, case.before, steps))
        afters.append(recorded(case, case.after, steps))
    first = befores[0].wrong[0] if befores[0].wrong else None
    before = statistics.median(advice.evidence.step_ms for advice in befores)
    after = statistics.median(advice.evidence.step_ms for advice in afters)
    return asdict(case) | {
        "named": first.cause if first else "",
        "low_ms": first.low_ms if first else 0.0,
        "high_ms": first.high_ms if first else 0.0,
        "change_said": first.change if first else "",
        "before_ms": before,
        "after_ms": after,
        "gained_ms": before - after,
        "befores_ms": [advice.evidence.step_ms for advice in befores],
        "afters_ms": [advice.evidence.step_ms for advice in afters],
        "left": [[finding.cause for finding in advice.wrong] for advice in afters],
    }


def table_of_advised(records: list[dict[str, Any]]) -> str:
    """Of docs/slow.md."""
    lines = [
        "| planted, and named first | before | after | gained | said |",
        "|---|---:|---:|---:|---:|",
    ]
    for record in records:
        named = record["cause"]
        named += "" if record["named"] == named else f" (named: {record['named'] or 'nothing'})"
        keys = ("before_ms", "after_ms", "gained_ms")
        times = " | ".join(f"{record[key]:.0f} ms" for key in keys)
        said = f"{record['low_ms']:.0f} to {record['high_ms']:.0f} ms"
        lines.append(f"| {named} | {times} | {said} |")
    what = "A step of torch DDP over Gloo on 4 ranks, medians of one run"
    return "\n".join([*lines, "", source("advised", records, "../", what), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="append a line of JSON for each case")
    parser.add_argument("--quick", action="store_true", help="one round")
    options = parser.parse_args()
    if options.rank:
        rank_main(options.rank)
    rounds, steps = (1, 6) if options.quick else (3, 10)
    facts = run_facts({"torch": {"torch": torch.__version__}}, {"rounds": rounds, "steps": steps})
    print(f"{'planted':<18}{'named':<18}{'before ms':>10}{'after ms':>10}{'gained ms':>11}  said")
    for case in CASES:
        line = measured(case, rounds, steps)
        keep(options.json, facts, [line])
        said = f"{line['low_ms']:.0f} to {line['high_ms']:.0f}"
        print(
            f"{case.cause:<18}{line['named']:<18}{line['before_ms']:>10.0f}{line['after_ms']:>10.0f}"
            f"{line['gained_ms']:>11.0f}  {said}",
            flush=True,
        )


if __name__ == "__main__":
    main()
