"""The command line, ``dpcore`` or ``python -m dpcore``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dpcore import __version__, help_texts
from dpcore._core_choice import NoCore, without_torch
from dpcore.errors import Error


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    options = _parser().parse_args(arguments)
    if options.command is None:
        print(help_texts.BEGIN, end="")
        return 0
    try:
        status: int = options.run(options)
    except (Error, NoCore, OSError, ValueError) as problem:
        print(f"dpcore {options.command}: {problem}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as missing:
        package = (missing.name or "dpcore").partition(".")[0]
        if package == "dpcore":
            raise
        says = f"{package} is not installed for {sys.executable}: pip install {package}"
        says = without_torch() if package == "torch" else says
        print(f"dpcore {options.command}: {says}", file=sys.stderr)
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dpcore", description="Collective communication that you can read and see."
    )
    parser.add_argument("--version", action="version", version=f"dpcore {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    _add_bench(commands)
    _add_inspect(commands)
    _add_show(commands)
    _add_simulate(commands)
    _add_doctor(commands)
    _add_compare(commands)
    _add_demo(commands)
    _add_exercise(commands)
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    **texts: Any,
) -> argparse.ArgumentParser:
    """A parser whose examples stand as they are written, and what its command runs."""
    made = commands.add_parser(name, formatter_class=argparse.RawDescriptionHelpFormatter, **texts)
    made.set_defaults(run=run)
    return made


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = _command(
        commands,
        "bench",
        _bench,
        help="measure collectives on this machine",
        description="Measures dpcore's collectives on ranks of this machine.",
        epilog=help_texts.BENCH,
    )
    bench.add_argument(
        "--collective",
        default="all_reduce",
        metavar="NAMES",
        help="one or several with commas, or 'all' (default: all_reduce)",
    )
    bench.add_argument(
        "--world", type=int, metavar="N", help="ranks to start (default: 2; a launcher's if any)"
    )
    bench.add_argument(
        "--sizes",
        default="8:64M:4",
        metavar="SIZES",
        help="FROM:TO:FACTOR, or a list with commas; K, M, G are powers of 1024 (default: 8:64M:4)",
    )
    bench.add_argument("--dtype", default="float32", help="type of the elements (default: float32)")
    bench.add_argument("--op", default="sum", help="sum, mean, prod, min, max (default: sum)")
    bench.add_argument(
        "--algorithm",
        default="auto",
        metavar="NAMES",
        help="one or several with commas, measured one after the other (default: auto)",
    )
    bench.add_argument(
        "--plain", action="store_true", help="ordinary tensors instead of tensors in the arena"
    )
    bench.add_argument(
        "--seconds", type=float, default=0.2, metavar="S", help="to measure each row (default: 0.2)"
    )
    bench.add_argument("--json", action="store_true", help="one JSON object per line, no table")
    bench.add_argument(
        "--calibrate",
        action="store_true",
        help="measure what algorithms are chosen by (memory, loopback; behind a launcher on "
        "several hosts, the network), and keep it in the user's cache",
    )


def _add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    inspect = _command(
        commands,
        "inspect",
        _inspect,
        help="show what a running, or hanging, rank does",
        description="Shows the black boxes of dpcore processes of this host from outside, or says "
        "who holds up their job,\non whatever host that is.",
        epilog=help_texts.INSPECT,
    )
    inspect.add_argument(
        "pid", type=int, nargs="*", help="process numbers of ranks (default: all of this host)"
    )
    inspect.add_argument(
        "--job",
        action="store_true",
        help="say who holds up the job, from what these ranks know of all the others",
    )
    inspect.add_argument(
        "--json", action="store_true", help="one JSON object per communicator, or per job"
    )


def _add_show(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    show = _command(
        commands,
        "show",
        _show,
        help="make a page, a picture and tables of a trace",
        description="Shows what dpcore.trace or torch.profiler has recorded: lanes per rank, "
        "exposed time, overlap. Or steps through an algorithm, by its name.",
        epilog=help_texts.SHOW,
    )
    show.add_argument(
        "trace",
        type=Path,
        nargs="+",
        help="file of dpcore.trace, or files or a folder of torch.profiler's; several runs "
        "compare. Or the name of an algorithm",
    )
    show.add_argument("--out", type=Path, metavar="FILE", help="the page (default: TRACE.html)")
    show.add_argument("--world", type=int, metavar="N", help="ranks of an algorithm (default: 4)")
    show.add_argument(
        "--collective", metavar="NAME", help="of an algorithm (default: all_reduce, if it has one)"
    )
    show.add_argument("--png", type=Path, metavar="FILE", help="draw a step as a picture, too")
    show.add_argument(
        "--steps",
        type=_step_range,
        metavar="A:B",
        help="steps of the picture (default: a usual one)",
    )
    show.add_argument(
        "--csv", type=Path, metavar="FILE", help="a row per bucket ('-': print them); no page"
    )
    show.add_argument(
        "--export",
        choices=["kineto"],
        help="a file per rank in the format of torch.profiler; no page",
    )
    show.add_argument("--open", action="store_true", help="open the page in the browser")
    show.add_argument(
        "--json", action="store_true", help="the figures as JSON; no page unless --out asks for it"
    )


def _step_range(text: str) -> Any:
    from dpcore.show.command import step_range  # needs numpy, which --help does without

    return step_range(text)


def _add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    simulate = _command(
        commands,
        "simulate",
        _simulate,
        help="predict a step over another link, with another schedule",
        description="Predicts step and exposed time from the gradients of a recorded run.",
        epilog=help_texts.SIMULATE,
    )
    simulate.add_argument("gradients", type=Path, help="a trace, or a description of gradients")
    simulate.add_argument("--link", required=True, metavar="WORDS", help="such as 1gbit,50us")
    simulate.add_argument(
        "--schedule",
        default="bucketed,sequential,per_parameter,flat",
        metavar="NAMES",
        help="of launches, with commas; mine.py:MySchedule is a dpcore.LaunchSchedule of your own, "
        "oracle is computing alone (default: %(default)s)",
    )
    simulate.add_argument(
        "--bucket-cap-mb", default="", metavar="MB", help="one or several with commas"
    )
    simulate.add_argument(
        "--algorithm", default="two_shot", metavar="NAMES", help="of all_reduce (default: two_shot)"
    )
    simulate.add_argument("--world", type=int, metavar="N", help="ranks (default: the trace's)")
    simulate.add_argument("--json", action="store_true", help="the predictions as JSON")


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = _command(
        commands,
        "doctor",
        _doctor,
        help="say what this machine has for dpcore, and what to do about the rest",
        description="Looks at torch, CUDA, NCCL, MPI, CuPy, processors, memory and the network, "
        "and lets two ranks add numbers.",
        epilog=help_texts.DOCTOR,
    )
    doctor.add_argument("--json", action="store_true", help="the findings as JSON")


def _add_compare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from dpcore.compare.arguments import EXAMPLES, add_arguments

    compare = _command(
        commands,
        "compare",
        _compare,
        help="let torch DDP and dpcore take turns with a model, or libraries with a collective",
        description="Measures contenders in turns, in one run, and says what can be concluded.",
        epilog=EXAMPLES,
    )
    add_arguments(compare)


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from dpcore.compare.arguments import DEMO_EXAMPLES, add_demo_arguments

    demo = _command(
        commands,
        "demo",
        _demo,
        help="torch DDP and dpcore train the same model: who wins, by how much, and why",
        description="Trains a small model with torch DDP and with dpcore, side by side.",
        epilog=DEMO_EXAMPLES,
    )
    add_demo_arguments(demo)


def _add_exercise(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from dpcore.exercise.arguments import EXAMPLES, add_arguments

    exercise = _command(
        commands,
        "exercise",
        _exercise,
        help="learn by writing all-reduce, DDP and ZeRO yourself: exercises that check themselves",
        description="Lists, starts and checks exercises about data parallel training.",
        epilog=EXAMPLES,
    )
    add_arguments(exercise)


def _bench(options: argparse.Namespace) -> int:
    from dpcore.commands import bench, calibrate

    if options.calibrate:
        return calibrate.run(options.json, options.seconds)
    plan = bench.Plan(
        collectives=bench.parse_collectives(options.collective),
        sizes=bench.parse_sizes(options.sizes),
        dtype=options.dtype,
        op=options.op,
        algorithms=tuple(options.algorithm.split(",")),
        plain=options.plain,
        seconds=options.seconds,
        json=options.json,
    )
    return bench.run(plan, options.world)


def _inspect(options: argparse.Namespace) -> int:
    from dpcore.commands import inspect

    return inspect.show(options.pid, as_json=options.json, job=options.job)


def _show(options: argparse.Namespace) -> int:
    from dpcore.show import command

    return command.run(options)


def _simulate(options: argparse.Namespace) -> int:
    from dpcore.simulate import command

    return command.run(options)


def _doctor(options: argparse.Namespace) -> int:
    from dpcore.commands import doctor

    return doctor.show(as_json=options.json)


def _compare(options: argparse.Namespace) -> int:
    from dpcore.compare import command

    return command.run(options)


def _demo(options: argparse.Namespace) -> int:
    from dpcore.compare import demo

    return demo.run(options)


def _exercise(options: argparse.Namespace) -> int:
    from dpcore.exercise import command

    return command.run(options)


if __name__ == "__main__":
    sys.exit(main())
