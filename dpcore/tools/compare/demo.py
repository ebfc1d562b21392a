"""The first thing to run, `dpcore demo`: torch DDP and dpcore train the same model.

A transformer learns to write like Alice in Wonderland on two ranks, with torch DDP over Gloo and
with dpcore in turn, both with default buckets and torch with gradient_as_bucket_view=True, its
faster way: within this machine, and over a link of 1 Gbit/s, between two network namespaces where
the system lets us make them. Elsewhere the link is an emulated
one, which Gloo knows nothing of: torch's buckets then travel over dpcore's communicator. Over the
link dpcore trains once more, with communication under the next forward. Where there are GPUs, on
them first: over NCCL with two or more, else both ranks on the one. Then: what of the
communication is exposed, how long does a step take, do the losses coincide; who won, by how much,
and why.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dpcore.base.markup import short
from dpcore.tools import hosts as namespaces
from dpcore.tools.compare.demo_verdict import Verdict, behind, ending, goes_on, means, verdict
from dpcore.tools.compare.devices import BACKENDS, gpus, kind_of_gpus, note_on
from dpcore.tools.compare.training.ranks import ALONE, DEFAULT, TORCH_OVER_OURS
from dpcore.tools.compare.training.start import RankFailed, run_job, shaped_hosts
from dpcore.tools.compare.training.worker import Job
from dpcore.tools.ratios import of_slowest_rank
from dpcore.tools.show import figures_of, read_run, write_page, write_picture
from dpcore.tools.show.run import Run

RATE, BURST, EMULATED = "1gbit", "128kb", "1gbit,50us"
CONTENDERS = ("torch", DEFAULT)  # each with its default buckets
PACED_CONTENDERS = (TORCH_OVER_OURS, DEFAULT)
ACROSS = "dpcore zero1"  # over a link there is something to hide under the next forward


@dataclass(frozen=True)
class Scene:
    """One network and the contenders that train over it."""

    name: str
    title: str
    contenders: tuple[str, ...]
    shaped: bool = False
    link: str = ""
    device: str = "cpu"

    def init(self) -> dict[str, Any]:
        """Options of ``dpcore.init`` for the ranks."""
        if self.device == "cuda":
            return {"backend": BACKENDS[kind_of_gpus(2)]}
        if self.shaped:
            return {"transport": "tcp"}
        return {"link": self.link} if self.link else {}


def scenes() -> list[Scene]:
    near = Scene("machine", "within this machine", CONTENDERS)
    if namespaces.why_not():
        title = f"over an emulated link of {EMULATED}"
        far = Scene("link", title, (*PACED_CONTENDERS, ACROSS), link=EMULATED)
    else:
        title = "between two network namespaces, 1 Gbit/s"
        far = Scene("link", title, (*CONTENDERS, ACROSS), shaped=True)
    return [*gpu_scenes(), near, far]


def gpu_scenes() -> list[Scene]:
    count = gpus()
    if count == 0:
        return []
    title = "on two GPUs, over NCCL" if count > 1 else "both ranks on one GPU, torch DDP over Gloo"
    return [Scene("gpu", title, CONTENDERS, device="cuda")]


def train(scene: Scene, rounds: int, steps: int, folder: Path, console: Console) -> dict[str, Any]:
    job = Job(
        "text", [*scene.contenders, ALONE], rounds, steps, str(folder.resolve()), init=scene.init(),
        device=scene.device,
    )  # fmt: skip
    columns = TextColumn("{task.description:22}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        total = rounds * steps
        names = {name: name for name in scene.contenders} | {ALONE: "no communication"}
        bars = {name: progress.add_task(text, total=total) for name, text in names.items()}

        def on_line(line: dict[str, Any]) -> None:
            if "step" in line:
                progress.advance(bars[line["step"]])

        if not scene.shaped:
            return run_job(job, on_line)
        with shaped_hosts(RATE, BURST) as hosts:
            return run_job(job, on_line, hosts)


def step_ms(result: dict[str, Any], name: str) -> float:
    """The median of the slowest rank's steps."""
    return statistics.median(of_slowest_rank(result["seconds"][name])) * 1e3


def losses(result: dict[str, Any], name: str) -> list[float]:
    """The loss of the whole batch in each step: the mean over ranks."""
    return [statistics.mean(pair) for pair in zip(*result["losses"][name], strict=True)]


