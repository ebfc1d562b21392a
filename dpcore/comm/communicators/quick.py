"""Calls without options enter no Python function, see ``csrc/bindings/quick_method.cpp``."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

from dpcore import _C
from dpcore.comm.communicators.checks import OPERATORS

Function = TypeVar("Function", bound=Callable[..., Any])


def quick(function: Function) -> Function:
    """A plain call goes straight to the core's method of this name; every other call is left to the
    function."""
    text = cast("FunctionType", function)
    names = text.__code__.co_varnames[1 : text.__code__.co_argcount]  # without self
    positional = len(names) - len(text.__defaults__ or ())
    return _C.quick_method(function, names, positional, OPERATORS)
