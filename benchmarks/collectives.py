"""How fast are all the others? `python -m benchmarks.collectives`"""

from __future__ import annotations

from benchmarks.harness.options import options_of, parser
from dpcore.tools import argument_types as types
from dpcore.tools.compare.collectives.cells import COLLECTIVES, collectives_of
from dpcore.tools.compare.collectives.contenders import BOUNDS, OURS, peer
from dpcore.tools.compare.collectives.report import draw_all
from dpcore.tools.compare.collectives.session import exit_status, run, start

OTHERS = tuple(name for name in COLLECTIVES if name != "all_reduce")
DESCRIPTION = """\
Every collective but all-reduce, and a ping-pong of send and recv (time of one message): dpcore in
its arena and with ordinary tensors, beside Gloo, Open MPI, MPICH and the bounds, in one run.
A rooted collective in a loop shows its rate: the root may run ahead of the others.
"""


def main() -> int:
    made = parser(DESCRIPTION, sizes="8:256M:8x", quick_sizes="8:8M:32x", worlds="2,4")
    types.add(made, "--collective", ",".join(OTHERS), "default: all but all_reduce")
    arguments = made.parse_args()
    options = options_of(made, arguments)
    contenders = (*OURS, *map(peer, options.peers), *BOUNDS)
    runs = run(contenders, collectives_of(arguments.collective), options)
    draw_all(options.plot, runs)
    return exit_status(runs)


if __name__ == "__main__":
    start(main)
