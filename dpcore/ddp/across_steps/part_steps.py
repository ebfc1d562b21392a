"""Steps under "zero1" and "zero2": each rank steps its part of every bucket, and keeps the
state for that part. Under "zero2" it also keeps only that part of the gradients.

The parameters move into flat memory with the same layout as the gradients, so a part of a bucket
is one range in both, even if it cuts a parameter. The optimizer steps *pieces*: each parameter's
share of this rank's part, as a flat tensor over the same memory. Its state is keyed by pieces.
``step()`` makes all updates, each as soon as its reduce-scatter completes; the all-gathers of the
parameters continue under the next forward.

The average of a gradient is spread over the ranks, so ``parameter.grad`` cannot be read: see
``GradientInParts``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dpcore.ddp.across_steps import saved
from dpcore.ddp.across_steps.deferred_step import (
    Groups,
    StepsOfModel,
    hyperparameters_of,
    step_with,
)
from dpcore.ddp.across_steps.in_parts import Guard
from dpcore.ddp.across_steps.layout import BucketLayout, Place, layouts_of
from dpcore.ddp.wrapper.outputs import when_backward_begins
from dpcore.errors import Error, Unsupported

if TYPE_CHECKING:
    from dpcore.ddp.wrapper.wrapped import Wrapped


class Piece(NamedTuple):
    """A parameter's share of this rank's part of a bucket."""

    number: int  # of the parameter
    group: int  # of the optimizer
    begin: int  # in the bucket's flat memory
    end: int
    place: Place  # of the whole parameter
    values: torch.Tensor  # what the optimizer steps


class PartSteps(StepsOfModel):
    """The steps of one ``DistributedOptimizer`` and its model. See ``across_steps.Steps``."""

    def __init__(self, face: Any, model: Wrapped) -> None:
        super().__init__(face, model)
        self._numbers = {id(p): n for n, p in enumerate(model._parameters_by_number)}
        self._group_of: dict[int, int] = {}
        for at, group in enumerate(self._optimizer.param_groups):
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue  # frozen: it is not stepped
                if id(parameter) not in self._numbers:
                    raise Unsupported(
                        f"schedule='{model.schedule}': the optimizer also trains parameters that "
                        "are not of this model; give them an optimizer of their own"
                    )
                self._group_of[self._numbers[id(parameter)]] = at
        _check_memory(model)
        self._layouts: list[BucketLayout] = []
        self._pieces: list[list[Piece]] = []  # by bucket
        self._flats: list[torch.Tensor] = []  # the parameters' flat memory, by bucket
        self._addresses: list[int] = []  # of the gradients' flat memory, when pieces got gradients
        self._recorded: Groups = []
        self._to_load: Mapping[str, Any] | None = None
        self._guard = Guard(model._reducer, model._parameters_by_number)
        self._reducer.defer_by(self._guard)

    # ---- memory ------------------------------------------------------------------------------

    def buckets_are_cut(self) -> None:
        """See ``Steps``. Parameters move into their buckets."""
        group = self._model.group
        self._layouts = layouts_of(self._reducer)
        self._flats = [self._reducer.parameters_of(b) for b in range(len(self._layouts))]
        self._addresses = [0] * len(self._layouts)
        for layout, flat in zip(self._layouts, self._flats, strict=True):
            low, high = layout.part_of(group.rank, group.world_size)
            pieces = []
            for number, place in zip(layout.numbers, layout.places, strict=True):
                self._adopt(number, place.of(flat))
                begin, end = max(place.begin, low), min(place.end, high)
                if begin < end and number in self._group_of:
                    piece = flat[begin:end]
                    pieces.append(Piece(number, self._group_of[number], begin, end, place, piece))
            self._pieces.append(pieces)
        before, self._to_load = self._to_load, None
        if before is None and self._optimizer.state:
            before = self._optimizer.state_dict()  # it stepped before it was wrapped
        self._optimizer.state.clear()
        if before is not None:
            self._load(before)

    def _adopt(self, number: int, view: torch.Tensor) -> None:
        """Moves the parameter's values into the bucket and makes the parameter a view of it."""
        parameter = self._parameters[number]
        with torch.no_grad():
            view.copy_(parameter)
        parameter.data = view

    def before_forward(self) -> None:
        """See ``Steps``. Moves parameters that have left their buckets back. One whose type has
        changed stays where it is, and the reducer raises."""
        for layout, flat in zip(self._layouts, self._flats, strict=True):
            address, size = flat.data_ptr(), flat.element_size()
            for number, place in zip(layout.numbers, layout.places, strict=True):
                parameter = self._parameters[number]
                is_here = parameter.data_ptr() == address + place.begin * size
                if not is_here and parameter.numel() and parameter.dtype == flat.dtype:
                    self._adopt(number, place.of(flat))

    def after_forward(self, output: Any) -> None:
        """See ``Steps``. The program may drop its gradients at any time before backward begins."""
        if self._guard.is_kept() and not when_backward_begins(output, self._check_gradients):
            self._check_gradients()

    def _check_gradients(self) -> None:
        if self._guard.is_kept():
            raise Unsupported(
                f"schedule='{self._model.schedule}': backward found the gradients of the previous "
                "backward. This rank holds only its part of their average, so nothing can be "
                "added to them; call model.zero_grad() between a step and the next backward, and "
                "accumulate gradients within model.no_sync()"
            )

    # ---- a step ------------------------------------------------------------------------------

    def step(self) -> None:
        """Updates this rank's part of every bucket."""
        self._reducer.flush()
        self._recorded = hyperparameters_of(self._optimizer)
        if self._reducer.update_steps():
            return
        if self._guard.is_kept():
            raise Error(
                f"schedule='{self._model.schedule}': step() without a backward since the last one; "
                "this rank has only its part of the gradients"
            )
        if any(self._parameters[number].grad is not None for number in self._group_of):
            raise Error(
                f"schedule='{self._model.schedule}': step() with gradients that were not sent; the "
                "last backward before it has to be of a forward outside no_sync()"
            )

    def update(self, buckets: list[int]) -> None:
        """See ``Steps``."""
        by_group: list[list[torch.Tensor]] = [[] for _ in self._recorded]
        values = []
        for bucket in buckets:
            pieces = self._pieces[bucket]
            self._give_gradients(bucket, pieces)
            for piece in pieces:
                by_group[piece.group].append(piece.values)
            values += [self._parameters[n] for n in self._layouts[bucket].numbers]
        step_with(self._optimizer, self._recorded, by_group.__getitem__)
        torch.autograd.graph.increment_version(values)  # the all-gather is unknown to autograd

    def _give_gradients(self, bucket: int, pieces: list[Piece]) -> None:
        part = self._reducer.part_of(bucket)
        low = self._layouts[bucket].part_of(self._model.group.rank, self._model.group.world_size)[0]
        has_moved = self._addresses[bucket] != part.data_ptr()
        self._addresses[bucket] = part.data_ptr()
        for piece in pieces:
            if self._parameters[piece.number].grad is None:
                piece.values.grad = None  # no rank used it, or the program dropped its gradient
            elif has_moved or piece.values.grad is None:
                piece.values.grad = part[piece.begin - low : piece.end - low]

    def keep_gradients(self) -> None:
        """Does nothing: every recorded step is already applied."""

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """See ``DistributedOptimizer.clip_grad_norm_``."""
        self._reducer.wait_for_gradients()
        gradients = []
        for bucket, pieces in enumerate(self._pieces):
            self._give_gradients(bucket, pieces)
            gradients += [p.values.grad for p in pieces if p.values.grad is not None]
        norms = (
            torch._foreach_norm(gradients, norm_type)
            if gradients
            else [torch.zeros((), device=self._model.device)]
        )
        joined = torch.stack([norm.double() for norm in norms])
        total: torch.Tensor = torch.linalg.vector_norm(joined, norm_type)
        if norm_type == float("inf"):
            self._model._model_group.all_reduce(total, "max", async_op=False)
        else:
            total.pow_(norm_type)
            self._model._model_group.all_reduce(total, "sum", async_op=False)
            total.pow_(1 / norm_type)
        total = total.to(self._parameters[0].dtype.to_real())  # as torch's
        if gradients:
            factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
            torch._foreach_mul_(gradients, factor)
        return total

    def full_gradients(self) -> dict[int, torch.Tensor]:
        """See ``Steps``."""
        self._reducer.wait_for_gradients()
        found = {}
        for bucket, layout in enumerate(self._layouts):
            part = self._reducer.part_of(bucket)
            whole = part.new_empty(layout.elements)
            self._model._model_group.all_gather(whole, part.clone())
            for number, place in zip(layout.numbers, layout.places, strict=True):
                if self._guard.has(number):
                    found[number] = place.of(whole).clone()
        return dict(sorted(found.items()))

    # ---- saving ------------------------------------------------------------------------------

    def _saved_pieces(self) -> list[saved.SavedPiece]:
        index = saved.indices(self._optimizer.param_groups)
        return [
            saved.SavedPiece(
                index[id(self._parameters[piece.number])],
                piece.begin - piece.place.begin,
                piece.end - piece.place.begin,
                piece.place.size,
                piece.place.stride,
                self._optimizer.state.get(piece.values, {}),
            )
            for pieces in self._pieces
            for piece in pieces
        ]

    def state_dict(self) -> dict[str, Any]:
        """See ``DistributedOptimizer``."""
        if not self._pieces:
            return dict(self._to_load or self._optimizer.state_dict())
        group = self._model.group
        return saved.part(
            self._saved_pieces(), self._optimizer.param_groups, group.rank, group.world_size
        )

    def full_state_dict(self) -> dict[str, Any]:
        """See ``DistributedOptimizer``."""
        if not self._pieces:
            return dict(self._to_load or self._optimizer.state_dict())
        return saved.whole(self.state_dict(), self._model._model_group, self._model.device)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See ``DistributedOptimizer``. Before the first forward the state is only stored, and
        loaded once buckets are cut."""
        group = self._model.group
        saved.check_loadable(state_dict, self._optimizer.param_groups, group.rank, group.world_size)
        saved.take_hyperparameters(state_dict, self._optimizer.param_groups)
        state_dict = saved.by_number(state_dict)
        if self._pieces:
            self._load(state_dict)
        else:
            self._to_load = state_dict

    def inner_has_loaded(self) -> None:
        """See ``StepsOfModel``. Its state is of whole parameters."""
        self._to_load = None
        if self._pieces:
            self._load(self._optimizer.state_dict())

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        pieces = [piece for pieces in self._pieces for piece in pieces]
        self._optimizer.state.clear()
        for piece, one in zip(pieces, self._saved_pieces(), strict=True):
            state = saved.state_of(state_dict, one)
            if state:
                group = self._optimizer.param_groups[piece.group]
                self._optimizer.state[piece.values] = saved.converted(state, piece.values, group)


def _check_memory(model: Wrapped) -> None:
    """Parameters move into their buckets, each to a place of its own."""
    names: dict[int, str] = {}
    for number, parameter in enumerate(model._parameters_by_number):
        name = model._reducer.name_of(number)
        other = names.setdefault(parameter.data_ptr(), name) if parameter.data_ptr() else name
        if other != name:
            raise Unsupported(
                f"schedule='{model.schedule}' moves parameters into its buckets, and {other} and "
                f"{name} share their memory, which ties them. Tie them as one parameter "
                "(a.weight = b.weight), or pass schedule='priority'"
            )
