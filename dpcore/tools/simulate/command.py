"""``dpcore simulate run.json --link 1gbit,50us``: a table of predictions."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from dpcore.base.files import write_whole
from dpcore.base.link import parse_speed
from dpcore.base.markup import short
from dpcore.base.user_code import is_own, loaded, names_code
from dpcore.errors import Unsupported
from dpcore.reference import algorithms_of
from dpcore.reference.launches import ACROSS_STEPS, CAPPED, SCHEDULES
from dpcore.tools.argument_types import name_and_cap
from dpcore.tools.simulate.choice import AUTO
from dpcore.tools.simulate.control import name_of
from dpcore.tools.simulate.gradients import Gradients, gradients_of
from dpcore.tools.simulate.graphs import is_graph, predict_graphs, read_graphs
from dpcore.tools.simulate.links import Links
from dpcore.tools.simulate.local_updates import LocalUpdates
from dpcore.tools.simulate.measured import (
    csv_of,
    measured_of,
    read_measured,
)
from dpcore.tools.simulate.plan import Hook
from dpcore.tools.simulate.plot import page
from dpcore.tools.simulate.processors import Processors, calibrated
from dpcore.tools.simulate.questions import (
    Asked,
    Interval,
    candidates,
    interval,
    is_extrapolated,
    on_ranks,
    ranks_tried,
    until,
)
from dpcore.tools.simulate.recording import Recording
from dpcore.tools.simulate.stragglers import Stragglers
from dpcore.tools.simulate.training import Prediction, alone_seconds, predict

LOCAL = "local"
DEFAULT_SCHEDULES = (
    "bucketed", "sequential", "per_parameter", "flat", "priority", "dear", "zero1", "zero2",
)  # fmt: skip
_SHOWN = 10  # of the best
_PRINTED = Path("-")
_ALIKE = 0.02  # computing of two runs
# Said beside every prediction.
NOT_MODELLED = "memory bandwidth that ranks of a host share; other jobs on the network"


def run(options: argparse.Namespace) -> int:
    """Predicts and prints; the exit status."""
    _refuse_what_would_do_nothing(options)
    on_hosts = options.ranks_per_host > 1
    options.algorithm = options.algorithm or ["hierarchical" if on_hosts else "two_shot"]
    if any(map(is_graph, options.gradients)):
        return _run_graphs(options)
    recorded = gradients_of(*options.gradients)
    if options.best and recorded.updates:
        raise Unsupported(
            f"--best compares schedules of gradients, and {options.gradients[0]} has none: it is a "
            "recording of local updates. Name local:16 and the like in --schedule"
        )
    for name in options.algorithm:
        if not is_own(name) and name not in (AUTO, *algorithms_of("all_reduce")):
            known = ", ".join((*algorithms_of("all_reduce"), AUTO))
            raise Unsupported(
                f"--algorithm {name}: choose from {known}, or write file.py:function or plan.xml"
            )
    calibration = options.calibration and calibrated(options.calibration)
    processors = calibration.processors if calibration else Processors.free()
    stragglers = stragglers_of(options.straggler) if options.straggler else Stragglers()
    hook = hook_of(options.hook) if options.hook else None
    measured = read_measured(options.measured) if options.measured else []
    asked = [
        Asked(*_schedule_and_cap(text, recorded), algorithm)
        for text in options.schedule or _schedules_for(recorded, hook)
        for algorithm in options.algorithm[: 1 if text == "oracle" else None]
    ]

    def predicted(
        one: Asked,
        work: Gradients,
        links: Links,
        costs: Processors = processors,
        told: Recording | None = None,
    ) -> Prediction:
        return predict(
            work, links, one.schedule, one.bucket_cap_mb, one.algorithm, costs, stragglers, hook,
            told,
        )  # fmt: skip

    lines: list[dict[str, Any]] = []
    given = _links_of(options)
    if options.html:
        world = (options.world or [max(2, recorded.world)])[0]
        options.html.write_text(page(recorded, *given[0], world, asked, predicted, measured))
    if options.page:
        _write_page(options, recorded, given[0][1], asked[0], predicted)
    for words, links in given:
        if options.until is not None:
            lines += [_until(options, recorded, words, links, one, predicted) for one in asked]
            continue
        for world in options.world or [max(2, recorded.world)]:
            work = on_ranks(recorded, world)
            found = [
                (one, predicted(one, work, links))
                for one in (candidates(work, links, hook is not None) if options.best else asked)
            ]
            if options.best:
                found = _different(sorted(found, key=lambda pair: pair[1].step_ms))
            ranges = [
                interval(work, links, one, partial(predicted, question), processors)
                for question, one in (found[:_SHOWN] if options.best else found)
            ]
            predictions = [one for _, one in found][: len(ranges)]
            besides = [
                was.beside(one.step_ms)
                if (was := measured_of(measured, question, world, links))
                else {}
                for question, one in found[: len(ranges)]
            ]
            for one, within, beside in zip(predictions, ranges, besides, strict=True):
                facts = {"link": words, "world": world, "extrapolated": is_extrapolated(world)}
                facts |= {"low_ms": within.low_ms, "high_ms": within.high_ms}
                facts |= {"interval": within.source, "not_modelled": NOT_MODELLED}
                facts |= {"unknown": recorded.unknown}
                lines.append(facts | asdict(one) | beside)
            if not options.json and options.csv != _PRINTED:
                _tell(work, words, predictions, ranges, besides)
                _tell_of_measured(options, besides, alone_seconds(work) * 1e3)
    if options.csv is not None:
        _write_csv(options.csv, csv_of(lines, bool(measured)))
    if options.json:
        json.dump(lines, sys.stdout, indent=1)
        print()
    return 0


def _schedules_for(recorded: Gradients, hook: Hook | None) -> Sequence[str]:
    """All that can be predicted, where none is named."""
    if recorded.updates:
        return [LOCAL]
    return [name for name in DEFAULT_SCHEDULES if hook is None or name not in ACROSS_STEPS]


def _refuse_what_would_do_nothing(options: argparse.Namespace) -> None:
    """Before an option gets its default."""
    if options.until is not None:
        for name in ("best", "world", "csv", "measured"):
            if getattr(options, name):
                raise Unsupported(f"--{name} is for predictions, and --until asks for ranks")
    if options.best:
        for name in ("schedule", "algorithm"):
            if getattr(options, name):
                raise Unsupported(f"--{name} says what to predict, and --best tries all")
    if options.json and options.csv == _PRINTED:
        raise Unsupported("--json and --csv - both print: leave one out")


def _write_csv(path: Path, text: str) -> None:
    if path == _PRINTED:
        sys.stdout.write(text)
    else:
        write_whole(path, text)


def _tell_of_measured(
    options: argparse.Namespace, besides: Sequence[dict[str, float]], alone_ms: float
) -> None:
    """What a reader has to know of the errors in the table."""
    if options.measured is None:
        return
    found = [beside["alone_ms"] for beside in besides if beside]
    print(f"{len(found)} of {len(besides)} were measured in {options.measured}.", end=" ")
    if not found:
        print("The others differ in schedule, size of buckets, ranks or link.")
        return
    print("An error of +2% is a prediction that is 2% too long.")
    apart = [measured for measured in found if abs(alone_ms / measured - 1) > _ALIKE]
    if apart:
        print(
            f"Computing alone took {short(apart[0])} ms where they were measured, and "
            f"{short(alone_ms)} ms in the recording: errors include that difference."
        )


def _run_graphs(options: argparse.Namespace) -> int:
    """Chakra's traces, instead of a recorded run."""
    for name in ("html", "page", "until", "best", "straggler", "hook", "csv", "measured"):
        if getattr(options, name):
            raise Unsupported(f"--{name} is for a recorded run, and {options.gradients[0]} is none")
    graphs = read_graphs(options.gradients)
    of_files = len(graphs) if len(graphs) > 1 else 2
    calibration = options.calibration and calibrated(options.calibration)
    processors = calibration.processors if calibration else Processors.free()
    lines = []
    for words, links in _links_of(options):
        for world in options.world or [of_files]:
            if len(graphs) > 1 and world != len(graphs):
                raise Unsupported(f"--world {world}: there are traces of {len(graphs)} ranks")
            for algorithm in options.algorithm:
                one = predict_graphs(graphs, world, links, algorithm, processors)
                lines.append({"link": words, **asdict(one), "exposed_ms": one.exposed_ms})
                if not options.json:
                    print(
                        f"{one.collectives} collectives of {one.nbytes / 2**20:.1f} MiB by "
                        f"{one.algorithm} on {world} ranks, link {words}: "
                        f"{short(one.total_ms)} ms, of which {short(one.compute_ms)} ms computing"
                    )
    if options.json:
        json.dump(lines, sys.stdout, indent=1)
        print()
    return 0


