"""A communicator whose collectives a library runs: a process group of torch, MPI, or CuPy's NCCL.

Arguments are checked here, in the contract's words, and buffers become flat tensors. What the
library is then asked for is each kind's own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from dpcore import _C
from dpcore.comm.communicators.checks import (
    check_peer,
    check_presence,
    check_rank,
    check_timeout,
    expect,
    lengths_of,
    refuse,
)
from dpcore.comm.communicators.collectives import Collectives, Work
from dpcore.comm.communicators.torch_buffers import new_tensor, tensor_of
from dpcore.errors import Error, Unsupported


class Kind(NamedTuple):
    """A collective, as the core's table says."""

    name: str
    gives: str  # "whole" of one buffer, its "own part" of one, "all parts", or "nothing"
    gets: str
    reduces: bool
    comes_from_root: bool
    goes_to_root: bool


_KINDS = {row[0]: Kind(*row) for row in _C.collectives()}


class Call(NamedTuple):
    """One operation, as it was asked for."""

    name: str
    async_op: bool
    timeout: float
    op: str = ""
    root: int = -1
    peer: int = -1


class _ByName:
    """Has the methods of the core, each a call of ``perform``."""

    def __init__(self, perform: Callable[..., Any]) -> None:
        self._perform = perform

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._perform, name)


class CheckedCalls(Collectives[Work]):
    """``_all_reduce`` and the others return what ``_run`` starts: the library's own requests."""

    _lacks: frozenset[str]  # options, which are refused
    _who: str  # in that error
    _instead = ""  # what has them
    device = torch.device("cpu")
    _closed = False
    _native: Any = None

    _all_reduce: Callable[[torch.Tensor, str, float], Any]
    _broadcast: Callable[[torch.Tensor, int], Any]
    _reduce: Callable[[torch.Tensor, str, float, int], Any]
    _reduce_scatter: Callable[[torch.Tensor, torch.Tensor, list[int], str, float], Any]
    _all_gather: Callable[[torch.Tensor, torch.Tensor, list[int]], Any]
    _gather: Callable[[torch.Tensor | None, torch.Tensor, list[int], int], Any]
    _scatter: Callable[[torch.Tensor, torch.Tensor | None, list[int], int], Any]
    _all_to_all: Callable[[torch.Tensor, torch.Tensor, list[int], list[int]], Any]
    _send: Callable[[torch.Tensor, int, int], Any]
    _recv: Callable[[torch.Tensor, int | None, int], Any]
    _barrier: Callable[[], Any]

    @abstractmethod
    def _run(
        self, call: Call, flat: torch.Tensor | None, requests: Any, *buffers: Any
    ) -> Work | None:
        """Starts the requests. ``flat`` counts in statistics; of ``buffers`` the first is the
        result."""

    def _flat(self, buffer: Any) -> torch.Tensor:
        """The memory of a buffer as a flat tensor."""
        return tensor_of(buffer).detach().reshape(-1)

    def _check_open(self) -> None:
        if self.closed:
            raise Error(
                f"rank {self.rank}: this communicator was finalized; call init() for a new one"
            )

    @property
    def _calls(self) -> _ByName:
        return _ByName(self._perform)

    @staticmethod
    def _handle(work: Work, result: list[Any]) -> Work:
        return work

    def _perform(self, name: str, *buffers: Any, **options: Any) -> Work | None:
        """Everything is checked before anything is touched."""
        lacking = {option: options[option] for option in self._lacks & options.keys()}
        refuse(lacking, self._who, self._instead)
        check_timeout(options["timeout"])
        self._check_open()
        root = options.get("root", -1)
        call = Call(name, options["async_op"], options["timeout"], options.get("op", ""), root)
        if "root" in options:
            check_rank(root, self.world_size, "root")
        kind = _KINDS.get(name)
        flat: torch.Tensor | None = None
        asked: list[Any] = []
        if kind is None:
            tensor, peer = buffers
            if peer is not None or name == "send":
                check_peer(peer, self.rank, self.world_size)
                call = call._replace(peer=peer)
            flat, buffers = self._flat(tensor), (tensor,)
            asked = [flat, peer, options["tag"]]
        elif kind.gives == "whole":
            flat = self._flat(*buffers)
            asked = [flat]
        elif kind.gives != "nothing":
            target, given = buffers
            asked = self._parts(kind, target, given, options)
            flat = asked[0 if name in ("all_gather", "scatter") else 1]
        asked += [options[key] for key in ("op", "factor", "root") if key in options]
        return self._run(call, flat, getattr(self, f"_{name}")(*asked), *buffers)

    def _parts(self, kind: Kind, output: Any, input: Any, options: dict[str, Any]) -> list[Any]:
        """What comes to and from this rank, and the elements in each rank's part of it."""
        world = self.world_size
        if kind.goes_to_root:
            check_presence(output, "output", self.rank, options["root"])
        if kind.comes_from_root:
            check_presence(input, "input", self.rank, options["root"])
        target = None if kind.goes_to_root and output is None else self._flat(output)
        own = None if kind.comes_from_root and input is None else self._flat(input)
        if target is not None and own is not None and target.dtype != own.dtype:
            raise Unsupported(f"input is {own.dtype}, output is {target.dtype}")
        sides = (own, "input"), (target, "output")
        (part, role), (whole, role_of_whole) = sides if kind.gives == "own part" else sides[::-1]
        assert part is not None  # every rank has one
        if kind.gives != kind.gets:
            lengths = lengths_of(options["input_sizes"], part.numel(), world)
            expect(part.numel(), lengths[self.rank], role)
            if whole is not None:
                expect(whole.numel(), sum(lengths), role_of_whole)
            return [target, own, lengths]
        assert own is not None and target is not None
        sends = lengths_of(options["input_sizes"], own.numel() // world, world)
        takes = lengths_of(options["output_sizes"], sends[0], world)
        expect(own.numel(), sum(sends), "input")
        expect(target.numel(), sum(takes), "output")
        return [target, own, takes, sends]

    # ---- memory and life ---------------------------------------------------------------------

    def empty(self, *shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Ordinary memory: libraries read and write it as it is."""
        return new_tensor(shape, dtype=dtype, device=self.device)

    @property
    def closed(self) -> bool:
        """Whether ``close()``, ``finalize()`` or ``abort()`` was called."""
        return self._closed
