"""The timeline as a PNG: the same lanes as on the page, for a text or a talk."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpcore.base.files import write_whole
from dpcore.base.markup import short
from dpcore.errors import Error, Unsupported
from dpcore.parallel.pipeline_costs import Action
from dpcore.recorder.file import LOCAL_STEP, Event
from dpcore.tools.show.buckets import BucketSpan, bucket_spans, pack_lanes
from dpcore.tools.show.figures import RunFigures, Step, exposed_of, figures_of, steps_of
from dpcore.tools.show.page import part
from dpcore.tools.show.pipelines import messages_of
from dpcore.tools.show.run import RankEvents, Run
from dpcore.tools.show.spans import PARTS_OF_MODELS, colour_of, legend_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The page's own, on a light ground.
_COLOURS = dict(re.findall(r"--(\w+): (#\w+)", part("style.css").partition("@media")[0]))
_MOST_ARROWS = 200
_TOUCHING = (*PARTS_OF_MODELS, LOCAL_STEP)  # spans that follow each other without a gap
_COMPUTE, _EXPOSED, _BUCKET, _GAP = 1.0, 0.55, 0.5, 0.55  # heights


def write_picture(path: Path, runs: Sequence[Run], steps: tuple[int, int] | None = None) -> None:
    """Draws the same step of each run under each other, a usual one, or the steps from the first to
    the last number (counted from 1). A run without steps is drawn whole."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Error("a picture needs matplotlib: pip install matplotlib") from None
    steps = steps or _usual_step(runs)
    windows = [window_of(run, steps) for run in runs]
    width_ms = max(end - begin for begin, end in windows) * 1e-6
    lanes = [
        [_buckets_within(run, rank, window) for rank in run.ranks]
        for run, window in zip(runs, windows, strict=True)
    ]
    heights = [sum(map(_height, of_ranks)) for of_ranks in lanes]  # so that bars are equally high
    figure = Figure(
        figsize=(11, 1.0 * len(runs) + 0.24 * sum(heights)), dpi=150, layout="constrained",
        facecolor="white",
    )  # fmt: skip
    axes = figure.subplots(len(runs), 1, squeeze=False, height_ratios=heights)[:, 0]
    for run, window, of_ranks, place in zip(runs, windows, lanes, axes, strict=True):
        _draw(place, run, window, of_ranks)
        place.set_xlim(-0.01 * width_ms, 1.01 * width_ms)
    axes[-1].set_xlabel("ms since the step began")
    _legend(figure, runs)
    image = io.BytesIO()
    figure.savefig(image, format=path.suffix.lstrip(".") or "png")
    write_whole(path, image.getvalue())


def _known_steps(run: Run) -> list[Step]:
    return next((found for rank in run.ranks if (found := steps_of(rank))), [])