def _write_page(
    options: argparse.Namespace,
    recorded: Gradients,
    links: Links,
    one: Asked,
    predicted: Callable[..., Prediction],
) -> None:
    """Of the first schedule, by the first algorithm, over the first link, on the first world."""
    if isinstance(one.schedule, LocalUpdates):
        raise Unsupported("--page shows buckets, and local updates send none: name a schedule")
    world = (options.world or [max(2, recorded.world)])[0]
    told = Recording()
    predicted(one, on_ranks(recorded, world), links, told=told)
    told.write_page(options.page)


def _different(found: Sequence[tuple[Asked, Prediction]]) -> list[tuple[Asked, Prediction]]:
    """Without those whose size of buckets makes the same buckets as another one's."""
    by_buckets = {(one.schedule, one.algorithm, one.buckets): (q, one) for q, one in found[::-1]}
    return list(by_buckets.values())[::-1]


def _links_of(options: argparse.Namespace) -> list[tuple[str, Links]]:
    """In words, and what they mean."""
    levels = options.intra, options.inter
    if bool(options.link) == any(levels):
        raise Unsupported("a prediction is for --link 1gbit,50us, or for --intra and --inter")
    if options.link:
        if "" in options.link:
            raise Unsupported("--link none: a prediction is for a link, such as 1gbit,50us")
        if options.ranks_per_host > 1 or options.oversubscribed > 1:
            raise Unsupported("--ranks-per-host and --oversubscribed go with --intra and --inter")
        return [(link, Links.of(parse_speed(link))) for link in options.link]
    if not all(levels):
        raise Unsupported("--intra is the link within a host, --inter between hosts: write both")
    intra, inter = map(parse_speed, levels)
    links = Links.levels(intra, inter, options.ranks_per_host, options.oversubscribed)
    words = f"{options.intra} in hosts of {options.ranks_per_host}, {options.inter} between them"
    if options.oversubscribed > 1:
        words += f", switches oversubscribed {options.oversubscribed:g} times"
    return [(words, links)]


