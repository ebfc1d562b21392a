"""What does a step cost over a real, slow network? `python -m benchmarks.shaped_link`

Two network namespaces, joined by a bridge; the kernel lets each send no faster than 100 Mbit/s, 1
or 10 Gbit/s. Real TCP, everybody over the same NICs, in turn:

    alone       no communication
    torch       torch DDP over Gloo; "torch N" with buckets of N MiB
    dpcore      without an argument, when it has settled
    dpcore ...  a schedule of launches, where it has buckets with their size in MiB

    bound = the first gradient has come, and all bytes at the goodput of one raw TCP stream;
            or computing alone, where that takes longer

A step is forward and backward. The goodput is measured in the same run, between the rounds.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.options import script_parser
from dpcore.tools import hosts as namespaces
from dpcore.tools.compare.training.ranks import ALONE, DEFAULT
from dpcore.tools.compare.training.start import RAW_PORT, run_job, shaped_hosts
from dpcore.tools.compare.training.worker import Job
from dpcore.tools.hosts import burst_of
from dpcore.tools.ratios import of_slowest_rank
from dpcore.tools.records import ROOT, keep, run_facts
from dpcore.tools.show import read_run, write_page, write_picture

RATES = ("100mbit", "1gbit", "10gbit")
CONTENDERS = (
    ALONE, "torch", "torch 1", "torch 4", DEFAULT, "dpcore bucketed 1", "dpcore bucketed 4",
    "dpcore per_parameter", "dpcore sequential", "dpcore oracle",
)  # fmt: skip
PICTURED = ("torch", "torch 1", "dpcore sequential", DEFAULT)


def figures(result: dict[str, Any]) -> dict[str, Any]:
    """Seconds: medians of the slowest rank's steps, the bound, and what it is made of."""
    steps = {
        name: statistics.median(of_slowest_rank(of_ranks))
        for name, of_ranks in result["seconds"].items()
    }
    goodput = statistics.median(map(min, zip(*result["raw"], strict=True)))
    first = max(seconds for (seconds,) in result["first_gradient"])
    # An all-reduce of two ranks sends each byte once in either direction.
    bound = max(steps[ALONE], first + result["gradient_bytes"] / goodput)
    return {"steps": steps, "goodput": goodput, "first_gradient": first, "bound": bound}


def table(rate: str, made: dict[str, Any]) -> str:
    lines = [
        f"{rate}: raw goodput {made['goodput'] / 1e6:.1f} MB/s, first gradient after "
        f"{made['first_gradient'] * 1e3:.1f} ms, bound {made['bound'] * 1e3:.1f} ms",
        f"{'':24}{'step ms':>10}{'of bound':>10}",
    ]
    for name, seconds in made["steps"].items():
        lines.append(f"{name:24}{seconds * 1e3:>10.1f}{seconds / made['bound']:>10.2f}")
    return "\n".join(lines)


def records(rate: str, model: str, result: dict[str, Any]) -> list[dict[str, Any]]:
    made = figures(result)
    common = {"rate": rate, "model": model, "world": 2}
    common |= {"goodput_bytes_per_s": made["goodput"], "bound_s": made["bound"]}
    common |= {"first_gradient_s": made["first_gradient"]}
    return [
        common
        | {"contender": name, "step_s": seconds, "of_bound": seconds / made["bound"]}
        | {"steps_s": of_slowest_rank(result["seconds"][name])}
        for name, seconds in made["steps"].items()
    ]


def draw(folder: Path, contenders: list[str]) -> list[Path]:
    """A page of all traces and a picture of the ones that tell most."""
    traces = {name: folder / f"{name.replace(' ', '-')}.json" for name in contenders}
    runs = {name: read_run(path) for name, path in traces.items() if path.exists()}
    page, picture = folder / "timeline.html", folder / "timeline.png"
    write_page(page, list(runs.values()))
    pictured = [run for name, run in runs.items() if name in PICTURED]
    write_picture(picture, pictured or list(runs.values()))
    return [page, picture]


def main() -> int:
    made = script_parser(__doc__)
    made.add_argument("--rates", default=",".join(RATES), help="default: %(default)s")
    made.add_argument("--contenders", default=",".join(CONTENDERS), help="of %(default)s")
    made.add_argument(
        "--model", default="transformer", help="of dpcore/tools/compare/training/models.py"
    )
    made.add_argument("--rounds", type=int, default=7, help="in which all take turns")
    made.add_argument(
        "--steps-per-round", type=int, default=3, help="steps of one contender in a round"
    )
    made.add_argument("--records", type=Path, default=ROOT / "benchmarks/results/shaped_link.jsonl")
    made.add_argument("--out", type=Path, default=Path("demo/shaped"), help="folder of timelines")
    options = made.parse_args()
    if reason := namespaces.why_not():
        print(f"shaped_link: {reason}", file=sys.stderr)
        return 1
    contenders = options.contenders.split(",")
    if contenders[0] != ALONE:
        made.error(f"the first contender has to be {ALONE}: the bound is made of it")
    facts = run_facts(
        {"": {"torch": torch.__version__}},
        {"rounds": options.rounds, "steps": options.steps_per_round},
    )
    for rate in options.rates.split(","):
        folder = (options.out / rate).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        job = Job(
            options.model, contenders, options.rounds, options.steps_per_round, str(folder),
            init={"transport": "tcp"}, raw_port=RAW_PORT, optimizer="",
        )  # fmt: skip
        with shaped_hosts(rate, burst_of(rate)) as hosts:
            result = run_job(job, lambda _: None, hosts)
        print(table(rate, figures(result)), flush=True)
        print("timelines:", *draw(folder, contenders), "\n", flush=True)
        keep(options.records, facts, records(rate, options.model, result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
