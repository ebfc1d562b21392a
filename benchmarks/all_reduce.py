"""How fast is an all-reduce? `python -m benchmarks.all_reduce`"""

from __future__ import annotations

from benchmarks.harness.options import options_of, parser
from dpcore.tools.compare.collectives.contenders import BOUNDS, OURS, peer
from dpcore.tools.compare.collectives.report import draw_all
from dpcore.tools.compare.collectives.session import exit_status, run, start

DESCRIPTION = """\
All-reduce (in place, float, sum): dpcore with tensors in its arena and with ordinary ones, beside
Gloo, Open MPI and MPICH, and beside what memory allows: `x *= 0.5` over the same bytes, and memcpy,
by every rank at once. All are measured in one run, in turn, round by round.
"""


def main() -> int:
    made = parser(DESCRIPTION, sizes="8:256M:4x", quick_sizes="8:64M:64x", worlds="2,4")
    options = options_of(made, made.parse_args())
    contenders = (*OURS, *map(peer, options.peers), *BOUNDS)
    runs = run(contenders, ["all_reduce"], options)
    draw_all(options.plot, runs)
    return exit_status(runs)


if __name__ == "__main__":
    start(main)
