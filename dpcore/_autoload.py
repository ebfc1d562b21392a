"""What torch calls at the end of its own import (the entry point ``torch.backends``).

``init_process_group("dpcore")`` then works in a program that never imports dpcore. Nothing heavy
may happen here, and nothing may be raised: an exception would break ``import torch``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any


def register() -> None:
    """Makes the name "dpcore" known to torch.distributed. Calling it again does nothing."""
    try:
        import torch.distributed

        dist: Any = torch.distributed
        if dist.is_available() and "DPCORE" not in dist.Backend._plugins:
            devices = ["cpu", "cuda"]
            dist.Backend.register_backend("dpcore", _create, extended_api=True, devices=devices)
            dist.register_rendezvous_handler("dpcore", _meet)
            _say_more_without_a_rank()
    except Exception:
        return


def _create(options: Any, backend_options: Any) -> Any:
    from dpcore.comm.launch.torch_backend import create

    return create(options, backend_options)


def _meet(url: str, timeout: Any = None, **_: Any) -> Iterator[Any]:
    from dpcore.comm.launch.torch_rendezvous import rendezvous

    return rendezvous(url, timeout)


def _say_more_without_a_rank() -> None:
    """Where torch's own env:// misses a variable for a group of dpcore, its error names dpcore://
    as well. Nothing else changes (docs/decisions/0023)."""
    # torch.distributed.rendezvous is the function of that name.
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    of_torch = handlers["env"]

    def env_handler(url: str, **options: Any) -> Iterator[Any]:
        try:
            yield from of_torch(url, **options)
        except ValueError as error:
            if "expected, but not set" not in str(error) or not _asks_for_dpcore():
                raise
            raise ValueError(
                f"{error}. Under mpirun and srun, or for a world of one, pass "
                'init_method="dpcore://": each rank then finds its place as dpcore.init() does'
            ) from None

    handlers["env"] = env_handler


def _asks_for_dpcore() -> bool:
    """Whether the call of init_process_group that is under way names the backend dpcore: torch does
    not tell handlers."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "init_process_group" and "backend" in frame.f_locals:
            return "dpcore" in str(frame.f_locals["backend"])
        frame = frame.f_back
    return False
