"""``dpcore compare``: a model's contenders, or a collective beside the libraries that have it."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console

from dpcore.errors import Unsupported
from dpcore.tools import argument_types
from dpcore.tools import hosts as namespaces
from dpcore.tools.compare.arguments import add_arguments, check_fitting
from dpcore.tools.compare.collectives.cells import COLLECTIVES

_BARE = "transformer"
_OWN = """
To compare your own model:
  dpcore compare --example > my.py        a model and a step, to edit
  dpcore compare my.py:make"""


def run(options: argparse.Namespace) -> int:
    """Does what the command line asks for; the exit status."""
    if options.example:
        print((resources.files("dpcore.tools.compare") / "example.txt").read_text("utf-8"), end="")
        return 0
    is_collective = options.what == "all" or options.what in COLLECTIVES
    check_fitting(options, is_collective)
    if is_collective:
        from dpcore.tools.compare.collectives import command

        return command.run(options)
    return _compare_models(options)


def _compare_models(options: argparse.Namespace) -> int:
    import torch

    from dpcore.tools import records
    from dpcore.tools.compare.grid import best_of, write_grid
    from dpcore.tools.compare.output import WIDEST, tell, write_csv, write_jsonl, write_rounds_csv
    from dpcore.tools.compare.output import records as records_of
    from dpcore.tools.compare.page import write_page
    from dpcore.tools.compare.picture import write_picture
    from dpcore.tools.compare.running import measure
    from dpcore.tools.compare.store import Store
    from dpcore.tools.compare.training.start import RankFailed

    console = Console(highlight=False, stderr=options.json)
    if not console.is_terminal:
        console.width = WIDEST
    plan = plan_of(options)
    folder: Path = options.out or Path("compare") / folder_name(plan.model)
    identity = plan.identity() | {"torch": torch.__version__, "dpcore": records.code()}
    store = Store(folder / "rounds.jsonl", identity | {"machine": records.machine()["cpu"]})
    keys = [cell.key for cell in plan.cells]
    if store.is_complete(keys, plan.rounds):
        store.begin_anew()
    elif store.begun:
        whole = plan.rounds * len(keys)
        console.print(
            f"continuing: {store.begun} of {whole} rounds are in {folder}", soft_wrap=True
        )
    store.open()
    try:
        measure(plan, store, console)
    except KeyboardInterrupt:
        done = f"{store.begun} of {plan.rounds * len(keys)} rounds are in {folder}"
        print(f"interrupted; {done}, and the same command continues from there", file=sys.stderr)
        return 128 + signal.SIGINT
    except RankFailed as problem:
        died = "a rank failed:\n" if "Traceback" in str(problem) else ""
        print(f"dpcore compare: {died}{problem}", file=sys.stderr)
        return 1
    finally:
        store.close()
    outcomes = [outcome_of(plan, cell, store) for cell in plan.cells]
    facts = records.run_facts(
        {"": {"torch": torch.__version__}},
        {
            "rounds": plan.rounds,
            "seconds": plan.seconds,
            "threads": plan.threads,
            "optimizer": plan.optimizer,
            "device": plan.device,
            "amp": plan.amp,
            "tuning": identity["tuning"],
        },
    )
    lines = records_of(plan.model, facts, outcomes)
    write_jsonl(folder / "compare.jsonl", lines)
    write_csv(folder / "compare.csv", plan.model, outcomes)
    write_rounds_csv(folder / "rounds.csv", plan.model, outcomes)
    write_page(folder / "compare.html", plan.model, facts, outcomes)
    pictured = write_picture(folder / "compare.png", plan.model, outcomes)
    if options.grid is not None:
        write_grid(folder / "grid.png", plan.model, outcomes)
    if options.json:
        for line in lines:
            print(json.dumps(line))
        return 0
    for outcome in outcomes:
        tell(console, outcome)
    if options.grid is not None:
        console.print("\nthe grid", style="bold")
        for outcome in outcomes:
            console.print(f"* {best_of(outcome)}", markup=False, soft_wrap=not console.is_terminal)
    drawn = ["compare.png and .svg", *["grid.png and .svg"] * (options.grid is not None)]
    beside = drawn * pictured + ["compare.csv, rounds.csv and compare.jsonl"]
    console.print(
        f"\nthe page: {folder}/compare.html; beside it {', '.join(beside)}", soft_wrap=True
    )
    if not pictured:
        console.print("for a picture as well: pip install matplotlib", style="dim")
    if not options.what:
        console.print(_OWN, highlight=False)
    return 0


def plan_of(options: argparse.Namespace) -> Any:
    """The plan, or an Error that says what to write instead."""
    from dpcore.tools.compare import plan
    from dpcore.tools.compare.devices import check_device, gpus

    on_gpu = options.device == "cuda"
    check_device(options.device)
    worlds, links, names = options.world, options.link, options.contenders
    worlds = worlds or [gpus() if on_gpu else 2]
    if options.grid is not None:
        _check_alone(options)
        worlds, links, names = options.grid.worlds, options.grid.links, options.grid.contenders
    if any(links) and on_gpu:
        raise Unsupported(
            f"--link {next(filter(None, links))}: links are slowed down for ranks on the CPU; with "
            "--device cuda they go over what connects the GPUs"
        )
    if any(links) and min(worlds) < 2:
        raise Unsupported(f"--link {next(filter(None, links))}: one rank sends nothing over a link")
    if options.emulated and not any(links):
        raise Unsupported("--emulated: there is no link to emulate; write --link 1gbit as well")
    cells = [
        plan.Cell(link, kind_of(link, options, world), world) for link in links for world in worlds
    ]
    model = plan.model(options.what or _BARE)
    contenders = plan.contenders(names)
    if any(cell.kind == "emulated" for cell in cells):
        for one in contenders:
            one.over_dpcore()  # or an Error
    trains = any(one.kind.trains for one in contenders)
    return plan.Plan(
        model=model,
        contenders=tuple(contenders),
        optimizer=options.optimizer or ("adamw" if trains else ""),
        cells=tuple(cells),
        rounds=argument_types.rounds_of(options),
        seconds=options.seconds or (0.1 if options.quick else 0.3),
        threads=options.threads or max(1, len(os.sched_getaffinity(0)) // max(worlds)),
        device=options.device,
        amp=options.amp,
    )


def _check_alone(options: argparse.Namespace) -> None:
    """Raises where the grid and another option would say the same twice."""
    usual = argparse.ArgumentParser(add_help=False)
    add_arguments(usual)
    named = ("link", "world", "contenders")
    twice = [it for it in named if getattr(options, it) != getattr(usual.parse_args([]), it)]
    if twice:
        raise Unsupported(f"--{twice[0]}: --grid names links, worlds and contenders already")


def kind_of(link: str, options: argparse.Namespace, world: int) -> str:
    if options.device == "cuda":
        from dpcore.tools.compare.devices import kind_of_gpus

        return kind_of_gpus(world)
    if not link:
        return "machine"
    if options.emulated or namespaces.why_not():
        return "emulated"
    if "," in link:
        raise Unsupported(
            f"--link {link}: the kernel shapes the rate of hosts in network namespaces; latency, "
            "jitter and loss are for links that dpcore emulates: --emulated"
        )
    return "hosts"


def folder_name(model: str) -> str:
    return re.sub(r"\W+", "-", model.replace(".py", "")).strip("-")


def outcome_of(plan: Any, cell: Any, store: Any) -> Any:
    from dpcore.tools.compare.figures import figures_of
    from dpcore.tools.compare.output import Outcome
    from dpcore.tools.compare.training.ranks import ALONE

    entrants = plan.entrants(cell)
    result = store.results.get(cell.key, {})
    losses = result.get("losses") if plan.optimizer else None
    memory = {name: size / 2**20 for name, size in result.get("memory", {}).items() if size}
    rounds = store.rounds[cell.key][: plan.rounds]
    figures = figures_of(entrants, rounds, losses, memory, sends=cell.world > 1)
    return Outcome(cell, figures, notes_of(plan, cell, result), plan.optimizer, memory.get(ALONE))


def notes_of(plan: Any, cell: Any, result: dict[str, Any]) -> list[str]:
    """What a reader has to know to judge the figures."""
    from dpcore.tools.compare.devices import note_on

    notes = []
    if about := note_on(cell.kind, cell.world):
        notes.append(about)
    if plan.amp:
        notes.append("Steps run under torch.autocast in bfloat16, for all contenders.")
    if plan.device == "cuda":
        notes.append(
            "Memory is the most that torch had allocated on a rank for a contender (weights, "
            "gradients, buckets, the optimizer's state, and what a step needs for a while), and "
            "mapped buckets. A library's own buffers are not in it."
        )
    if plan.optimizer:
        notes.append(
            f"Every step includes that of the optimizer, {plan.optimizer}, for all contenders and "
            f"without communication. Losses are those of the last round, after "
            f"{result.get('taken', 0)} steps from the same weights."
        )
    if plan.every > 1:
        notes.append(
            f"A round has a multiple of {plan.every} steps, in which all ranks agree at least once."
        )
    if any(one.is_recipe for one in plan.contenders):
        notes.append("A function of yours may send what it likes: only its whole step is compared.")
    if cell.kind == "emulated":
        why = namespaces.why_not() or "was not asked for (--emulated)"
        notes.append(
            f"A real link {why}. This one slows down dpcore's messages only, so torch DDP "
            "sends its buckets through dpcore here: reducers and schedules are compared, not Gloo."
        )
    if unused := result.get("unused"):
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        notes.append(
            f"{unused[0]}{more} got no gradient: all contenders have find_unused_parameters=True."
        )
    cores = len(os.sched_getaffinity(0))
    if cell.world > cores and plan.device == "cpu":
        notes.append(f"{cell.world} ranks share {cores} cores, so computing alone waits as well.")
    for one in plan.entrants(cell):
        before, after = (result.get("choices", {}).get(one.inner) or [None, None])[:2]
        if before is not None and one.inner.split()[1:] in ([], ["auto"]):
            notes.append(f"{one.name}: {_chosen(before)}.")
        if before and after and any(before[key] != after[key] for key in after if key != "said"):
            notes.append(f"{one.name} changed its buckets after the warm-up: more rounds help.")
    return notes


def _chosen(choice: dict[str, Any]) -> str:
    sizes: Sequence[int] = choice["bucket_bytes"]
    ends = [_mib(size) for size in dict.fromkeys((min(sizes), max(sizes)))]
    buckets = f"{len(sizes)} buckets" if len(sizes) > 1 else "one bucket"
    schedule = choice["schedule"]
    return f"the first steps chose the schedule {schedule}, {buckets} of {' to '.join(ends)} MiB"


def _mib(nbytes: int) -> str:
    size = nbytes / 2**20
    return f"{size:.0f}" if size >= 10 else f"{size:.2g}"
