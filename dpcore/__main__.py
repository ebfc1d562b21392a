"""The command line, ``dpcore`` or ``python -m dpcore``."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpcore._version import __version__
from dpcore.base.core_choice import NoCore, without_torch
from dpcore.errors import Error
from dpcore.school.exercise import arguments as of_exercise
from dpcore.tools import argument_types as types
from dpcore.tools import help_texts, sizes
from dpcore.tools.compare import arguments as of_compare
from dpcore.tools.compare.collectives.cells import collectives_of

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[types.CommandParser]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status: 2 where an argument or a file is not what
    the command takes, else what the command says."""
    options = _parser().parse_args(arguments)
    if options.command is None:
        print(help_texts.BEGIN, end="")
        return 0
    try:
        status: int = importlib.import_module(options.runs).run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # a reader such as `head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (Error, NoCore, OSError, ValueError) as problem:
        print(f"dpcore {options.command}: {problem}", file=sys.stderr)
        return 2 if isinstance(problem, ValueError) else 1
    except KeyboardInterrupt:
        print(f"dpcore {options.command}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
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
        prog="dpcore",
        description="Collective communication that you can read and see.",
        epilog="The exit status is 2 where an argument or a file is not what a command takes.",
    )
    parser.add_argument("--version", action="version", version=f"dpcore {__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="command", parser_class=types.CommandParser
    )
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
    commands: Commands,
    name: str,
    runs: str,
    **texts: Any,
) -> argparse.ArgumentParser:
    """A parser that shows its examples as they are written. ``runs``: the module whose ``run`` is
    the command; it is imported when the command is called."""
    made = commands.add_parser(name, formatter_class=argparse.RawDescriptionHelpFormatter, **texts)
    made.set_defaults(runs=runs)
    return made


def _add_bench(commands: Commands) -> None:
    bench = _command(
        commands,
        "bench",
        "dpcore.tools.compare.bench",
        help="measure collectives on this machine",
        description="Measures dpcore's collectives on ranks of this machine.",
        epilog=help_texts.BENCH,
    )
    bench.add_argument(
        "--collective",
        type=types.typed(collectives_of),
        metavar="NAMES",
        help="one or several with commas, or 'all' (default: all_reduce)",
    )
    bench.add_argument(
        "--world",
        type=types.ranks,
        metavar="N",
        help="ranks to start (default: 2, or the launcher's)",
    )
    bench.add_argument(
        "--sizes",
        type=types.size_list,
        metavar="SIZES",
        help=f"{sizes.HELP} (default: 8:64M:4x)",
    )
    bench.add_argument("--dtype", help="type of the elements (default: float32)")
    bench.add_argument("--op", help="sum, mean, prod, min, max (default: sum)")
    bench.add_argument(
        "--algorithm",
        metavar="NAMES",
        help="one or several with commas, measured one after the other (default: auto)",
    )
    bench.add_argument(
        "--plain", action="store_true", help="ordinary tensors instead of tensors in the arena"
    )
    bench.add_argument(
        "--seconds",
        type=types.seconds,
        default=0.2,
        metavar="S",
        help="for each row (default: 0.2)",
    )
    bench.add_argument("--json", action="store_true", help="one JSON object per line, no table")
    bench.add_argument(
        "--calibrate",
        action="store_true",
        help="measure the costs by which algorithms are chosen (memory and loopback; under a "
        "launcher on several hosts, the network), and store them in the user's cache",
    )


def _add_inspect(commands: Commands) -> None:
    inspect = _command(
        commands,
        "inspect",
        "dpcore.tools.diagnose.inspect",
        help="show what a running or hanging rank is doing",
        description="Shows the black boxes of the dpcore processes on this host from outside, or "
        "says which rank holds up\ntheir job, whatever host it is on.",
        epilog=help_texts.INSPECT,
    )
    inspect.add_argument(
        "pid",
        type=types.process,
        nargs="*",
        help="process numbers of ranks (default: all of this host)",
    )
    inspect.add_argument(
        "--job",
        action="store_true",
        help="say who holds up the job, from what these ranks know of all the others",
    )
    inspect.add_argument(
        "--json", action="store_true", help="one JSON object per communicator, or per job"
    )


