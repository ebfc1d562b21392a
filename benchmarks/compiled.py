"""What is left of overlap when a model is compiled?  `python -m benchmarks.compiled`

Two ranks of this machine over a link that dpcore emulates, or with --link "shaped 1gbit" in two
network namespaces whose cards the kernel shapes, with real TCP. All contenders train a model of the
same kind in turns of some steps, in the same processes:

    eager alone, compiled alone    no communication: what computing takes, and to compile
    announced alone                as compiled alone, with operations that no reducer hears
    eager                          `dp.DataParallel(model)`
    compiled                       the same under torch.compile: one graph, gradients leave early
    late                           the same without operations: gradients come at its end
    cut                            the same, with its graphs cut where buckets end
    torch cut                      torch DDP under torch.compile, over our communicator, since Gloo
                                   goes over no emulated link
    gloo cut                       the same over Gloo, on shaped cards

A step is zero_grad, forward and backward, of the slowest rank. Exposed is a step minus that of the
same kind alone, in the same round. What operations cost is the backward of announced alone
beside that of compiled alone, and, with --link none, that of compiled beside that of late.
Inductor's caches are off, so that seconds to compile are those of the first step. All of it takes
seven minutes on two cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import dpcore as dp
from benchmarks.harness.figures import source, time_text
from benchmarks.harness.options import script_parser
from benchmarks.harness.shaped import on_hosts
from dpcore.base.link import parse_speed
from dpcore.ddp.compiled import torch_private, tracing
from dpcore.tools import hosts as namespaces
from dpcore.tools.compare.training.models import MODELS
from dpcore.tools.compare.training.ranks import (
    DEFAULT,
    SETTLING_STEPS,
    TORCH,
    TORCH_OVER_OURS,
    beside_gloo,
    wrapped,
)
from dpcore.tools.ratios import estimate, in_turn, of_slowest_rank, paired
from dpcore.tools.records import ROOT, keep, run_facts

CUT, LATE, ALONE = "cut", "late", " alone"
BARE, ANNOUNCED = "compiled alone", "announced alone"
OVER_GLOO = "gloo cut"
CONTENDERS = ("eager alone", BARE, ANNOUNCED, "eager", "compiled", LATE, CUT, "torch cut")
KINDS = {"torch cut": TORCH_OVER_OURS, OVER_GLOO: TORCH}  # of others than DataParallel
# Each is told an option of Inductor as it is anyway. Models of one class share code, so dynamo
# would run the graph of another contender if its options were the same.
UNLIKE = {
    BARE: "debug",
    ANNOUNCED: "fallback_random",
    "compiled": "cpp_wrapper",
    LATE: "inplace_buffers",
    CUT: "dce",
    "torch cut": "size_asserts",
    OVER_GLOO: "nan_asserts",
}
SHAPED = "shaped "
SETTLING = SETTLING_STEPS + 4  # steps in which graphs were compiled are not measured


class Model(torch.nn.Module):
    """dynamo skips the frames of torch's own modules, so torch DDP around one compiles nothing."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.module(x)
        return result


class Contender:
    """A model of its own, wrapped and compiled, after its first step."""

    def __init__(self, name: str, model: str, comm: Any) -> None:
        self.name = name
        torch.manual_seed(0)
        module, self.forward = MODELS[model]()
        self.module = Model(module)
        kind = KINDS.get(name, DEFAULT)
        self.model: Any = self.module if name.endswith(ALONE) else wrapped(kind, self.module, comm)
        self.run = self.model
        if not name.startswith("eager"):
            self.run = torch.compile(self.model, options=options_of(name))
        why = {"return_value": "the benchmark wants it so"} if name == CUT else {"wraps": _why_cut}
        self.backward_s = 0.0  # of all steps
        begin = time.perf_counter()
        of_dynamo = {"optimize_ddp": False} if name == LATE else {}
        with mock.patch.object(tracing, "why_cut", **why), torch._dynamo.config.patch(of_dynamo):
            self.step()
        self.first_s = time.perf_counter() - begin

    def step(self) -> None:
        self.module.zero_grad()
        loss = self.forward(self.run)
        begin = time.perf_counter()
        torch.autograd.backward(loss)
        self.backward_s += time.perf_counter() - begin

    def settle(self) -> None:
        for _ in range(SETTLING if isinstance(self.model, dp.DataParallel) else 4):
            self.step()

    def facts(self) -> dict[str, Any]:
        if not isinstance(self.model, dp.DataParallel):
            return {}
        return {
            "early": self.model._reducer.early_gradients,
            "gradients": len(self.model._parameters_by_number),
            "gradient_bytes": sum(p.nbytes for p in self.model._parameters_by_number),
            "graphs": self.model._graphs.count,
            "buckets": len(self.model.bucket_report()),
            "schedule": self.model.schedule,
        }


