"""Training with a schedule across steps is training with `bucketed`, to the bit.

Both sides run the same program on the same ranks, one after the other, with ``deterministic=True``.
The numbers that a program sees on the way, the weights and the optimizer's state have to be equal.
"""

import io
import weakref

import pytest
import torch
from torch import nn

import dpcore
from tests.across_steps.models import INPUTS, Chain
from tests.across_steps.programs import CASES
from tests.across_steps.sides import OPTIMIZERS, Wrapped
from tests.data_parallel.models import seeded

WHOLE, CUT = ("priority", "dear"), ("zero1", "zero2")  # gradients, on every rank
SCHEDULES = WHOLE + CUT
WORLDS = (1, 2, 3, 4)
CLOSE = {"rtol": 1e-10, "atol": 1e-13}


def seen(side, case):
    numbers = case.program(side)
    return {"numbers": numbers, "weights": side.weights(), "state": side.state()}


def assert_equal(mine, others, where="", **tolerance):
    """The same types, names and bits, or numbers that are close."""
    if isinstance(mine, torch.Tensor):
        mine, others = mine.cpu(), others.cpu()  # of a GPU's optimizer, the whole state is there
        if tolerance:
            torch.testing.assert_close(
                mine, others, msg=lambda text: f"{where}: {text}", **tolerance
            )
        else:
            assert torch.equal(mine, others), f"{where}: {mine} is not {others}"
    elif isinstance(mine, dict):
        assert mine.keys() == others.keys(), where
        for name in mine:
            assert_equal(mine[name], others[name], f"{where}.{name}", **tolerance)
    elif isinstance(mine, list | tuple):
        assert len(mine) == len(others), where
        for number, pair in enumerate(zip(mine, others, strict=True)):
            assert_equal(*pair, f"{where}[{number}]", **tolerance)
    elif isinstance(mine, float) and tolerance:
        assert mine == pytest.approx(others, rel=tolerance["rtol"], abs=tolerance["atol"]), where
    else:
        assert mine == others, where


def gives_what_bucketed_gives(comm, case, is_exact=True):
    """A rank: every schedule, with each optimizer."""
    tolerance = {} if case.is_exact and is_exact else CLOSE
    schedules = SCHEDULES if case.is_for_zero1 else WHOLE
    for kind in OPTIMIZERS:
        expected = seen(Wrapped(comm, case, kind, "bucketed"), case)
        for schedule in schedules:
            mine = seen(Wrapped(comm, case, kind, schedule), case)
            assert_equal(mine, expected, f"{schedule} {kind}", **tolerance)


@pytest.mark.usefixtures("one_processor")
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", CASES)
def test_every_program_gives_the_bits_of_bucketed(name, world):
    dpcore.spawn(gives_what_bucketed_gives, world, CASES[name], mode="threads", timeout=20)


