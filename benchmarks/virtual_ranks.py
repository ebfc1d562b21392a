"""What do bits that do not depend on the number of ranks cost? `python -m benchmarks.virtual_ranks`

A step of `DataParallel(virtual_ranks=V)` beside one that accumulates V / world micro-batches with
`no_sync()`, in turn, of the same model: forwards, backwards, and `optimizer.step()`. Before that, a
small model with dropout and batch normalisation trains for 200 steps on each number of ranks, and
the sha256 of its weights is the record's.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dpcore as dp
from benchmarks.harness.figures import source
from benchmarks.harness.options import script_parser
from dpcore.tools.compare.training.models import MODELS
from dpcore.tools.ratios import estimate, in_turn, of_slowest_rank
from dpcore.tools.records import ROOT, keep, run_facts

PLAIN, VIRTUAL = "accumulated", "virtual ranks"
WORLDS = (1, 2, 3, 4, 8)


def trained(comm: Any, shards: int, steps: int) -> str:
    """The sha256 of parameters and buffers."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1)
    )
    model = dp.DataParallel(module, comm=comm, virtual_ranks=shards)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(8 * shards, 32, generator=generator)
        optimizer.zero_grad()
        for inputs in model.shards(x):
            nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True).sin()).backward()
        optimizer.step()
    state = [tensor.numpy().tobytes() for tensor in module.state_dict().values()]
    return hashlib.sha256(b"".join(state)).hexdigest()


def measure(comm: Any, name: str, shards: int, rounds: int) -> dict[str, list[float]]:
    """On a rank: seconds per step, by contender and round."""
    torch.set_num_threads(1)
    contenders: dict[str, Any] = {}
    for kind in (PLAIN, VIRTUAL):
        torch.manual_seed(comm.rank)
        module, forward = MODELS[name]()
        options = {"virtual_ranks": shards} if kind == VIRTUAL else {}
        model = dp.DataParallel(module, comm=comm, **options)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
        contenders[kind] = (model, optimizer, forward)
    each = torch.zeros(shards)  # the models bring their own inputs

    def step(kind: str) -> float:
        model, optimizer, forward = contenders[kind]
        comm.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        if kind == VIRTUAL:
            for _ in model.shards(each):
                forward(model).backward()
        else:
            mine = shards // comm.world_size
            for number in range(mine):
                is_last = number == mine - 1
                with contextlib.nullcontext() if is_last else model.no_sync():
                    (forward(model) / mine).backward()
        optimizer.step()
        return time.perf_counter() - begin

    for kind in contenders:
        for _ in range(40 if kind == PLAIN else 4):  # until the first steps have chosen
            step(kind)
    found: dict[str, list[float]] = {kind: [] for kind in contenders}
    for number in range(rounds):
        for kind in in_turn(list(contenders), number):
            found[kind].append(step(kind))
    return found


def table_of_virtual_ranks(records: list[dict[str, Any]]) -> str:
    """Of docs/virtual_ranks.md."""
    lines = ["| ranks | steps | sha256 of the weights |", "|---:|---:|---|"]
    for record in records:
        if "sha256" in record:
            digests = ", ".join(f"`{digest[:16]}...`" for digest in record["sha256"])
            lines.append(f"| {record['world']} | {record['steps']} | {digests} |")
    lines += ["", "| model | ranks | shards | of the time of accumulating (95%) |"]
    lines += ["|---|---:|---:|---|"]
    for record in records:
        if ratio := record.get("ratio"):
            said = f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
            lines.append(f"| {record['model']} | {record['world']} | {record['shards']} | {said} |")
    return "\n".join([*lines, "", source("virtual_ranks", records, "../"), ""])


if __name__ == "__main__":
    made = script_parser(__doc__)
    made.add_argument("--models", default="mlp,transformer", help="%(default)s")
    made.add_argument("--world", type=int, default=2, help="a divisor of --shards; %(default)s")
    made.add_argument("--shards", type=int, default=8, help="%(default)s")
    made.add_argument("--rounds", type=int, default=41)
    made.add_argument("--steps", type=int, default=200, help="of the trainings whose bits count")
    made.add_argument(
        "--records", type=Path, default=ROOT / "benchmarks/results/virtual_ranks.jsonl"
    )
    options = made.parse_args()
    facts = run_facts({"": {"torch": torch.__version__}}, {"rounds": options.rounds})
    lines: list[dict[str, Any]] = []
    if options.steps:
        found = {world: dp.spawn(trained, world, 8, options.steps, timeout=300) for world in WORLDS}
        for world, digests in found.items():
            print(f"{world} ranks, {options.steps} steps: sha256 {', '.join(sorted(set(digests)))}")
            lines.append({"world": world, "steps": options.steps, "sha256": sorted(set(digests))})
    for name in options.models.split(","):
        ranks = dp.spawn(measure, options.world, name, options.shards, options.rounds, timeout=300)
        slowest = {kind: of_slowest_rank(rank[kind] for rank in ranks) for kind in ranks[0]}
        pairs = zip(slowest[VIRTUAL], slowest[PLAIN], strict=True)
        ratio = estimate([virtual / plain for virtual, plain in pairs])
        print(f"{name}: {ratio.median:.3f} of the time of accumulating ({ratio.between()})")
        of_run = {"model": name, "world": options.world, "shards": options.shards}
        lines.append({**of_run, "ratio": asdict(ratio), "seconds": slowest})
    keep(options.records, facts, lines)