def _usual_step(runs: Sequence[Run]) -> tuple[int, int]:
    """The step that takes the median time in the first run, among those that all runs have."""
    counts = [len(steps) for run in runs for rank in run.ranks if (steps := steps_of(rank))]
    known = _known_steps(runs[0])[: min(counts, default=0)]
    order = sorted(range(len(known)), key=lambda number: known[number][1] - known[number][0])
    number = order[len(order) // 2] + 1 if order else 1
    return number, number


def window_of(run: Run, steps: tuple[int, int]) -> Step:
    """From the first rank's begin of these steps to the last one's end: ranks may begin apart."""
    of_ranks = [known for rank in run.ranks if (known := steps_of(rank))]
    if not of_ranks:
        return 0, run.end_ns
    count = min(map(len, of_ranks))
    first, last = steps
    if not 1 <= first <= last <= count:
        raise Unsupported(f"--steps {first}:{last}: {run.path} has the steps 1 to {count}")
    begin = min(known[first - 1][0] for known in of_ranks)
    return begin, max(known[last - 1][1] for known in of_ranks)


def _height(lanes: Sequence[Any]) -> float:
    return _COMPUTE + _EXPOSED + _BUCKET * max(1, len(lanes)) + _GAP


def _draw(
    axes: Axes, run: Run, window: Step, lanes_of_ranks: Sequence[list[list[BucketSpan]]]
) -> None:
    begin, end = window
    top = 0.0
    ticks, names = [], []
    computing: dict[int, float] = {}  # where each rank's lane begins
    for rank, lanes in zip(run.ranks, lanes_of_ranks, strict=True):
        bottom = top + _GAP - _height(lanes)
        for left, right in zip(exposed_of(rank).begins, exposed_of(rank).ends, strict=True):
            if right > begin and left < end:
                _box(axes, window, left, right, bottom, top - bottom, "exposed", alpha=0.13)
        computing[rank.rank] = top
        for event in _drawn(_within(rank.compute, window)):
            edge = 0.7 if event.name.startswith(_TOUCHING) else 0.0
            colour = colour_of(event.name)
            _box(axes, window, event.begin_ns, event.end_ns, top - 0.9, 0.9, colour, edge=edge)
            _name_pass(axes, window, event, top - 0.45)
        for event in _within(rank.exposed, window):
            _box(axes, window, event.begin_ns, event.end_ns, top - 1.4, 0.36, "exposed")
        row = top - _COMPUTE - _EXPOSED
        for lane in lanes:
            row -= _BUCKET
            for span in lane:
                ready, launch = span.last_ready_ns, span.launch_ns
                _box(axes, window, span.first_ready_ns, launch, row + 0.14, 0.14, "filling")
                _box(axes, window, ready, launch, row + 0.14, 0.14, "full")
                colour = "gather" if span.phase == "all_gather" else "flight"
                _box(axes, window, launch, span.end_ns, row, 0.42, colour)
        ticks.append((top + bottom) / 2)
        names.append(f"rank {rank.rank}")
        top = bottom - _GAP
    _draw_messages(axes, run, window, computing)
    axes.set_ylim(top + _GAP - 0.2, 0.1)
    axes.set_yticks(ticks, names)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(f"{run.name}: {_title(figures_of(run))}", loc="left", fontsize=10.5)


def _drawn(events: list[Event]) -> list[Event]:
    """The layers within the passes of a pipeline would hide them: a picture has one row for all."""
    has_passes = any(Action.of(event.name) for event in events)
    return [e for e in events if not (has_passes and e.name.startswith(PARTS_OF_MODELS))]


def _name_pass(axes: Axes, window: Step, event: Event, middle: float) -> None:
    """F3 into the forward of micro-batch 3, and layers and blocks, where they are wide enough."""
    begin, end = window
    action = Action.of(event.name)
    text = f"{action.kind}{action.microbatch}" if action is not None else ""
    if event.name.startswith(PARTS_OF_MODELS):
        text = event.name.removesuffix(" back")
    inside = begin <= event.begin_ns and event.end_ns <= end
    if text and inside and event.end_ns - event.begin_ns > (end - begin) * max(2, len(text)) / 100:
        at = (event.begin_ns + event.end_ns) / 2 - begin
        axes.text(at * 1e-6, middle, text, color="white", fontsize=6.5, ha="center", va="center")


def _draw_messages(axes: Axes, run: Run, window: Step, computing: Mapping[int, float]) -> None:
    """Arrows from sends to the ends of their receives, unless they would be a thicket."""
    begin, end = window
    seen = [m for m in messages_of(run) if m.begin_ns >= begin and m.end_ns <= end]
    for message in seen if len(seen) <= _MOST_ARROWS else []:
        source, target = computing[message.source], computing[message.target]
        down = target < source
        axes.annotate(
            "",
            ((message.end_ns - begin) * 1e-6, target - (0 if down else 0.9)),
            ((message.begin_ns - begin) * 1e-6, source - (0.9 if down else 0)),
            arrowprops={"arrowstyle": "-|>,head_width=0.15,head_length=0.3", "lw": 0.6,
                        "color": "#4a5568", "shrinkA": 0, "shrinkB": 0},
        )  # fmt: skip


def _title(figures: RunFigures) -> str:
    if figures.pipeline is not None:
        return figures.pipeline.headline
    if figures.step_ms is None or figures.overlap is None:
        return figures.headline
    exposed, _ = figures.shown_ms
    return f"{short(exposed)} ms of communication exposed in a step of {short(figures.step_ms)} ms"


def _buckets_within(run: Run, rank: RankEvents, window: Step) -> list[list[BucketSpan]]:
    """Buckets in lanes; operations that are none, as if they were."""
    spans = bucket_spans(run, rank)
    of_buckets = {span.operation for span in spans}
    spans += [
        BucketSpan(-1, e.bytes, e.begin_ns, e.begin_ns, e.begin_ns, e.end_ns, e)
        for e in rank.operations
        if e.operation not in of_buckets
    ]
    begin, end = window
    seen = [span for span in spans if span.end_ns > begin and span.first_ready_ns < end]
    seen.sort(key=lambda span: span.first_ready_ns)
    lanes: list[list[BucketSpan]] = []
    for span, lane in zip(seen, pack_lanes(seen), strict=True):
        lanes += [[] for _ in range(lane + 1 - len(lanes))]
        lanes[lane].append(span)
    return lanes


def _within(events: Iterable[Event], window: Step) -> list[Event]:
    begin, end = window
    return [event for event in events if event.end_ns > begin and event.begin_ns < end]


def _box(
    axes: Axes, window: Step, left: int, right: int, bottom: float, height: float, colour: str,
    alpha: float = 1.0, edge: float = 0.0,
) -> None:  # fmt: skip
    begin, end = window
    left, right = max(left, begin), min(right, end)
    if right > left:
        axes.broken_barh(
            [((left - begin) * 1e-6, (right - left) * 1e-6)], (bottom, height),
            facecolor=_COLOURS[colour], alpha=alpha, linewidth=edge, edgecolor="white",
        )  # fmt: skip


def _legend(figure: Any, runs: Sequence[Run]) -> None:
    from matplotlib.patches import Patch

    texts = legend_of(runs)
    del texts["wait"]  # which a picture does not draw
    handles = [Patch(color=_COLOURS[name], label=text) for name, text in texts.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
