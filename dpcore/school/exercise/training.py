"""What the checks of data parallel training have in common: models, batches, and training alone.

Students' wrappers are made by ``make(module, comm)`` and have ``__call__`` and ``finish()``, which
is called between backward and the optimizer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from time import sleep
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dpcore.school.exercise.watching import Watch

if TYPE_CHECKING:
    from dpcore.school.exercise.on_rank import Stage

SAMPLES = 12  # of all ranks together: divisible by 2, 3 and 4
LEARNING_RATE, MOMENTUM = 0.05, 0.9


class Small(nn.Module):
    """An MLP in double precision with a buffer, and with a parameter that is not trained."""

    shift: torch.Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 16, dtype=torch.float64)
        self.middle = nn.Linear(16, 16, dtype=torch.float64)
        self.last = nn.Linear(16, 3, dtype=torch.float64)
        self.scale = nn.Parameter(1 + torch.rand(3, dtype=torch.float64), requires_grad=False)
        self.register_buffer("shift", torch.randn(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.middle(torch.tanh(self.first(x))))
        result: torch.Tensor = self.last(hidden) * self.scale + self.shift
        return result


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs and targets of all ranks together."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(SAMPLES, 6, dtype=torch.float64, generator=generator)
    return x, torch.randn(SAMPLES, 3, dtype=torch.float64, generator=generator)


def part(tensor: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    return tensor.chunk(world)[rank]


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers and parameters under the names that checks use. Buffers come first, since a wrong one
    makes all gradients wrong."""
    found = {f"the buffer {name}": b.clone() for name, b in module.named_buffers()}
    return found | {name: p.detach().clone() for name, p in module.named_parameters()}


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def items_of(value: Any, seen: set[int] | None = None) -> int:
    """How many things lie in a list or dictionary, and in those within it."""
    seen = set() if seen is None else seen
    if id(value) in seen or not isinstance(value, dict | list | tuple | set | deque):
        return 0
    seen.add(id(value))
    parts = value.values() if isinstance(value, dict) else value
    return len(value) + sum(items_of(part, seen) for part in parts)


def kept_by(model: Any, parameters: Iterable[int]) -> dict[str, Any]:
    """What a wrapper has, beside the parameters with these addresses: how many items each of its
    attributes has, and the elements of all tensors."""
    parts = getattr(model, "__dict__", {})
    items = {name: items_of(value) for name, value in parts.items()}
    return {"items": items, "elements": elements_of(parts, parameters)}


def elements_of(value: Any, known: Iterable[int] = (), seen: set[int] | None = None) -> int:
    """Elements of the memory behind all tensors that can be reached from a value, each once;
    without the memory that is ``known`` by its address, such as that of parameters."""
    seen = set(known) if seen is None else seen
    if isinstance(value, torch.Tensor):
        memory = value.untyped_storage()
        if {memory.data_ptr(), value.data_ptr()} & seen or not value.numel():
            return 0
        seen.add(memory.data_ptr())
        return memory.nbytes() // value.element_size()
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, dict):
        return sum(elements_of(part, (), seen) for part in value.values())
    if isinstance(value, list | tuple | set):
        return sum(elements_of(part, (), seen) for part in value)
    if hasattr(value, "__dict__") and type(value).__module__.startswith("dpcore_exercise"):
        return elements_of(vars(value), (), seen)
    return 0


class Momentum:
    """torch.optim.SGD with momentum, without the seconds that it takes to import."""

    def __init__(self, module: nn.Module) -> None:
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self._velocity = [torch.zeros_like(p) for p in self._trained]

    def zero_grad(self) -> None:
        for parameter in self._trained:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for parameter, velocity in zip(self._trained, self._velocity, strict=True):
            if parameter.grad is not None:
                velocity.mul_(MOMENTUM).add_(parameter.grad)
                parameter.sub_(velocity, alpha=LEARNING_RATE)


def _backward(loss: Any) -> None:
    loss.backward()


def train(on: Stage, make: Callable[[nn.Module, Any], Any], steps: int = 4) -> dict[str, Any]:
    """What a wrapper has made of a model: its values at the beginning and at the end, the gradients
    of each step, what was sent, what is kept, which calls have held up backward, and how many were
    begun by the time that each gradient had come."""
    module = Small(seed=7 + on.rank)
    model = make(module, on.comm)
    found: dict[str, Any] = {"begin": values(module), "gradients": [], "sent": [], "kept": []}
    found["blocked"], found["begun"] = [], []
    before = 0  # calls before this step

    def note(name: str) -> Any:
        return lambda _: found["begun"][-1].append([name, len(on.calls) - before])

    named: Any = module.named_parameters()
    for name, parameter in named:
        if parameter.requires_grad:  # the wrapper has registered its hooks already, which run first
            parameter.register_post_accumulate_grad_hook(note(name))
    parameters = [parameter.data_ptr() for parameter in module.parameters()]
    optimizer = Momentum(module)
    for step in range(steps):
        on.step = step + 1
        optimizer.zero_grad()
        x, y = (part(tensor, on.rank, on.world_size) for tensor in batch(step))
        with on.watch() as seen:
            before = len(on.calls)
            found["begun"].append([])
            _backward(nn.functional.mse_loss(model(x), y))
            found["blocked"].append([str(call) for call in on.calls[before:] if call.blocks])
            getattr(model, "finish", int)()
        found["gradients"].append(gradients(module))
        found["sent"].append(seen.sent())
        found["has_model"] = seen.has_model
        found["kept"].append(kept_by(model, parameters))
        optimizer.step()
    found["end"], found["misuse"] = values(module), on.misuse()
    return found