def _add_show(commands: Commands) -> None:
    show = _command(
        commands,
        "show",
        "dpcore.tools.show.command",
        help="make a page, a picture and tables of a trace",
        description="Shows what dpcore.trace or torch.profiler has recorded: lanes per rank, "
        "exposed time, overlap. Or steps through an algorithm, by its name.",
        epilog=help_texts.SHOW,
    )
    show.add_argument(
        "trace",
        type=Path,
        nargs="+",
        help="a file of dpcore.trace, or files or a folder of torch.profiler; several runs are "
        "compared. Or the name of an algorithm",
    )
    show.add_argument("--out", type=Path, metavar="FILE", help="the page (default: TRACE.html)")
    show.add_argument(
        "--world", type=types.ranks, metavar="N", help="ranks, for an algorithm (default: 4)"
    )
    show.add_argument(
        "--collective", metavar="NAME", help="for an algorithm (default: all_reduce, if it has one)"
    )
    show.add_argument("--png", type=Path, metavar="FILE", help="draw a step as a picture, too")
    show.add_argument(
        "--steps",
        type=types.step_range,
        metavar="A:B",
        help="steps to draw (default: the one of median length)",
    )
    show.add_argument(
        "--csv", type=Path, metavar="FILE", help="write a row per bucket ('-' prints them), no page"
    )
    show.add_argument(
        "--export",
        choices=["kineto"],
        help="write a file per rank in the format of torch.profiler, no page",
    )
    show.add_argument("--open", action="store_true", help="open the page in the browser")
    show.add_argument(
        "--json", action="store_true", help="the figures as JSON; no page unless --out asks for it"
    )


def _add_simulate(commands: Commands) -> None:
    simulate = _command(
        commands,
        "simulate",
        "dpcore.tools.simulate.command",
        help="predict a step over another link, with another schedule",
        description="Predicts step and exposed time from the gradients of a recorded run.",
        epilog=help_texts.SIMULATE,
    )
    simulate.add_argument(
        "gradients",
        type=Path,
        nargs="+",
        help="a trace, as dpcore show takes it, or a description of gradients",
    )
    simulate.add_argument(
        "--link",
        type=types.link,
        required=True,
        metavar="WORDS",
        help="for example 1gbit,50us",
    )
    simulate.add_argument(
        "--schedule",
        default="bucketed,sequential,per_parameter,flat",
        metavar="NAMES",
        help="launch schedules, with commas; mine.py:MySchedule is a dpcore.LaunchSchedule of your "
        "own, oracle is computing without communication (default: %(default)s)",
    )
    simulate.add_argument(
        "--bucket-cap-mb",
        type=types.caps,
        metavar="MB",
        help="caps, with commas (default: the trace's)",
    )
    simulate.add_argument(
        "--algorithm",
        default="two_shot",
        metavar="NAMES",
        help="of all_reduce (default: two_shot)",
    )
    simulate.add_argument(
        "--world", type=types.ranks, metavar="N", help="ranks (default: the trace's)"
    )
    simulate.add_argument("--json", action="store_true", help="the predictions as JSON")


def _add_doctor(commands: Commands) -> None:
    doctor = _command(
        commands,
        "doctor",
        "dpcore.tools.diagnose.doctor",
        help="say what this machine has for dpcore, and what to do about the rest",
        description="Looks at torch, CUDA, NCCL, MPI, CuPy, processors, memory and the network, "
        "and lets two ranks add numbers.",
        epilog=help_texts.DOCTOR,
    )
    doctor.add_argument("--json", action="store_true", help="the findings as JSON")


def _add_compare(commands: Commands) -> None:
    compare = _command(
        commands,
        "compare",
        "dpcore.tools.compare.command",
        help="let torch DDP and dpcore take turns with a model, or libraries with a collective",
        description="Measures contenders in turns, in one run, and says what can be concluded.",
        epilog=of_compare.EXAMPLES,
    )
    of_compare.add_arguments(compare)


def _add_demo(commands: Commands) -> None:
    demo = _command(
        commands,
        "demo",
        "dpcore.tools.compare.demo",
        help="torch DDP and dpcore train the same model: who wins, by how much, and why",
        description="Trains a small model with torch DDP and with dpcore, side by side.",
        epilog=of_compare.DEMO_EXAMPLES,
    )
    of_compare.add_demo_arguments(demo)


def _add_exercise(commands: Commands) -> None:
    exercise = _command(
        commands,
        "exercise",
        "dpcore.school.exercise.command",
        help="learn by writing all-reduce, DDP and ZeRO yourself: exercises that check themselves",
        description="Lists, starts and checks exercises about data parallel training.",
        epilog=of_exercise.EXAMPLES,
    )
    of_exercise.add_arguments(exercise)


if __name__ == "__main__":
    sys.exit(main())
