"""What torch calls at the end of its own import (the entry point ``torch.backends``).

``init_process_group("dpcore")`` then works in a program that never imports dpcore. Nothing heavy
may happen here, and nothing may be raised: an exception would break ``import torch``.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Makes the name "dpcore" known to torch.distributed. Calling it again does nothing."""
    try:
        import torch.distributed as dist

        if dist.is_available() and "DPCORE" not in dist.Backend._plugins:
            devices = ["cpu", "cuda"]
            dist.Backend.register_backend("dpcore", _create, extended_api=True, devices=devices)
    except Exception:
        return


def _create(options: Any, backend_options: Any) -> Any:
    from dpcore.torch_backend import create

    return create(options, backend_options)
