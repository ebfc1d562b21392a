"""The command of scripts that say what something costs in a step of data parallel training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.options import script_parser
from dpcore.tools.compare.training.models import MODELS
from dpcore.tools.records import ROOT, keep, run_facts

Cost = Callable[[str, int, int, float], dict[str, Any]]  # of a model, ranks, rounds, seconds


def command(
    description: str | None,
    name: str,
    cost: Cost,
    heading: str,
    row: Callable[[dict[str, Any]], str],
    rounds: int = 11,
    seconds: float = 0.5,
) -> None:
    """Measures each model, prints its row and keeps its record in the results of ``name``."""
    made = script_parser(description)
    made.add_argument("--models", default="mlp,transformer,many", help="%(default)s")
    made.add_argument("--world", type=int, default=2)
    made.add_argument("--rounds", type=int, default=rounds)
    made.add_argument("--seconds", type=float, default=seconds, help="of one contender in a round")
    made.add_argument("--records", type=Path, default=ROOT / f"benchmarks/results/{name}.jsonl")
    options = made.parse_args()
    if unknown := [model for model in options.models.split(",") if model not in MODELS]:
        made.error(f"no model {', '.join(unknown)}; choose from {', '.join(MODELS)}")
    facts = run_facts(
        {"": {"torch": torch.__version__}}, {"rounds": options.rounds, "seconds": options.seconds}
    )
    print(f"{'':14}{heading}")
    for model in options.models.split(","):
        line = cost(model, options.world, options.rounds, options.seconds)
        print(f"{model:14}{row(line)}", flush=True)
        keep(options.records, facts, [line])
