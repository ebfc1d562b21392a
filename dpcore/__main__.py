"""The command line, ``dpcore`` or ``python -m dpcore``."""

from __future__ import annotations

import argparse
import importlib
import io
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
from dpcore.tools import help_texts
from dpcore.tools.compare import arguments as of_compare

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[types.CommandParser]


# A path that does not fit, unlike a device that is full.
_OF_PATHS = (
    FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status: 2 where an argument or a file is not what
    the command takes, else what the command says."""
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower() != "utf-8":
        sys.stdout.reconfigure(errors="replace")  # figures count, where a sign can't be written
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
        print(f"dpcore {options.command}: {_in_words(problem)}", file=sys.stderr)
        return 2 if isinstance(problem, (ValueError, *_OF_PATHS)) else 1
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


def _in_words(problem: Exception) -> str:
    if isinstance(problem, OSError) and problem.filename and problem.strerror:
        return f"{problem.filename}: {problem.strerror}"
    return str(problem)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dpcore",
        usage="dpcore COMMAND ...",
        description=help_texts.DOORS,
        epilog="dpcore COMMAND --help has examples. Exit status 2: a wrong argument or file.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,  # the screen has 24 lines
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"dpcore {__version__}")
    commands = parser.add_subparsers(
        dest="command", help=argparse.SUPPRESS, parser_class=types.CommandParser, prog="dpcore"
    )
    _add_bench(commands)
    _add_calibrate(commands)
    _add_inspect(commands)
    _add_chaos(commands)
    _add_show(commands)
    _add_advise(commands)
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
        description="Measures dpcore's collectives on ranks of this machine.",
        epilog=help_texts.BENCH,
    )
    types.add(bench, "--collective", said="or all; default: all_reduce")
    types.add(bench, "--world", said="default: 2, or the launcher's")
    types.add(bench, "--sizes", said=f"default: {types.SIZES}")
    bench.add_argument("--dtype", help="type of the elements (default: float32)")
    types.add(bench, "--op", said="default: sum")
    types.add(bench, "--algorithm", said="default: auto")
    bench.add_argument(
        "--plain", action="store_true", help="ordinary tensors instead of tensors in the arena"
    )
    types.add(bench, "--seconds", 0.2)
    bench.add_argument(
        "--reproduce",
        action="store_true",
        help="measure what README claims, and say what holds here (ten minutes, in a clone)",
    )
    types.add(bench, "--json", said="a line for each row")


def _add_calibrate(commands: Commands) -> None:
    calibrate = _command(
        commands,
        "calibrate",
        "dpcore.tools.diagnose.calibrate",
        description="Measures what operations cost this machine, once: for the choice of "
        "algorithms and for dpcore simulate.",
        epilog=help_texts.CALIBRATE,
    )
    types.add(calibrate, "--seconds", 0.2)
    calibrate.add_argument(
        "--file",
        type=Path,
        metavar="FILE",
        help="the file to write (default: in this user's cache)",
    )
    types.add(calibrate, "--json")


def _add_inspect(commands: Commands) -> None:
    inspect = _command(
        commands,
        "inspect",
        "dpcore.tools.diagnose.inspect",
        description="Shows the black boxes of the dpcore processes on this host from outside, or "
        "says which rank holds up\ntheir job, whatever host it is on.",
        epilog=help_texts.INSPECT,
    )
    inspect.add_argument(
        "pid",
        metavar="PID",
        type=types.process,
        nargs="*",
        help="process numbers of ranks (default: all of this host)",
    )
    inspect.add_argument(
        "--job",
        action="store_true",
        help="say which rank holds up the job, from what these ranks know of all the others",
    )
    inspect.add_argument(
        "--flight-recorder",
        type=Path,
        metavar="FOLDER",
        help="with --job: also write what each rank did there, as torch's flight recorder does",
    )
    types.add(inspect, "--json", said="a line for each communicator, or job")


def _add_chaos(commands: Commands) -> None:
    chaos = _command(
        commands,
        "chaos",
        "dpcore.tools.chaos.command",
        description="Kills, stops and restarts ranks of a program under dp.elastic, and says what "
        "that cost it.",
        epilog=help_texts.CHAOS,
    )
    types.add(chaos, "--world", [4], said="one; default: 4")
    chaos.add_argument(
        "--mtbf",
        type=types.seconds,
        default=2.0,
        metavar="S",
        help="seconds between two faults in the mean (default: %(default)s)",
    )
    chaos.add_argument(
        "--faults",
        type=types.whole(),
        metavar="N",
        help="end after so many (default: 10, or with a program when that ends)",
    )
    chaos.add_argument(
        "--seed",
        type=types.whole(0),
        default=7,
        metavar="N",
        help="when which fault comes follows from it (default: %(default)s)",
    )
    chaos.add_argument(
        "--kinds",
        type=types.names,
        default=["kill", "stop"],
        metavar="NAMES",
        help="kill, pair (two at once), stop; with --hosts also cut and slow (default: kill,stop)",
    )
    chaos.add_argument(
        "--restart",
        type=types.seconds,
        default=0.5,
        metavar="S",
        help="how long after its death a rank is started again (default: %(default)s)",
    )
    chaos.add_argument(
        "--hosts",
        type=types.whole(1, 64, " of hosts"),
        default=1,
        metavar="N",
        help="network namespaces among which ranks are dealt out; as root (default: 1, none)",
    )
    chaos.add_argument(
        "--patience",
        type=types.seconds,
        default=60.0,
        metavar="S",
        help="a time without a finished step that is called a hang (default: %(default)s)",
    )
    types.add(chaos, "--json")
    chaos.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND ...",
        help="what starts one rank, which finds RANK, WORLD_SIZE and DPCORE_DOOR",
    )


def _add_show(commands: Commands) -> None:
    show = _command(
        commands,
        "show",
        "dpcore.tools.show.command",
        description="Shows what dpcore.trace or torch.profiler has recorded: lanes per rank, "
        "exposed time, overlap. Or steps through an algorithm, by its name.",
        epilog=help_texts.SHOW,
    )
    show.add_argument(
        "trace",
        metavar="TRACE",
        type=Path,
        nargs="+",
        help="a file of dpcore.trace, or files or a folder of torch.profiler; several runs are "
        "compared. Or the name of an algorithm",
    )
    show.set_defaults(advice="dpcore.tools.advise.advice")
    show.add_argument("--html", type=Path, metavar="FILE", help="the page (default: TRACE.html)")
    types.add(show, "--world", said="one, for an algorithm; default: 4")
    types.add(show, "--collective", said="one, for an algorithm; default: all_reduce, if it has it")
    show.add_argument("--png", type=Path, metavar="FILE", help="draw a step as a picture, too")
    types.add(show, "--steps", said="to draw; default: the one of median length")
    types.add(show, "--csv", said="one per bucket, and no page")
    show.add_argument(
        "--export",
        choices=["kineto", "flight-recorder", "chakra"],
        help="write a file per rank and no page: of a trace in the format of torch.profiler or of "
        "torch's flight recorder, of an algorithm as a graph for ASTRA-sim",
    )
    types.add(show, "--sizes", said="one, for --export chakra; default: 1M")
    show.add_argument("--open", action="store_true", help="open the page in the browser")
    types.add(show, "--json", said="no page unless --html asks for it")


def _add_advise(commands: Commands) -> None:
    advise = _command(
        commands,
        "advise",
        "dpcore.tools.advise.command",
        description="Says what to change in a run of torch DDP or of dpcore, in order of gain.",
        epilog=help_texts.ADVISE,
    )
    advise.add_argument(
        "run",
        metavar="RUN",
        type=Path,
        nargs="+",
        help="traces, as dpcore show takes them, or a model as my.py:make, which is recorded",
    )
    types.add(advise, "--world", said="of a model; default: 2")
    advise.add_argument(
        "--stack",
        type=types.stacks,
        metavar="NAMES",
        help="what trains a model: torch, dpcore, or both with a comma (default: torch)",
    )
    advise.add_argument(
        "--expect",
        type=types.link,
        metavar="LINK",
        help="what the network should carry, such as 10gbit",
    )
    types.add(advise, "--json", said="an entry per run")


def _add_simulate(commands: Commands) -> None:
    simulate = _command(
        commands,
        "simulate",
        "dpcore.tools.simulate.command",
        description="Predicts step and exposed time from the gradients of a recorded run.",
        epilog=help_texts.SIMULATE,
    )
    simulate.add_argument(
        "gradients",
        metavar="GRADIENTS",
        type=Path,
        nargs="+",
        help="a trace, as dpcore show takes it, or a description of gradients",
    )
    types.add(simulate, "--link")
    types.add(simulate, "--intra", said="within a host, with --inter")
    types.add(simulate, "--inter", said="between hosts, with --intra")
    simulate.add_argument(
        "--ranks-per-host",
        type=types.whole(1, types.MOST_RANKS, " of ranks"),
        default=1,
        metavar="N",
        help="ranks that share a host's card (default: %(default)s)",
    )
    simulate.add_argument(
        "--oversubscribed",
        type=types.whole(1, 1000, " of times"),
        default=1,
        metavar="N",
        help="how many times what switches carry the cards can send (default: %(default)s)",
    )
    types.add(
        simulate, "--schedule", said="default: all with a name; of local updates, the recorded one"
    )
    types.add(
        simulate, "--algorithm", said="default: two_shot; with --ranks-per-host, hierarchical"
    )
    simulate.add_argument(
        "--straggler",
        metavar="HOW",
        help="ranks that are late: recorded, exponential:0.1, normal:0.1 or factors:1,1.3",
    )
    simulate.add_argument(
        "--hook",
        metavar="SHARE",
        help="a hook that sends this share of the bytes; 0.5,0.2,0.1: with ms per MiB around it",
    )
    types.add(simulate, "--world", said="default: those of the trace, at least 2")
    simulate.add_argument(
        "--best", action="store_true", help="try schedules, sizes and algorithms; the best first"
    )
    simulate.add_argument(
        "--until",
        type=types.share,
        metavar="SHARE",
        help="how many ranks each do this share of the work that one does alone, such as 0.9",
    )
    simulate.add_argument(
        "--calibration", type=Path, metavar="FILE", help="a file of dpcore calibrate"
    )
    simulate.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="the page (a step against bandwidth, ranks and the size of buckets)",
    )
    simulate.add_argument(
        "--page",
        type=Path,
        metavar="FILE",
        help="the page of dpcore show, of the first schedule as if it had run",
    )
    simulate.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help="a compare.jsonl of dpcore compare: errors in table, CSV and JSON, dots in --html",
    )
    types.add(simulate, "--csv", said="one per prediction")
    types.add(simulate, "--json", said="a list")


def _add_doctor(commands: Commands) -> None:
    doctor = _command(
        commands,
        "doctor",
        "dpcore.tools.diagnose.doctor",
        description="Looks at torch, CUDA, NCCL, MPI, CuPy, processors, memory and the network, "
        "and lets two ranks add numbers.",
        epilog=help_texts.DOCTOR,
    )
    types.add(doctor, "--json", said="the findings")


def _add_compare(commands: Commands) -> None:
    compare = _command(
        commands,
        "compare",
        "dpcore.tools.compare.command",
        description="Measures contenders in turns, in one run, and says what can be concluded.",
        epilog=of_compare.EXAMPLES,
    )
    of_compare.add_arguments(compare)


def _add_demo(commands: Commands) -> None:
    demo = _command(
        commands,
        "demo",
        "dpcore.tools.compare.demo",
        description="Trains a small model with torch DDP and with dpcore, side by side.",
        epilog=of_compare.DEMO_EXAMPLES,
    )
    of_compare.add_demo_arguments(demo)


def _add_exercise(commands: Commands) -> None:
    exercise = _command(
        commands,
        "exercise",
        "dpcore.school.exercise.command",
        description="Lists, starts and checks exercises about data parallel training.",
        epilog=of_exercise.EXAMPLES,
    )
    of_exercise.add_arguments(exercise)


if __name__ == "__main__":
    sys.exit(main())
