"""Writes the figures of README.md and of the documents from committed result files.

python -m benchmarks.readme            # says whether they are up to date
python -m benchmarks.readme --write    # and makes them so
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.advised import table_of_advised
from benchmarks.chaos import table_of_chaos
from benchmarks.compiled import table_of_compiled
from benchmarks.harness import collective_tables as collectives
from benchmarks.harness import first_screen_tables as first_screen
from benchmarks.harness import step_tables as steps
from benchmarks.harness.figures import load
from benchmarks.harness.gpu_table import table_of_gpu
from benchmarks.harness.host_floor import table_of_floors
from benchmarks.harness.mistakes_table import table_of_mistakes
from benchmarks.harness.simulated_table import figures_of_residuals, table_of_simulated
from benchmarks.harness.strategies_table import table_of_torch_parallel
from benchmarks.plans import table_of_plans
from benchmarks.survivors_beside import table_of_survivors_beside
from benchmarks.virtual_ranks import table_of_virtual_ranks

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
FILES = {"first_screen_commands": "first_screen", "residuals": "simulated"}
# Every other table has the name of the file with its results.
DOCUMENTS: dict[str, dict[str, Callable[[list[dict[str, Any]]], str]]] = {
    "README.md": {
        "all_reduce": collectives.table_of_all_reduce,
        "first_screen": first_screen.table_of_first_screen,
        "first_screen_commands": first_screen.outputs_of_commands,
    },
    "docs/results/host.md": {
        "ddp_step": steps.table_of_ddp_step,
        "collectives": collectives.table_of_collectives,
        "memory": steps.table_of_memory,
        "floors": table_of_floors,
        "noise_cost": steps.table_of_noise_cost,
        "neighbours": steps.table_of_neighbours,
    },
    "docs/results/cores.md": {
        "many_ranks": collectives.table_of_many_ranks,
        "many_ranks_collectives": collectives.table_of_many_ranks_collectives,
        "many_ranks_step": steps.table_of_many_ranks_step,
        "many_ranks_defaults": steps.table_of_many_ranks_defaults,
    },
    "docs/results/links.md": {
        "shaped_link": steps.table_of_shaped_link,
        "network": collectives.table_of_network,
        "incast": collectives.table_of_incast,
        "priorities": collectives.table_of_priorities,
    },
    "docs/results/schedules.md": {
        "defaults": steps.table_of_defaults,
        "across_steps": steps.table_of_across_steps,
        "slices": steps.table_of_slices,
        "local_updates": steps.table_of_local_updates,
    },
    "docs/torch_distributed.md": {"torch_parallel": table_of_torch_parallel},
    "docs/gpu.md": {"gpu": table_of_gpu},
    "docs/compile.md": {"compiled": table_of_compiled},
    "docs/failures.md": {"chaos": table_of_chaos},
    "docs/mistakes.md": {"mistakes": table_of_mistakes},
    "docs/plans.md": {"plans": table_of_plans},
    "docs/recovery.md": {"survivors_beside": table_of_survivors_beside},
    "docs/simulator.md": {"simulated": table_of_simulated},
    "docs/slow.md": {"advised": table_of_advised},
    "docs/virtual_ranks.md": {"virtual_ranks": table_of_virtual_ranks},
    "dpcore/tools/simulate/residuals.py": {"residuals": figures_of_residuals},
}


def rendered(name: str, text: str) -> str:
    """The text of a document with the figures of today's files."""
    deeper = "](" + "../" * name.count("/")  # tables are made for pages in docs/

    def block(match: re.Match[str]) -> str:
        table = match.group(2)
        made = DOCUMENTS[name][table](load(FILES.get(table, table)))
        return match.group(1) + made.replace("](../", deeper) + match.group(3)

    return BLOCK.sub(block, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help="change them")
    arguments = parser.parse_args()
    stale = 0
    for name in DOCUMENTS:
        path = ROOT / name
        old = path.read_text(encoding="utf-8")
        new = rendered(name, old)
        if arguments.write:
            path.write_text(new, encoding="utf-8")
        elif new != old:
            print(f"{name} is not up to date; run: python -m benchmarks.readme --write")
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
