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

from typing import TYPE_CHECKING, Any

from dpcore.communicators.protocol import Operator
from dpcore.communicators.work import Work
from dpcore.launch.session import current

if TYPE_CHECKING:
    _current = current()  # for type checkers the functions are its methods
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
else:

    def all_reduce(tensor: Any, op: Operator = "sum", **options: Any) -> Work | None:
        """See ``Communicator.all_reduce``."""
        return current().all_reduce(tensor, op, **options)

    def reduce_scatter(
        output: Any, input: Any, op: Operator = "sum", **options: Any
    ) -> Work | None:
        """See ``Communicator.reduce_scatter``."""
        return current().reduce_scatter(output, input, op, **options)

    def all_gather(output: Any, input: Any, **options: Any) -> Work | None:
        """See ``Communicator.all_gather``."""
        return current().all_gather(output, input, **options)

    def broadcast(tensor: Any, root: int = 0, **options: Any) -> Work | None:
        """See ``Communicator.broadcast``."""
        return current().broadcast(tensor, root, **options)

    def reduce(tensor: Any, root: int = 0, op: Operator = "sum", **options: Any) -> Work | None:
        """See ``Communicator.reduce``."""
        return current().reduce(tensor, root, op, **options)

    def gather(output: Any | None, input: Any, root: int = 0, **options: Any) -> Work | None:
        """See ``Communicator.gather``."""
        return current().gather(output, input, root, **options)

    def scatter(output: Any, input: Any | None, root: int = 0, **options: Any) -> Work | None:
        """See ``Communicator.scatter``."""
        return current().scatter(output, input, root, **options)

    def all_to_all(output: Any, input: Any, **options: Any) -> Work | None:
        """See ``Communicator.all_to_all``."""
        return current().all_to_all(output, input, **options)

    def send(tensor: Any, dst: int, **options: Any) -> Work | None:
        """See ``Communicator.send``."""
        return current().send(tensor, dst, **options)

    def recv(tensor: Any, src: int | None, **options: Any) -> Work | None:
        """See ``Communicator.recv``."""
        return current().recv(tensor, src, **options)

    def barrier(**options: Any) -> Work | None:
        """See ``Communicator.barrier``."""
        return current().barrier(**options)
