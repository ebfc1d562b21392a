"""Where ranks of a comparison train: which GPUs there are, and what ranks on them can show."""

from __future__ import annotations

import torch

from dpcore import _C
from dpcore.errors import Unsupported

BACKENDS = {"gpus": "nccl", "shared": "cuda"}  # of dpcore.init, by the kind of a cell


def why_no_gpu() -> str:
    """Why neither torch nor dpcore can use a GPU here; "" where both can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install a build that has it"
    problem = str(_C.cuda_probe()["problem"])
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU" + (f": {problem}" if problem else "")
    return problem and f"dpcore cannot use the GPU: {problem}"


def gpus() -> int:
    """How many there are for both."""
    return 0 if why_no_gpu() else torch.cuda.device_count()


def check_device(device: str) -> None:
    """Raises where ranks cannot train on it."""
    why = why_no_gpu() if device == "cuda" else ""
    if why:
        raise Unsupported(f"--device cuda: {why} (dpcore doctor says more)")


def kind_of_gpus(world: int) -> str:
    """NCCL wants a GPU for each rank."""
    return "gpus" if world <= gpus() else "shared"


def note_on(kind: str, world: int) -> str:
    """What a reader may conclude from ranks on GPUs, or from a single rank; "" for others."""
    if world == 1:
        said = (
            "One rank sends nothing: what a contender adds to a step is the time of its hooks and "
            "copies, which every number of ranks pays. Communication, its overlap and links do not "
            "show"
        )
        more = "; with --world 2 ranks that share the GPU send over its memory, and not over NCCL"
        return f"{said}{more if kind == 'gpus' else ''}."
    if kind == "shared":
        return (
            "Ranks that share a GPU take turns on it, also where none communicates, and NCCL wants "
            "a GPU for each: torch DDP goes over Gloo, through the memory of the host, and dpcore "
            "over memory of the GPU that all ranks have mapped. A GPU for each rank may show "
            "another order."
        )
    return ""