_why_cut = tracing.why_cut


def options_of(name: str) -> dict[str, Any]:
    option = UNLIKE[name]
    made = {option: getattr(configs()[0], option)}
    if name == ANNOUNCED:
        from dpcore.ddp.compiled.operations import AnnounceGradients, behind_producers

        made |= torch_private.options_of_passes(AnnounceGradients(), behind_producers)
    return made


def configs() -> tuple[Any, Any]:
    """Of Inductor and AOTAutograd: they cannot be pickled with this module."""
    import torch._functorch.config
    import torch._inductor.config

    return torch._inductor.config, torch._functorch.config


@beside_gloo
def measure(
    comm: Any, model: str, contenders: list[str], rounds: int, steps: int, folder: str
) -> dict[str, Any]:
    """On a rank: seconds per step, by contender and round."""
    torch.set_num_threads(1)
    of_inductor, of_aot = configs()
    of_inductor.force_disable_caches = True
    of_aot.enable_autograd_cache = False
    # Importing Inductor takes longer than to compile.
    torch.compile(torch.nn.functional.gelu)(torch.ones(4, requires_grad=True)).sum().backward()
    made = []
    for name in contenders:
        comm.barrier()
        made.append(Contender(name, model, comm))
    for contender in made:
        contender.settle()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    backwards: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for contender in in_turn(made, number):
            comm.barrier()
            contender.step()
            contender.backward_s, begin = 0.0, time.perf_counter()
            for _ in range(steps):
                contender.step()
            times[contender.name].append((time.perf_counter() - begin) / steps)
            backwards[contender.name].append(contender.backward_s / steps)
    facts = {one.name: one.facts() for one in made}
    first_s = {one.name: one.first_s for one in made}
    return {"times": times, "backwards": backwards, "first_s": first_s, "facts": facts}


def records(
    model: str, link: str, goodput: float | None, found: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    names = list(found[0]["times"])
    rounds = {name: of_slowest_rank(one["times"][name] for one in found) for name in names}
    backwards = {name: of_slowest_rank(one["backwards"][name] for one in found) for name in names}
    lines = []
    for name, times in rounds.items():
        step, first = statistics.median(times), max(one["first_s"][name] for one in found)
        line = {"model": model, "link": link, "world": len(found), "contender": name}
        line |= {"goodput_bytes_per_s": goodput} if goodput else {}
        line |= {"step_s": step, "first_step_s": first, "compile_s": first - step}
        alone = ("eager" if name == "eager" else "compiled") + ALONE
        if not name.endswith(ALONE) and alone in rounds:
            pairs = zip(times, rounds[alone], strict=True)
            line["exposed_s"] = asdict(estimate([mine - base for mine, base in pairs]))
        line["backward_s"] = statistics.median(backwards[name])
        peer = {ANNOUNCED: BARE, "compiled": LATE}.get(name)
        if peer in backwards:
            ratios = paired(backwards[name], backwards[peer])
            line["backward_ratio"] = {"to": peer, **asdict(ratios)}
        lines.append(line | found[0]["facts"][name] | {"rounds_s": times})
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    text = [f"{lines[0]['model']} over {lines[0]['link']}"]
    text.append(f"{'':16}{'step ms':>9}{'exposed ms':>12}{'':>18}{'compile s':>11}{'early':>9}")
    for line in lines:
        row = f"{line['contender']:16}{line['step_s'] * 1e3:>9.1f}"
        if exposed := line.get("exposed_s"):
            row += f"{exposed['median'] * 1e3:>12.1f}"
            row += f"{exposed['low'] * 1e3:>10.1f} - {exposed['high'] * 1e3:<5.1f}"
        else:
            row += f"{'':>30}"
        early = f"{line['early']}/{line['gradients']}" if "early" in line else "-"
        text.append(f"{row}{line['compile_s']:>11.1f}{early:>9}")
    for line in lines:
        if ratio := line.get("backward_ratio"):
            text.append(
                f"backward of {line['contender']}: {ratio['median']:.3f} ({ratio['low']:.3f} to "
                f"{ratio['high']:.3f}) of that of {ratio['to']}"
            )
    return "\n".join(text)


_NAMES = {
    "eager alone": "not compiled, no communication",
    BARE: "compiled, no communication",
    ANNOUNCED: "the same with operations that nobody hears",
    "eager": "`DataParallel(model)`, not compiled",
    "compiled": "`torch.compile(DataParallel(model))`",
    LATE: "the same without operations: all gradients at the end",
    CUT: "the same with graphs that are cut where buckets end",
    "torch cut": "torch DDP, compiled, whose graphs are cut",
    OVER_GLOO: "torch DDP over Gloo, the same",
}


def table_of_compiled(lines: list[dict[str, Any]]) -> str:
    """Of docs/compile.md: a table for each link."""
    text: list[str] = []
    for link in dict.fromkeys(line["link"] for line in lines):
        if link != "none":
            text += [*_table_of_link([line for line in lines if line["link"] == link]), ""]
    on_host = [line for line in lines if line["link"] == "none"]
    if ratio := next((o["backward_ratio"] for o in on_host if o["contender"] == "compiled"), None):
        what = (
            "Where there is no link, in the memory of a host, backward of the compiled model takes "
            f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}) of what it takes "
            "with all gradients at the end; medians of one run"
        )
        text += [source("compiled", on_host, "../", what), ""]
    return "\n".join(text)