def tell(
    scene: Scene, result: dict[str, Any], folder: Path, console: Console, steps: int = 1
) -> Verdict:
    """Table, page and picture of a scene, and its winner."""
    paths = {name: folder / f"{name.replace(' ', '-')}.json" for name in scene.contenders}
    # Of torch DDP on a GPU there is none.
    runs = {name: read_run(path) for name, path in paths.items() if path.exists()}
    table = Table(box=None)
    for column in ("", "exposed ms", "step ms", "loss at the end"):
        table.add_column(column, justify="right" if column else "left")
    exposed = {name: figures_of(run).shown_ms[0] for name, run in runs.items()}
    for name in scene.contenders:
        waited = short(exposed[name]) if name in runs else "–"
        last = statistics.mean(losses(result, name)[-10:])
        table.add_row(name, waited, short(step_ms(result, name)), f"{last:.3f}")
    if ALONE in result["seconds"]:
        table.add_row("no communication", "", short(step_ms(result, ALONE)), "")
    first, *others = (losses(result, name) for name in scene.contenders)
    apart = max(abs(a - b) for other in others for a, b in zip(first, other, strict=True))
    same = f"losses differ by at most {apart:.1g} in {len(first)} steps"
    torchs, ours = scene.contenders[:2]
    won = verdict(scene.title, result, torchs, ours, steps)
    choice = (result.get("choices", {}).get(ours) or [None])[-1]
    both = (exposed[ours], exposed[torchs]) if {torchs, ours} <= set(exposed) else None
    is_link = scene.shaped or bool(scene.link)
    by_nccl = scene.init().get("backend") == "nccl"
    said = [won.said, means(choice, is_link, by_nccl), *behind(won, both, choice)]
    if ACROSS in scene.contenders:
        said.append(goes_on(*(verdict("", result, one, ACROSS, steps) for one in (torchs, ours))))
    page, picture, kept = (folder / name for name in ("timeline.html", "timeline.png", "table.txt"))
    afterwards = ours if choice is not None and choice["schedule"] == "sequential" else ""
    write_page(page, [_beside_rounds(runs[name], result, name, afterwards) for name in runs])
    if can_draw := find_spec("matplotlib") is not None:
        write_picture(picture, list(runs.values()))
    with kept.open("w", encoding="utf-8") as file:
        for where in (console, Console(file=file, width=100, highlight=False)):
            where.print(table)
            where.print(same)
            for sentence in filter(None, said):
                where.print(sentence, markup=False)
    drawn = f"picture {picture}" if can_draw else "no picture (it needs matplotlib)"
    console.print(f"page {page}, {drawn}, table {kept}\n", soft_wrap=True)
    return won


def _beside_rounds(run: Run, result: dict[str, Any], name: str, afterwards: str) -> Run:
    """With what the page has to say of a trace that lies beside the table. ``afterwards``: the
    contender that sends after backward."""
    about = (
        "of three traces made after the rounds, the one whose step is nearest to the rounds' "
        f"median, {short(step_ms(result, name))} ms"
    )
    if name == afterwards:
        about += (
            ". It sends after backward: its ranks compute on the processors that would communicate "
            "meanwhile, so there is nothing to hide communication under"
        )
    return replace(run, about=about)


def run(options: argparse.Namespace) -> int:
    """Trains in every scene, and says what came of it."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 100
    begin, failed = time.monotonic(), False
    verdicts = []
    for scene in scenes():
        folder = options.out / scene.name
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.json"):
            old.unlink()
        console.print(scene.title, style="bold")
        if scene.device == "cuda":
            for note in filter(None, [note_on(kind_of_gpus(2), 2)]):
                console.print(note, markup=False)
        if scene.link:
            console.print(f"A real one {namespaces.why_not()}.")
            console.print(
                "This one slows down dpcore only, so torch DDP sends its buckets over it."
            )
        try:
            result = train(scene, options.rounds, options.steps_per_round, folder, console)
        except RankFailed as problem:
            console.print(f"left out, since a rank failed: {problem}", markup=False)
            failed = True
            continue
        verdicts.append(tell(scene, result, folder, console, options.steps_per_round))
    others = "dpcore compare all_reduce, and dpcore compare for your own model"
    console.print(f"{time.monotonic() - begin:.0f} s. Next: {others}")
    console.print(ending(verdicts), markup=False)
    return 1 if failed else 0
