"""``torch.compile`` of a wrapped model: dynamo compiles the inner module and skips our code.

dynamo asks torch's class which DDP's forward is running; what it does with a graph then is in
compiled/tracing.py. The code around forward must not become part of a graph. dynamo skips torch's
own file for that reason, and skips this package once ``introduce`` has been called, after the
program has imported dynamo: importing it here would take seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from dpcore.ddp.compiled import tracing

knows_us = False


def introduce() -> None:
    """Tells dynamo to skip this package. Called before our other functions in traced code."""
    global knows_us
    rules = getattr(sys.modules["torch._dynamo"], "trace_rules", None)
    if rules is not None:  # else another thread is importing it right now
        knows_us = True
        rules.add("dpcore")
        tracing.listen()


def left_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes dynamo neither compile nor inline a function. It may compile the functions it calls."""
    eval_frame: Any = torch._C._dynamo.eval_frame
    action = eval_frame._FrameAction
    eval_frame.set_code_exec_strategy(
        function.__code__, eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
    )
    return function


left_alone(introduce)