def _table_of_link(lines: list[dict[str, Any]]) -> list[str]:
    text = [
        "| | step | exposed | backward | compiling |",
        "|---|---:|---:|---:|---:|",
    ]
    for line in lines:
        exposed = line.get("exposed_s")
        times = [line["step_s"], exposed and exposed["median"], line["backward_s"]]
        cells = [time_text(seconds) for seconds in times]
        cells.append("" if line["contender"].startswith("eager") else f"{line['compile_s']:.0f} s")
        text.append(f"| {_NAMES[line['contender']]} | {' | '.join(cells)} |")
    link = lines[0]["link"]
    over = f"on two hosts over real TCP, {link}" if _is_shaped(link) else f"over {link}"
    what = f"{lines[0]['model']}, 2 ranks {over}; medians of one run"
    return [*text, "", source("compiled", lines, "../", what), "", _bound(lines)]


def _is_shaped(link: str) -> bool:
    return link.startswith(SHAPED)


def _bound(lines: list[dict[str, Any]]) -> str:
    """Each of two ranks sends as many bytes as there are gradients."""
    of = {line["contender"]: line for line in lines}
    size, backward = of["compiled"]["gradient_bytes"], of[BARE]["backward_s"]
    goodput = lines[0].get("goodput_bytes_per_s")
    link = size / (goodput or parse_speed(lines[0]["link"]).bytes_per_second)
    return (
        f"The link takes {time_text(link)} for {size / 1e6:.1f} MB of gradients, and a compiled "
        f"backward without communication lasts {time_text(backward)}. So at least "
        f"{time_text(link - backward)} of the step are exposed, however early gradients leave."
    )


def arguments() -> argparse.Namespace:
    made = script_parser(__doc__)
    add = made.add_argument
    add("--model", default="transformer", choices=sorted(MODELS))
    add("--link", default="1gbit,50us",
        help='or none: memory of the host; or "shaped 1gbit" (%(default)s)')  # fmt: skip
    add("--contenders", default="", help=f"of {','.join(CONTENDERS)}; {OVER_GLOO}")
    add("--rounds", type=int, default=15)
    add("--steps-per-round", type=int, default=2)
    add("--records", type=Path, default=ROOT / "benchmarks/results/compiled.jsonl")
    options = made.parse_args()
    can = (*CONTENDERS, OVER_GLOO) if _is_shaped(options.link) else CONTENDERS
    options.contenders = options.contenders.split(",") if options.contenders else list(can)
    if unknown := set(options.contenders) - set(can):
        made.error(f"over {options.link} no {', '.join(unknown)}; choose from {', '.join(can)}")
    return options


def main() -> int:
    options = arguments()
    facts = run_facts(
        {"": {"torch": torch.__version__}},
        {"rounds": options.rounds, "steps": options.steps_per_round},
    )
    goodput = None
    asked = {
        "model": options.model, "contenders": options.contenders, "rounds": options.rounds,
        "steps": options.steps_per_round,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="dpcore-") as folder:
        asked["folder"] = folder
        if not _is_shaped(options.link):
            link = None if options.link == "none" else options.link
            found = dp.spawn(measure, 2, *asked.values(), timeout=900, link=link)
        elif reason := namespaces.why_not():
            print(f"compiled: {reason}", file=sys.stderr)
            return 1
        else:
            rate = options.link.removeprefix(SHAPED)
            bandwidth = parse_speed(rate).bytes_per_second
            found, goodput = on_hosts(measure, 2, rate, bandwidth, **asked)
    lines = records(options.model, options.link, goodput, found)
    keep(options.records, facts, lines)
    print(table(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
