"""What does one small all-reduce cost? `python -m benchmarks.latency`"""

from __future__ import annotations

from benchmarks.harness.options import options_of, parser
from dpcore.tools.compare.collectives.contenders import CPP, OURS, peer
from dpcore.tools.compare.collectives.report import draw_all
from dpcore.tools.compare.collectives.session import exit_status, run, start

DESCRIPTION = """\
Latency of an all-reduce of 8 B to 1 KiB: called from Python, as all contenders are, and for dpcore
also looped inside C++, which shows what the call from Python adds.
"""


def main() -> int:
    made = parser(DESCRIPTION, sizes="8:1K:2x", quick_sizes="8,1K", rounds=9)
    options = options_of(made, made.parse_args())
    contenders = (CPP, *OURS, *map(peer, options.peers))
    runs = run(contenders, ["all_reduce"], options)
    draw_all(options.plot, runs)
    return exit_status(runs)


if __name__ == "__main__":
    start(main)