def _until(
    options: argparse.Namespace,
    recorded: Gradients,
    words: str,
    links: Links,
    one: Asked,
    predicted: Callable[[Asked, Gradients, Links], Prediction],
) -> dict[str, Any]:
    """How many ranks keep the efficiency, told and as facts."""
    is_local = isinstance(one.schedule, LocalUpdates)
    name = one.schedule.name if is_local else one.schedule
    name = name if isinstance(name, str) else name_of(name)
    most, powers = ranks_tried(links, one.algorithm, bool(options.straggler))
    found = until(
        recorded,
        options.until,
        lambda world: predicted(one, on_ranks(recorded, world), links).step_ms,
        most,
        powers,
        links.ranks_per_host,
    )
    alone_ms = alone_seconds(recorded) * 1e3
    if not options.json:
        kept = f"{options.until:.0%} of each rank's speed"
        said = f"keeps {kept} up to {found.world} ranks"
        if not found.world:
            said = f"does not keep {kept} on 2 ranks"
        if found.world == most:
            said += " and maybe more"
        if is_extrapolated(found.world):
            said += " (extrapolated)"
        print(f"{name} by {one.algorithm} over {words} {said}")
        for world, ms in found.steps:
            print(f"  {world:>5} ranks  {short(ms):>8} ms  {alone_ms / ms:.0%}")
    return {
        "link": words,
        "schedule": name,
        "algorithm": one.algorithm,
        "efficiency": options.until,
        "world": found.world,
        "most": most,
        "extrapolated": is_extrapolated(found.world),
        "steps": [{"world": world, "step_ms": ms} for world, ms in found.steps],
    }


def _schedule_and_cap(text: str, recorded: Gradients) -> tuple[Any, float | None]:
    if text == LOCAL and recorded.updates:
        return LocalUpdates.of(recorded), None
    if text.partition(":")[0] == LOCAL:
        (every,) = numbers(text.partition(":")[2], "--schedule local:16", 1, int)
        return LocalUpdates.of(recorded, every), None
    name, cap = name_and_cap(text, (*SCHEDULES, *ACROSS_STEPS))
    if cap == "auto":
        raise Unsupported(f"--schedule {text}: a prediction needs a size in MiB, such as {name}:25")
    return named_or_own(name), float(cap) if cap else None


