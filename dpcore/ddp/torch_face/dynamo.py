"""``torch.compile`` of a wrapped model: dynamo compiles the module within and leaves us alone.

dynamo asks torch's class for the model whose forward runs, and splits the graph of the module
where that model's buckets end, so that gradients arrive bucket by bucket. What happens around
forward must not become part of a graph. dynamo skips torch's own file for that, and is told to skip
ours as soon as somebody has imported it: importing it ourselves would cost seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

knows_us = False


def introduce() -> None:
    """Before any other function of this package runs in a region that dynamo looks at."""
    global knows_us
    rules = getattr(sys.modules["torch._dynamo"], "trace_rules", None)
    if rules is not None:  # else another thread is importing it right now
        knows_us = True
        rules.add("dpcore")


def left_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that dynamo neither compiles nor inlines, while it may compile what is called."""
    eval_frame: Any = torch._C._dynamo.eval_frame
    action = eval_frame._FrameAction
    eval_frame.set_code_exec_strategy(
        function.__code__, eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
    )
    return function


left_alone(introduce)
