"""What other libraries call things: ``dist.ReduceOp.SUM``, ``"AVG"``, ``comm.Allreduce``."""

from __future__ import annotations

from typing import Any

from dpcore.comm.communicators.checks import OPERATORS
from dpcore.errors import Unsupported

_OPERATORS = {"avg": "mean", "average": "mean", "product": "prod"}

# In lower case; what is meant, as one would type it.
_METHODS = {
    "allreduce": "all_reduce",
    "iallreduce": "all_reduce(..., async_op=True)",
    "bcast": "broadcast",
    "ibcast": "broadcast(..., async_op=True)",
    "reducescatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_block": "reduce_scatter",
    "allgather": "all_gather",
    "allgatherv": "all_gather(..., sizes=[...])",
    "all_gather_into_tensor": "all_gather",
    "gatherv": "gather(..., sizes=[...])",
    "scatterv": "scatter(..., sizes=[...])",
    "alltoall": "all_to_all",
    "alltoallv": "all_to_all(..., output_sizes=[...], input_sizes=[...])",
    "all_to_all_single": "all_to_all",
    "isend": "send(..., async_op=True)",
    "irecv": "recv(..., async_op=True)",
    "ibarrier": "barrier(async_op=True)",
    "get_rank": "rank",
    "size": "world_size",
    "get_size": "world_size",
    "get_world_size": "world_size",
    "new_group": "split",
    "free": "close",
    "destroy": "close",
    "destroy_process_group": "close",
}
_METHODS |= {name: name for name in ("broadcast", "reduce", "gather", "scatter", "send", "recv")}
_METHODS |= {"barrier": "barrier", "split": "split", "abort": "abort"}


def operator_name(op: Any) -> str:
    """dpcore's word for an operator of its own, of torch or of mpi4py, else ``Unsupported``.

    >>> operator_name("AVG")
    'mean'
    """
    kind = getattr(op, "op", op)  # torch has operators, and objects that hold one
    name = op if isinstance(op, str) else getattr(kind, "name", None)
    if not isinstance(name, str):
        raise TypeError(f'op: expected a name such as "sum", or dist.ReduceOp.SUM, not {op!r}')
    if name == "PREMUL_SUM" and kind is not op:
        raise Unsupported(f'torch\'s {name}: pass op="premul_sum", factor={op.factor}')
    low = name.lower().removeprefix("mpi_")
    low = _OPERATORS.get(low, low)
    if low not in OPERATORS:
        raise Unsupported(f'unknown reduction "{name}": use {", ".join(OPERATORS)}')
    return low


def meant_by(name: str) -> str:
    """What dpcore calls a method of torch.distributed or mpi4py, or nothing.

    >>> meant_by("Allreduce"), meant_by("all_reduce_fast")
    ('all_reduce', '')
    """
    return _METHODS.get(name.lower(), "")


class _Elsewhere:
    """An attribute that is not there, and says what is."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        raise AttributeError(
            f"{owner.__name__!r} object has no attribute {self._name!r}; it is called "
            f"{meant_by(self._name)}"
        )


class OtherNames:
    """A communicator whose attributes are looked for under the names of another library.

    An attribute for each of them: a class with ``__getattr__`` would make all of its attributes
    slower, and a small all-reduce by a fifth.
    """

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if hasattr(self, name)]


for _name in {*_METHODS, *(name.capitalize() for name in _METHODS)}:
    if _METHODS[_name.lower()] != _name:
        _attribute = _Elsewhere()
        _attribute.__set_name__(OtherNames, _name)
        setattr(OtherNames, _name, _attribute)
