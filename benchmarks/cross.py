"""Steps of both wrappers over both stacks. `python -m benchmarks.cross`

    alone          no communication, all ranks computing at once: what is subtracted
    torch          torch DDP over Gloo; "torch 100" with buckets of 100 MiB
    torch/dpcore   the same class, model and options over the backend "dpcore"
    dpcore/gloo    dpcore.DataParallel over torch's group of Gloo, given as comm=

The figure is the overhead, as in `benchmarks.ddp_step`: a contender's step minus that of `alone`.
"""

from __future__ import annotations

from benchmarks.ddp_step import compare
from dpcore.tools.compare.training.ranks import ALONE, OVER_DPCORE, OVER_GLOO

CONTENDERS = (ALONE, "torch", OVER_DPCORE, OVER_GLOO, "torch 100", f"{OVER_DPCORE} 100")
TARGETS = {"mlp": 0.5, "transformer": 1.0, "many": 1.0}

if __name__ == "__main__":
    compare(__doc__ or "", CONTENDERS, ("torch", "torch 100"), TARGETS, "cross.jsonl", "2")