def _tell(
    work: Gradients,
    link: str,
    predictions: Sequence[Prediction],
    ranges: Sequence[Interval],
    besides: Sequence[dict[str, float]],
) -> None:
    nbytes = sum(work.sizes)
    bound_ms = min(one.bound_ms for one in predictions)
    what = "parameters" if work.updates else "gradients"
    print(
        f"{len(work.sizes)} {what} of {nbytes / 2**20:.1f} MiB, {work.world} ranks, "
        f"link {link}. As recorded, {_who_computes(work)} at least "
        f"{short(alone_seconds(work) * 1e3)} ms; with communication over this link no "
        f"step is shorter than {short(bound_ms)} ms"
    )
    if is_extrapolated(work.world):
        print("Extrapolated: no run on more than 8 ranks was compared with its prediction.")
    if work.unknown:
        print(f"Not in the recording: {'; '.join(work.unknown)}.")
    print(f"Interval from {ranges[0].source}. Not modelled: {NOT_MODELLED}.")
    _print_table(predictions, ranges, besides)


def _who_computes(work: Gradients) -> str:
    if work.updates:
        return "a step computes for"
    if any(work.update):
        return "forward, backward and the optimizer of all parameters take"
    return "forward and backward take"


def _print_table(
    predictions: Sequence[Prediction],
    ranges: Sequence[Interval],
    besides: Sequence[dict[str, float]],
) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    columns = (
        "schedule", "algorithm", "cap MiB", "buckets", "step ms", "from to", "exposed", "of bound",
        *(("measured", "error") if any(besides) else ()),
    )  # fmt: skip
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < 2 else "right")
    for line, within, beside in zip(predictions, ranges, besides, strict=True):
        varies = f"{short(within.low_ms)} {short(within.high_ms)}"
        table.add_row(
            line.schedule,
            line.algorithm,
            _caps_of(line),
            str(line.buckets),
            short(line.step_ms),
            varies,
            short(line.exposed_ms),
            f"{line.step_ms / line.bound_ms:.2f}" if line.bound_ms else "–",
            *((short(beside["measured_ms"]), f"{beside['error']:+.1%}") if beside else ()),
        )
    console.print(table)


def _caps_of(line: Prediction) -> str:
    if line.schedule in SCHEDULES and line.schedule not in CAPPED:
        return "–"
    return ", ".join(f"{cap:g}" for cap in line.caps_mb)


def stragglers_of(text: str) -> Stragglers:
    """
    >>> stragglers_of("exponential:0.1").exponential, stragglers_of("factors:1,1.3").factors
    (0.1, (1.0, 1.3))
    """
    kind, _, rest = text.partition(":")
    if text == "recorded":
        return Stragglers(recorded=True)
    if kind == "factors":
        return Stragglers(factors=tuple(numbers(rest, "--straggler factors:1,1.3")))
    if kind in ("normal", "exponential"):
        (share,) = numbers(rest, f"--straggler {kind}:0.1", 1)
        return Stragglers(**{kind: share})
    raise Unsupported(
        f"--straggler {text}: write recorded, exponential:0.1, normal:0.1, or factors:1,1.3, which "
        "has how many times as long each rank computes"
    )


def hook_of(text: str) -> Hook:
    """
    >>> hook_of("0.5,0.2,0.1").share
    0.5
    """
    share, *ms = numbers(text, "--hook 0.5 or --hook 0.5,0.2,0.1", 3)
    return Hook(share, *(each * 1e-3 / (1 << 20) for each in ms))


def numbers(text: str, example: str, most: int = 4096, kind: Any = float) -> list[Any]:
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not 0 < len(found) <= most or not all(0 <= each < math.inf for each in found):
        raise Unsupported(f"{text!r} is not what belongs here; write for example {example}")
    return found


def named_or_own(text: str) -> Any:
    """A name as it is; FILE:NAME as what the file calls so."""
    if not names_code(text):
        return text
    found = loaded(text, "MySchedule")
    if not all(callable(getattr(found, name, None)) for name in ("listens_to", "order", "caps")):
        raise Unsupported(
            f"{text} is a {type(found).__name__}; a dpcore.LaunchSchedule is needed, the class or "
            "an object of it"
        )
    return found
