"""How fast is an all-reduce over TCP? `python -m benchmarks.network`"""

from __future__ import annotations

import sys

from benchmarks.harness.options import options_of, parser
from dpcore.tools import argument_types as types
from dpcore.tools.compare.collectives.contenders import STREAMS, TCP, tcp_peer
from dpcore.tools.compare.collectives.report import draw_all
from dpcore.tools.compare.collectives.session import exit_status, run, start
from dpcore.tools.compare.collectives.wires import LOOPBACK, NoWireError

DESCRIPTION = """\
All-reduce (in place, float, sum) through TCP: dpcore beside Gloo, Open MPI and MPICH, all kept from
shared memory, and beside what the kernel allows: one raw stream each way between neighbours, with
as many bytes as an all-reduce has to move, from and to a cache, and "in place" from and to memory
of its size. On the loopback interface, and with --link between network namespaces behind a link
that the kernel shapes (tc tbf), for which one has to be root.
"""


def main() -> int:
    made = parser(DESCRIPTION, sizes="8:64M:8x", quick_sizes="8,64K,4M")
    types.add(made, "--link", "none", "default: none, which is loopback; --plot draws the last")
    arguments = made.parse_args()
    options = options_of(made, arguments)
    contenders = (TCP, *map(tcp_peer, options.peers), *STREAMS)
    status, runs = 0, []
    for link in (given or LOOPBACK.name for given in arguments.link):
        print(f"# link: {link}", flush=True)
        try:
            runs = run(contenders, ["all_reduce"], options, link)
        except NoWireError as reason:
            print(f"benchmarks.network: {reason}", file=sys.stderr)
            return 1
        status |= exit_status(runs)
    draw_all(options.plot, runs)  # of the last link
    return status


if __name__ == "__main__":
    start(main)
