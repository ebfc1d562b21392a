"""What do local updates cost in loss, and save? `python -m benchmarks.local_updates`

Two ranks learn a text over an emulated link, with the same number of tokens:

    DataParallel       averages the gradients of every step
    LocalSGD N         averages the parameters every N steps
    DiLoCo N           gives their way in N steps to an outer optimizer (SGD, 0.7, Nesterov 0.9)
    DiLoCo N streamed  the same in 4 fragments, each a step on its way, in int8

Every loss is that of a part of the text that no rank trains on, and the mean over the seeds with
its 95% interval:

    tokens   after all tokens
    bytes    after at most the bytes that LocalSGD 16 has sent in all
    seconds  after at most the seconds that LocalSGD 16 took in all

Between the moments at which the loss was measured it is taken to change evenly.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import dpcore as dp
from benchmarks.harness.options import script_parser
from dpcore.tools.compare.training.models import Language
from dpcore.tools.compare.training.text import LENGTH, Text, loss_of
from dpcore.tools.records import keep, run_facts

WORLD = 2
WIDTH, LAYERS, SEQUENCES = 64, 2, 8  # of a rank's batch
MOMENTS = (0, 1, 4, 16, 32, 64, 96, 128, 192, 256, 320, 384, 512)  # steps: when the loss is taken
REFERENCE = "LocalSGD 16"
# 95% of Student's distribution, by the number of seeds less one.
STUDENT = {
    1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262,
    10: 2.228, 11: 2.201, 12: 2.179, 13: 2.160, 14: 2.145, 15: 2.131,
}  # fmt: skip
MOST_SEEDS = max(STUDENT) + 1

Point = tuple[int, float, float, float]  # steps, bytes that a rank has sent, seconds, loss


def language_model(letters: int) -> Language:
    model = Language(letters, WIDTH, LAYERS, heads=4, length=LENGTH)
    torch.nn.init.normal_(model.embedding.weight, std=0.02)
    return model


def contenders(sync_every: list[int]) -> list[str]:
    found = ["DataParallel", *(f"LocalSGD {n}" for n in sync_every)]
    found += [f"DiLoCo {n}" for n in sync_every if n >= 8]
    return found + [f"DiLoCo {n} streamed" for n in sync_every if n >= 8]


def train(comm: Any, names: list[str], steps: int, seed: int) -> dict[str, list[Point]]:
    """What each contender has reached when. Runs on every rank."""
    torch.set_num_threads(1)
    text = Text()
    learned = len(text.numbers) * 9 // 10
    unseen = windows(text.numbers[learned:], torch.Generator().manual_seed(0), 64)
    found = {}
    for name in names:
        torch.manual_seed(seed)
        module = language_model(len(text.alphabet))
        optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
        model, block, every = made(name, module, optimizer, comm)
        chance = torch.Generator().manual_seed(1000 * seed + comm.rank)
        curve: list[Point] = []
        seconds = 0.0
        sent = bytes_sent(comm)
        with block:
            for done in range(steps + 1):
                if (done in MOMENTS and done % every == 0) or done == steps:
                    used = bytes_sent(comm) - sent
                    with torch.no_grad():
                        curve.append((done, used, seconds, loss_of(module, unseen).item()))
                    comm.barrier()
                    sent = bytes_sent(comm) - used
                if done == steps:
                    break
                begin = time.perf_counter()
                optimizer.zero_grad()
                batch = windows(text.numbers[:learned], chance, SEQUENCES)
                loss_of(model, batch).backward()
                optimizer.step()
                seconds += time.perf_counter() - begin
        found[name] = curve
    return found


def made(name: str, module: Any, optimizer: Any, comm: Any) -> tuple[Any, Any, int]:
    """What is called, the block that is trained in, and after how many steps ranks are equal."""
    kind, _, rest = name.partition(" ")
    if kind == "DataParallel":
        return dp.DataParallel(module, comm=comm), contextlib.nullcontext(), 1
    every = int(rest.split()[0])
    if kind == "LocalSGD":
        return module, dp.LocalSGD(module, optimizer, every, comm=comm), every
    outer = torch.optim.SGD(module.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    streamed = {"fragments": 4, "fragment_sync_delay": 1, "bits": 8}
    options: dict[str, int] = streamed if rest.endswith("streamed") else {}
    return module, dp.DiLoCo(module, optimizer, outer, every, comm=comm, **options), every


def windows(numbers: torch.Tensor, chance: torch.Generator, count: int) -> torch.Tensor:
    starts = torch.randint(len(numbers) - LENGTH - 1, (count,), generator=chance)
    return torch.stack([numbers[start : start + LENGTH + 1] for start in starts.tolist()])


def bytes_sent(comm: Any) -> int:
    return sum(comm.stats()["sent"].values())


# ---- what it says ----------------------------------------------------------------------------


def loss_at(curve: list[Point], axis: int, limit: float) -> float:
    """When the curve has used so much of its bytes (axis 1) or seconds (2), or at its end."""
    for before, after in pairwise(curve):
        if after[axis] > limit:
            share = (limit - before[axis]) / (after[axis] - before[axis])
            return before[3] + share * (after[3] - before[3])
    return curve[-1][3]


def interval(values: list[float]) -> dict[str, float]:
    """The mean, and where the true one lies with a confidence of 95%. One value can't tell."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return {"mean": mean, "low": mean, "high": mean}
    half = STUDENT[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5
    return {"mean": mean, "low": mean - half, "high": mean + half}


def summaries(of_seeds: list[dict[str, list[Point]]]) -> list[dict[str, Any]]:
    reference = REFERENCE if REFERENCE in of_seeds[0] else list(of_seeds[0])[-1]
    lines = []
    for name in of_seeds[0]:
        curves = [found[name] for found in of_seeds]
        limits = [found[reference][-1] for found in of_seeds]
        pairs = list(zip(curves, limits, strict=True))
        lines.append(
            {
                "contender": name,
                "reference": reference,
                "tokens": curves[0][-1][0] * WORLD * SEQUENCES * LENGTH,
                "bytes": curves[0][-1][1],
                "seconds": statistics.median(curve[-1][2] for curve in curves),
                "loss": interval([curve[-1][3] for curve in curves]),
                "loss_of_bytes": interval([loss_at(c, 1, limit[1]) for c, limit in pairs]),
                "loss_of_seconds": interval([loss_at(c, 2, limit[2]) for c, limit in pairs]),
                "curves": curves,
            }
        )
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    text = [
        f"{lines[0]['tokens']} tokens; loss for the same tokens, and within the bytes and seconds "
        f"of {lines[0]['reference']}; "
        + (
            "95% intervals"
            if len(lines[0]["curves"]) > 1
            else "one seed, so there are no intervals"
        ),
        f"{'':22}{'MB':>8}{'s':>8}" + "".join(f"{n:>22}" for n in ("tokens", "bytes", "seconds")),
    ]
    for line in lines:
        row = f"{line['contender']:22}{line['bytes'] / 1e6:>8.2f}{line['seconds']:>8.2f}"
        for name in ("loss", "loss_of_bytes", "loss_of_seconds"):
            found = line[name]
            row += f"{found['mean']:>9.3f} ({found['low']:.2f}-{found['high']:.2f})"
        text.append(row)
    return "\n".join(text)


def main() -> int:
    made = script_parser(__doc__)
    add = made.add_argument
    add("--link", default="100mbit,1ms", help="emulated (default: %(default)s)")
    add("--sync-every", default="1,4,16,64", metavar="STEPS", help="default: %(default)s")
    add("--steps", type=int, default=384, help="of each rank (default: %(default)s)")
    add("--seeds", type=int, default=3, help="trainings of each contender (default: %(default)s)")
    add("--quick", action="store_true", help="one seed, 16 steps, sync_every of 1 and 8")
    add("--records", type=Path, help="append one JSON line per contender")
    options = made.parse_args()
    if options.quick:
        options.sync_every, options.steps, options.seeds = "1,8", 16, 1
    try:
        sync_every = [int(number) for number in options.sync_every.split(",")]
    except ValueError:
        made.error(f"--sync-every: {options.sync_every!r} is not a list of numbers such as 1,4,16")
    if min(*sync_every, options.steps, options.seeds, 9**9) < 1:
        made.error("--sync-every, --steps and --seeds are numbers from 1 on")
    if options.seeds > MOST_SEEDS:
        made.error(f"--seeds: at most {MOST_SEEDS}, as far as the table of Student's t goes")
    settings = {"link": options.link, "steps": options.steps, "seeds": options.seeds}
    facts = run_facts({"": {"torch": torch.__version__}}, settings)
    run: Callable[..., Any] = train
    of_seeds = []
    for seed in range(options.seeds):
        names = contenders(sync_every)
        names = names[seed % len(names) :] + names[: seed % len(names)]  # none is always the first
        by_rank = dp.spawn(run, WORLD, names, options.steps, seed, link=options.link, timeout=120.0)
        of_seeds.append({name: by_rank[0][name] for name in contenders(sync_every)})
        print(f"seed {seed} is done", file=sys.stderr, flush=True)
    lines = summaries(of_seeds)
    print(table(lines), flush=True)
    keep(options.records, facts, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
