"""The collectives of ``Communicator`` as functions on the communicator of ``dpcore.init()``.

>>> import dpcore as dp
>>> comm = dp.init(rank=0, world_size=1)
>>> import numpy as np
>>> x = np.ones(3)
>>> dp.all_reduce(x)
>>> x.tolist()
[1.0, 1.0, 1.0]
>>> dp.finalize()
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from dpcore.comm.communicators.native import Communicator
from dpcore.comm.launch.session import current


class _OfCurrent:
    """Each attribute is a function that calls the method of this name of the communicator that is
    current then."""

    def __getattr__(self, name: str) -> Any:
        method = getattr(Communicator, name)

        @functools.wraps(method)
        def function(*arguments: Any, **options: Any) -> Any:
            return getattr(current(), name)(*arguments, **options)

        _, *parameters = inspect.signature(method).parameters.values()
        signature = inspect.signature(method).replace(parameters=parameters)
        function.__signature__ = signature  # type: ignore[attr-defined]
        function.__module__, function.__qualname__ = __name__, name
        return function


_current = current() if TYPE_CHECKING else _OfCurrent()  # for type checkers, its own methods
all_reduce = _current.all_reduce
reduce_scatter = _current.reduce_scatter
all_gather = _current.all_gather
broadcast = _current.broadcast
reduce = _current.reduce
gather = _current.gather
scatter = _current.scatter
all_to_all = _current.all_to_all
send = _current.send
recv = _current.recv
barrier = _current.barrier
