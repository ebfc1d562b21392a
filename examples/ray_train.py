"""Lets two workers of Ray Train run examples/train.py, which knows nothing of Ray.

    python examples/ray_train.py

It starts a cluster on this machine if there is none; `RAY_ADDRESS` leads to another one.
"""

import os
import runpy
import sys
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

PROGRAM = Path(__file__).resolve().with_name("train.py")


def worker() -> None:
    sys.argv = [str(PROGRAM)]
    runpy.run_path(str(PROGRAM), run_name="__main__")


if __name__ == "__main__":
    workers = 2
    if "RAY_ADDRESS" not in os.environ:
        ray.init(num_cpus=workers + 1, include_dashboard=False)  # one for what leads the workers
    TorchTrainer(
        worker,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(storage_path=str(Path("ray_results").resolve())),
    ).fit()
