"""How fast is an all-reduce over TCP? `python -m benchmarks.network`"""

from __future__ import annotations

from benchmarks.harness.contenders import STREAM, TCP, peer
from benchmarks.harness.options import options_of, parser
from benchmarks.harness.report import draw_all
from benchmarks.harness.session import exit_status, run, start

DESCRIPTION = """\
All-reduce (in place, float, sum) through TCP on the loopback interface: dpcore with mapped memory
turned off beside Gloo, which has nothing else, and beside what the kernel allows: one raw stream
each way between neighbours, with as many bytes as an all-reduce has to move.
"""


def main() -> int:
    made = parser(DESCRIPTION, sizes="8:64M:8x", quick_sizes="8,64K,4M")
    made.set_defaults(peers="gloo")
    options = options_of(made, made.parse_args())
    contenders = (TCP, *map(peer, options.peers), STREAM)
    runs = run(contenders, ["all_reduce"], options)
    draw_all(options.plot, runs)
    return exit_status(runs)


if __name__ == "__main__":
    start(main)