@pytest.mark.parametrize("schedule", CUT)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.is_for_zero1])
def test_a_program_that_needs_whole_gradients_is_refused(name, schedule):
    case = CASES[name]

    def body(comm):
        case.program(Wrapped(comm, case, "sgd", schedule))

    with pytest.raises(dpcore.Unsupported, match="schedule='zero"):
        dpcore.spawn(body, 2, mode="threads", timeout=20)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_single_precision_too(schedule):
    case = CASES["learning rates"]

    def body(comm):
        for kind in OPTIMIZERS:
            sides = [
                Wrapped(comm, case, kind, one, dtype=torch.float32)
                for one in (schedule, "bucketed")
            ]
            assert_equal(*(seen(side, case) for side in sides), kind)

    dpcore.spawn(body, 3, mode="threads", timeout=20)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_large_buckets_between_hosts(schedule):
    """There an operation is announced before what it sends is there."""

    def trained(comm, one):
        torch.manual_seed(0)
        model = dpcore.DataParallel(
            Chain(width=300), comm=comm, schedule=one, bucket_cap_mb=0.3, deterministic=True
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if one != "bucketed":
            optimizer = dpcore.DistributedOptimizer(optimizer, model)
        for step in range(4):
            torch.manual_seed(1 + comm.rank + 2 * step)
            model(torch.randn(8, INPUTS)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    def body(comm):
        assert_equal(trained(comm, schedule), trained(comm, "bucketed"))

    dpcore.spawn(body, 2, transport="tcp", timeout=20)


def through_a_file(state):
    """As a program that begins later finds it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_training_goes_on_in_another_world(schedule, kind):
    """Also where it was begun by the plain optimizer, or is ended by it."""
    case = CASES["plain"]

    def first(comm, one):
        side = Wrapped(comm, case, kind, one)
        case.program(side)
        return [side.weights(), side.state()]

    def second(comm, one, saved):
        side = Wrapped(comm, case, kind, one)
        weights, state = through_a_file(saved)  # of its own: an optimizer keeps what it loads
        side.model.module.load_state_dict(weights)
        side.optimizer.load_state_dict(state)
        case.program(side)
        return [side.weights(), side.state()]

    def trained(worlds, schedules):
        saved = dpcore.spawn(first, worlds[0], schedules[0], mode="threads", timeout=20)[0]
        return dpcore.spawn(second, worlds[1], schedules[1], saved, mode="threads", timeout=20)[0]

    for worlds in ((2, 3), (4, 1)):
        expected = trained(worlds, ("bucketed", "bucketed"))
        for pair in ((schedule, schedule), ("bucketed", schedule), (schedule, "bucketed")):
            assert_equal(trained(worlds, pair), expected, str((worlds, pair)))


class OfOneNumber(nn.Module):
    """Has a parameter without dimensions, as CLIP's logit_scale is."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.layer = nn.Linear(INPUTS, 3)

    def forward(self, x):
        return self.scale * self.layer(x)


@pytest.mark.parametrize("kind", (torch.optim.AdamW, torch.optim.Adagrad, torch.optim.NAdam))
@pytest.mark.parametrize("schedule", CUT)
def test_a_parameter_without_dimensions_goes_on(schedule, kind):
    def made(comm):
        model = dpcore.DataParallel(seeded(OfOneNumber), comm=comm, schedule=schedule)
        return model, dpcore.DistributedOptimizer(kind(model.parameters(), lr=0.1), model)

    def two_steps(model, optimizer):
        for number in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, INPUTS) + number).square().sum().backward()
            optimizer.step()
        optimizer.zero_grad()

    def body(comm):
        sides = made(comm), made(comm)
        (model, optimizer), (again, other) = sides
        two_steps(model, optimizer)
        again.module.load_state_dict(model.module.state_dict())
        other.load_state_dict(through_a_file(optimizer.full_state_dict()))
        for side in sides:
            two_steps(*side)
        assert_equal(again.module.state_dict(), model.module.state_dict())
        state = other.full_state_dict()
        assert_equal(state, optimizer.full_state_dict())
        assert {value.shape for value in state["state"][0].values()} == {()}

    dpcore.spawn(body, 2, mode="threads", timeout=20)


@pytest.mark.parametrize("schedule", CUT)
def test_a_state_of_all_ranks_is_dropped_when_each_has_its_part(schedule):
    case = CASES["plain"]

    def body(comm):
        side, again = (Wrapped(comm, case, "adamw", schedule) for _ in range(2))
        case.program(side)
        state = side.optimizer.full_state_dict()
        again.optimizer.load_state_dict(state)
        whole = weakref.ref(state["state"][0]["exp_avg"])
        del state
        assert whole() is not None
        case.program(again)
        assert whole() is None

    dpcore.spawn(body, 2, mode="threads", timeout=20)


def test_a_rank_keeps_its_part_of_the_state():
    case = CASES["plain"]

    def body(comm):
        side = Wrapped(comm, case, "adamw", "zero1")
        case.program(side)
        of_all = sum(p.numel() for p in side.model.parameters())
        tensors = [t for t in tensors_in(side.optimizer.state_dict()["state"]) if t.dim() > 0]
        return sum(t.numel() for t in tensors), of_all

    for world in (2, 4):
        for mine, of_all in dpcore.spawn(body, world, mode="threads"):
            assert 0 < mine <= 2 * of_all / world * 1.2


def test_a_rank_keeps_its_part_of_the_gradients():
    """And memory for four whole buckets, though there are more."""
    case = CASES["plain"]

    def body(comm):
        side = Wrapped(comm, case, "adamw", "zero2")
        side.backward(0)
        reducer = side.model._reducer
        with torch._C.DisableTorchFunctionSubclass():
            addresses = [p.grad.data_ptr() for p in side.model.parameters()]
        buckets = range(reducer.buckets)
        whole = {flat.data_ptr() for flat in map(reducer.flat_of, buckets)}
        kept = [reducer.part_of(bucket).untyped_storage().nbytes() for bucket in buckets]
        of_all = sum(reducer.flat_of(bucket).nbytes for bucket in buckets)
        ends = {flat.data_ptr() + flat.nbytes for flat in map(reducer.flat_of, buckets)}
        in_grad = all(min(whole) <= address < max(ends) for address in addresses)
        side.step()
        return len(buckets), len(whole), sum(kept) * comm.world_size == of_all, in_grad

    for world in (2, 3):
        for buckets, whole, keeps_part, in_grad in dpcore.spawn(body, world, mode="threads"):
            assert buckets > 4 == whole
            assert keeps_part
            assert in_grad  # and no memory of their own


def tensors_in(state):
    if isinstance(state, torch.Tensor):
        return [state]
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]
