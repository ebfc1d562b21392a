"""The arguments of `dpcore compare`; importing this loads neither torch nor numpy."""

from __future__ import annotations

import argparse
from pathlib import Path

from dpcore.errors import Unsupported
from dpcore.tools import argument_types as types
from dpcore.tools.compare.grid import grid

EXAMPLES = """\
examples:
  dpcore compare                               torch DDP and dpcore, a transformer: within a minute
  dpcore compare --example > my.py             a model of your own to begin with
  dpcore compare my.py:make --contenders torch,torch:100,default,bucketed:1
  dpcore compare my.py:make --contenders torch,default,mine.py:MySchedule --rounds 40
  dpcore compare my.py:make --contenders torch,default,zero1,local_sgd:16,mine.py:wrap
  dpcore compare transformer --link none,1gbit,100mbit --world 2,4
  dpcore compare my.py:make --device cuda --amp --optimizer adamw
  dpcore compare gpt2 --grid "none,1gbit x 2,4 x torch,bucketed,zero1 x 1,4,25"
  dpcore compare all_reduce --peers gloo,openmpi,mpich --sizes 8:64M:8x
  dpcore compare all_reduce --algorithm ring,mine.py:swing --peers gloo
  dpcore compare all                           every collective

models: mlp, transformer, many, ten, gpt2, or file.py:make with make(rank, world) -> (model, step),
where step(model) runs forward and returns the loss (or calls backward by itself).

contenders: torch, default (auto is the same), bucketed, sequential, per_parameter, flat, each with
:MIB behind it for the size of buckets, and file.py:MySchedule, a dpcore.LaunchSchedule. Torch's are
DistributedDataParallel over Gloo with gradient_as_bucket_view=True, which is its faster way. With
these, every step of all contenders includes that of --optimizer:
  priority, dear, zero1, zero2     schedules that go on under the next forward
  torch-zero1                      torch DDP with ZeroRedundancyOptimizer
  local_sgd:16, diloco:64          ranks that agree every 16 or 64 steps
  hook:fp16, hook:bf16, hook:powersgd:2, hook:mine.py:my_hook, also torch-hook:fp16 and so on
  mine.py:wrap                     a function (model) -> (wrapped, optimizer), for whole steps
The table says of those that compute something else what it is, and shows the loss at the end.

links: none is this machine. As root, a rate such as 1gbit means hosts of their own (network
namespaces) whose NICs the kernel shapes; else, and with --emulated, dpcore slows down its own
messages, and torch DDP sends its buckets through dpcore as well, since Gloo knows no such link.

--device cuda: a GPU for each rank, with torch DDP and dpcore over NCCL, times by events of the
GPU's stream, and peak memory beside them. Ranks that share a GPU, as with --world 2 on one, go over
Gloo and over dpcore's mapped memory. One rank sends nothing, and shows what a wrapper costs it.

An interrupted comparison goes on where it was when the same command is given again, and one with
more --rounds adds to those that are there. docs/compare.md says what the figures mean.
"""


def add_arguments(made: argparse.ArgumentParser) -> None:
    add = made.add_argument
    add(
        "what", nargs="?", default="", metavar="WHAT",
        help="a model, file.py:make, a collective, or 'all' of those (default: transformer)",
    )  # fmt: skip
    types.add(made, "--world", said="default: 2; with --device cuda the number of GPUs")
    types.add(made, "--rounds", said=f"default: {types.ROUNDS}, with --quick {types.QUICK_ROUNDS}")
    types.add(made, "--seconds", said="default: 0.3 for a model, 0.02 for a collective")
    types.add(made, "--quick")
    types.add(made, "--out", said="default: compare/WHAT")
    types.add(made, "--json", said="a line for each cell and contender")
    add("--example", action="store_true", help="print a my.py to begin with, and measure nothing")
    training = made.add_argument_group("models")
    add = training.add_argument
    add(
        "--contenders", type=types.names, default="torch,torch:100,default", metavar="NAMES",
        help="what takes turns (default: %(default)s); the others are compared with the first of "
        "torch",
    )  # fmt: skip
    add(
        "--grid", type=types.typed(grid), metavar="'LINKS x WORLDS x SCHEDULES x CAPS'",
        help="every combination of four lists, in place of --link, --world and --contenders; caps "
        "in MiB. Also draws grid.png and grid.svg, with the bound",
    )  # fmt: skip
    add(
        "--optimizer", choices=("adamw", "adam", "sgd"),
        help="makes its step a part of every step (default: adamw if a contender needs one, else "
        "none)",
    )  # fmt: skip
    add(
        "--device", choices=("cpu", "cuda"), default="cpu",
        help="where ranks train (default: %(default)s)",
    )  # fmt: skip
    add("--amp", action="store_true", help="steps run under torch.autocast in bfloat16")
    types.add(training, "--link", "none", "or none, which is the default")
    add("--emulated", action="store_true", help="emulate links, also as root")
    add(
        "--threads", type=types.whole(1, 1024), metavar="N",
        help="torch's, per rank (default: cores / ranks)",
    )  # fmt: skip
    collectives = made.add_argument_group("collectives")
    types.add(collectives, "--peers", "gloo,openmpi,mpich")
    types.add(collectives, "--algorithm", said="each is a contender; default: none")
    types.add(collectives, "--sizes", said=f"default: {types.SIZES}")
    collectives.add_argument(
        "--huge-pages", action="store_true",
        help="ordinary memory of all contenders on huge pages",
    )  # fmt: skip


_OF_MODELS = ("contenders", "grid", "optimizer", "device", "amp", "link", "emulated", "threads")
_OF_COLLECTIVES = ("peers", "algorithm", "sizes", "huge_pages")


def check_fitting(options: argparse.Namespace, is_collective: bool) -> None:
    """Refuses options of the other kind of comparison, which would be left out in silence."""
    made = argparse.ArgumentParser(add_help=False)
    add_arguments(made)
    others = _OF_MODELS if is_collective else _OF_COLLECTIVES
    usual = made.parse_args([])
    given = [name for name in others if getattr(options, name) != getattr(usual, name)]
    if given:
        kinds = ("models", "a collective") if is_collective else ("collectives", "a model")
        named = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise Unsupported(
            f"{named}: for {kinds[0]} only, and {options.what or 'this'} is {kinds[1]}"
        )


DEMO_EXAMPLES = """\
examples:
  dpcore demo                                  a minute on two cores; pages and pictures in demo/
  dpcore demo --out evening --rounds 30        more rounds, narrower intervals

A transformer learns to write like Alice in Wonderland on two ranks, with torch DDP over Gloo and
with dpcore in turn, both with default buckets and torch with gradient_as_bucket_view=True, its
faster way: within this machine, and over 1 Gbit/s, which is real TCP between two network namespaces
for root and an emulated link for others; where there are GPUs, on those first. It ends with one
sentence: who won, by how much, and why.
"""


def add_demo_arguments(made: argparse.ArgumentParser) -> None:
    types.add(made, "--out", Path("demo"))
    types.add(made, "--rounds", types.ROUNDS)
    made.add_argument(
        "--steps-per-round", type=types.whole(), default=2, metavar="N",
        help="steps of one contender in a round (default: %(default)s)",
    )  # fmt: skip
