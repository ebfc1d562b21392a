"""Loads the compiled core that fits the installed torch, and makes it ``dpcore._C``.

``_C.pyi`` says what is in it.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ExtensionFileLoader
from pathlib import Path

from dpcore.base.core_choice import NoCore, fitting, without_torch


def _load(path: Path) -> None:
    loader = ExtensionFileLoader("dpcore._C", str(path))
    spec = importlib.util.spec_from_file_location("dpcore._C", path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules["dpcore._C"] = module  # in the place of this one


try:
    import torch  # with it come the libraries that the core needs
except ModuleNotFoundError as missing:
    if missing.name != "torch":
        raise
    raise NoCore(without_torch()) from None

_load(fitting(torch.__version__))