def train_alone(world: int = 3, steps: int = 4) -> dict[str, Any]:
    """The same in one process with the whole batch. ``own`` and ``local`` are what each rank begins
    with, and the gradients of its part of each batch."""
    module = Small(seed=7)
    found: dict[str, Any] = {"begin": values(module), "gradients": [], "local": []}
    found["own"] = [values(Small(seed=7 + rank)) for rank in range(world)]
    optimizer = Momentum(module)
    for step in range(steps):
        x, y = batch(step)
        found["local"].append([])
        for rank in range(world):
            optimizer.zero_grad()
            _backward(nn.functional.mse_loss(module(part(x, rank, world)), part(y, rank, world)))
            found["local"][step].append(gradients(module))
        optimizer.zero_grad()
        _backward(nn.functional.mse_loss(module(x), y))
        found["gradients"].append(gradients(module))
        optimizer.step()
    found["end"] = values(module)
    return found


class Turned(nn.Module):
    """The same layers on all ranks. On odd ranks, their gradients arrive in the opposite order."""

    def __init__(self, is_turned: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(32, 32, dtype=torch.float64) for _ in range(4))
        self._is_turned = is_turned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers) if self._is_turned else self.layers:
            x = torch.tanh(layer(x))
        return x


def turned_input(rank: int) -> torch.Tensor:
    return torch.linspace(-1, 1 + rank, 64, dtype=torch.float64).reshape(2, 32)


def train_turned(on: Stage, make: Callable[[nn.Module, Any], Any]) -> list[Any]:
    """Gradients of a step in which ranks disagree about the order."""
    module = Turned(on.rank % 2 == 1)
    model = make(module, on.comm)
    found = []
    for step in (1, 2):
        on.step = step
        module.zero_grad()
        model(turned_input(on.rank)).square().sum().backward()
        getattr(model, "finish", int)()
        found.append(gradients(module))
    return found


def turned_alone(world: int) -> dict[str, torch.Tensor]:
    """The mean over ranks."""
    each = []
    for rank in range(world):
        module = Turned(rank % 2 == 1)
        module(turned_input(rank)).square().sum().backward()
        each.append(gradients(module))
    return {name: torch.stack([one[name] for one in each]).mean(0) for name in each[0]}


# ---- slow layers over a slow link --------------------------------------------------------------


class _Slow(torch.autograd.Function):
    """Backward takes a while without taking a processor, and notes when it began."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, note: Callable[[], None], seconds: float) -> Any:
        ctx.note, ctx.seconds = note, seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.note()
        sleep(ctx.seconds)
        return grads[0], None, None


_slow: Any = _Slow.apply


class SlowLayers(nn.Module):
    """Layers whose backward takes ``layer_ms`` each, whatever else the machine does. ``begun`` has
    the moments at which it began, from the last layer to the first."""

    def __init__(
        self, clock: Callable[[], float], layers: int, width: int, layer_ms: float
    ) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.begun: list[float] = []
        self._clock, self._seconds = clock, layer_ms * 1e-3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = _slow(layer(x), lambda: self.begun.append(self._clock()), self._seconds)
        return x


def train_slowly(
    on: Stage,
    make: Callable[[nn.Module, Any], Any],
    steps: int = 4,
    layers: int = 6,
    width: int = 256,
    layer_ms: float = 20.0,
) -> list[dict[str, Any]]:
    """What was sent, and when, in each step of a model with slow layers."""
    module = SlowLayers(on.clock, layers, width, layer_ms)
    model = make(module, on.comm)
    x = torch.ones(4, width) * (on.rank + 1)
    found = []
    for step in range(1, steps + 1):
        on.step = step
        module.zero_grad()
        module.begun.clear()
        loss = model(x).square().mean()
        on.barrier()
        watch: Watch = on.watch()
        with watch:
            loss.backward()
            backward_end = on.clock()
            getattr(model, "finish", int)()
        found.append(
            {
                "sent": watch.sent(),
                "early": watch.launched_before(module.begun[-1]),
                "in_backward": watch.launched_before(backward_end),
                "waited_in_backward_ms": watch.waited_until(backward_end),
                "backward_ms": backward_end - watch.begin,
                "step_ms": watch.end - watch.begin,
                "sizes": [4 * width * width] * layers,
            }
        )
    return found
