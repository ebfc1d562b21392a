"""NaN and Inf: the rank, the parameter and the element, before an optimizer steps with them; and
not a word where a program handles them itself."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler

import dpcore
from tests.data_parallel.models import seeded
from tests.ranks.groups import in_group

SMALL, LARGE = 40, 30_000  # hidden features: in one chunk of the stage, and in slices per rank
ACROSS = ("priority", "dear", "zero1", "zero2")
ELEMENT = 17  # of layers.0.weight, whose rows have 8 elements


class Layers(nn.Module):
    """In backward, the gradient of its first layer gets what ``poison`` says."""

    def __init__(self, width, dtype=torch.float32):
        super().__init__()
        self.layers = seeded(lambda: nn.Sequential(nn.Linear(8, width), nn.Linear(width, 2))).to(
            dtype
        )
        self.poison = {}
        self.layers[0].weight.register_hook(self._poisoned)

    def _poisoned(self, gradient):
        gradient = gradient.clone()
        for element, value in self.poison.items():
            gradient.view(-1)[element] = value
        return gradient

    def forward(self, x):
        return self.layers(x)


class Training:
    """A wrapped model and its optimizer; ``told`` has what was said of mistakes."""

    def __init__(self, comm, width=SMALL, dtype=torch.float32, **options):
        self.comm = comm
        self.model = dpcore.DataParallel(Layers(width, dtype), comm=comm, **options)
        self.dtype, self.told = dtype, []
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        if options.get("schedule") in ACROSS:
            optimizer = dpcore.DistributedOptimizer(optimizer, self.model)
        self.optimizer = optimizer
        if self.model._mistakes.mode == "warn":  # ranks are threads, and share Python's warnings
            self.model._mistakes.warn = lambda kind, text: self.told.append(text)

    def backward(self, **poison):
        self.model.module.poison = {int(name[1:]): value for name, value in poison.items()}
        loss = self.model(torch.ones(3, 8, dtype=self.dtype)).sum() * 1e-3
        loss.backward()

    def step(self, **poison):
        """Poisons this rank's gradient: ``e17=math.nan`` its element 17."""
        self.optimizer.zero_grad()
        self.backward(**poison)
        self.optimizer.step()

    def parameters(self):
        self.model.flush()
        return [p.detach().clone() for p in self.model.module.parameters()]


def one_poisoned_step(comm, rank, width, dtype, options):
    """What each rank tells of a NaN of this rank in its second step; and the paths that ran."""
    training = Training(comm, width, dtype, **options)
    training.step()
    assert training.told == []
    training.step(**({f"e{ELEMENT}": math.nan} if comm.rank == rank else {}))
    training.model.flush()
    return training.told, comm.stats()


def assert_told_of(rank, results, element=ELEMENT):
    texts = [text for told, _ in results for text in told]
    assert texts
    for number, (told, _) in enumerate(results):
        for text in told:
            assert text.startswith(
                f"rank {number}: step 2: rank {rank}'s gradient of layers.0.weight is not finite, "
                f"first at element {element}; the average"
            ), text
            assert "has 1 NaN among" in text or "the average goes to every rank" in text
            assert f"Look at the loss and the inputs of rank {rank} in step 2" in text
            assert "set_detect_anomaly" in text


# ---- every way in which gradients are added --------------------------------------------------


@pytest.mark.parametrize("world", (2, 3))
@pytest.mark.parametrize(
    ("width", "path"), ((SMALL, "one_shot/stage"), (LARGE, "two_shot/push")), ids=("small", "large")
)
def test_rank_parameter_and_element_are_named(world, width, path):
    for rank in range(world):
        results = dpcore.spawn(
            one_poisoned_step, world, rank, width, torch.float32, {}, mode="threads"
        )
        assert_told_of(rank, results)
        assert all(len(told) == 1 and path in str(stats) for told, stats in results)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float64))
def test_other_types(dtype):
    results = dpcore.spawn(one_poisoned_step, 2, 1, LARGE, dtype, {}, mode="threads")
    assert_told_of(1, results)


@pytest.mark.parametrize("schedule", ("sequential", "per_parameter", *ACROSS))
def test_schedules(schedule):
    for width in (SMALL, LARGE):
        results = dpcore.spawn(
            one_poisoned_step, 2, 1, width, torch.float32, {"schedule": schedule}, mode="threads"
        )
        assert_told_of(1, results)


@pytest.mark.parametrize("algorithm", ("ring", "tree", "halving_doubling", "one_shot", "two_shot"))
def test_lists_of_moves(algorithm):
    """A rank that adds a sum of several ranks does not know whose number it was: another tells."""
    for rank in range(3):
        results = dpcore.spawn(
            one_poisoned_step,
            3,
            rank,
            LARGE,
            torch.float32,
            {},
            mode="threads",
            algorithm=algorithm,
        )
        assert_told_of(rank, results)


@pytest.mark.parametrize("hosts", ("a,b", "a,b,c", "a,a,b"))
def test_over_tcp(monkeypatch, hosts):
    monkeypatch.setenv("DPCORE_PRETEND_HOSTS", hosts)
    world = len(hosts.split(","))
    for width in (SMALL, LARGE):
        for schedule in ("auto", "zero1"):
            results = dpcore.spawn(
                one_poisoned_step, world, 1, width, torch.float32, {"schedule": schedule}
            )
            assert_told_of(1, results)


def test_counts_and_ranks():
    def body(comm):
        everywhere = {f"e{element}": math.nan for element in range(8 * SMALL)}
        training = Training(comm)
        training.step(**(everywhere if comm.rank != 1 else {}))
        training.step()  # the weights are NaN by now: once told is enough
        assert "the gradients of layers.0.weight on ranks 0 and 2 are" in training.told[0]
        assert f"has {8 * SMALL} NaN among {8 * SMALL} elements" in training.told[0]
        training = Training(comm)
        training.step(e3=math.inf, e4=math.nan)
        assert "the gradients of layers.0.weight are not finite on any rank" in training.told[0]
        assert "has 1 NaN and 1 Inf among" in training.told[0]
        assert "lower the learning rate" in training.told[0]

    dpcore.spawn(body, 3, mode="threads")


def test_a_part_of_a_gradient():
    """With "zero1" a rank has an average of its part of the bucket only."""
    results = dpcore.spawn(
        one_poisoned_step, 2, 1, LARGE, torch.float32, {"schedule": "zero1"}, mode="threads"
    )
    (here,), (elsewhere,) = (told for told, _ in results)
    assert "the average, of which this rank has a part, has 1 NaN among" in here
    assert "first at element 17; the average goes to every rank. Look" in elsewhere


def test_a_sum_that_overflows_is_no_ranks_fault():
    """In a ring of float16, the sum of three ranks is rounded before it is divided."""

    def body(comm):
        training = Training(comm, LARGE, torch.float16)
        training.step(e5=40_000.0)
        return training.told

    results = dpcore.spawn(body, 3, mode="threads", algorithm="ring")
    (text,) = [text for told in results for text in told]
    assert (
        "the gradients of layers.0.weight are finite, and their sum overflows at element 5" in text
    )
    assert "wider type" in text


def test_gradients_that_travel_narrower():
    def body(comm):
        training = Training(comm)
        training.model._reducer.reduce_as(torch.float16)
        training.step(**({"e2": 1e6} if comm.rank == 0 else {}))
        assert (
            "rank 0's gradient of layers.0.weight (which travels as float16) is" in training.told[0]
        )

    dpcore.spawn(body, 2, mode="threads")


# ---- when it is told -------------------------------------------------------------------------


def test_the_program_gets_a_warning():
    def body(comm):
        training = Training(comm, mistakes="all")
        with pytest.warns(dpcore.MistakeWarning, match="rank 1's gradient"):
            training.step(**({"e1": math.inf} if comm.rank == 1 else {}))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            training.step()  # once

    dpcore.spawn(body, 2)


def raised_before(comm, width):
    """Whether this rank saw it, and its parameters are those from before the step."""
    training = Training(comm, width, mistakes="raise")
    training.step()
    before = training.parameters()
    with pytest.raises(dpcore.Error, match="step 2: rank 1's gradient"):
        training.step(**({"e17": math.nan} if comm.rank == 1 else {}))
        training.step()
    after = training.parameters()
    is_unchanged = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert is_unchanged == (training.model._reducer.not_finite is not None)
    return is_unchanged


@pytest.mark.parametrize("width", (SMALL, LARGE))
def test_raise_comes_before_the_parameters_change(width):
    assert dpcore.spawn(raised_before, 2, width, mode="threads") == [True, True]


def test_between_hosts_what_one_rank_raises_ends_the_other():
    """It gets the words of the rank that saw it when it communicates next."""
    assert any(dpcore.spawn(raised_before, 2, LARGE, transport="tcp"))


@pytest.mark.parametrize("schedule", ACROSS)
def test_raise_across_steps(schedule):
    def body(comm):
        training = Training(comm, LARGE, schedule=schedule, mistakes="raise")
        training.step()
        with pytest.raises(dpcore.Error, match="rank 1's gradient"):
            for _ in range(3):  # what one rank raises ends what the other has in flight
                training.step(**({"e17": math.nan} if comm.rank == 1 else {}))

    dpcore.spawn(body, 2, mode="threads")


def test_ignore_does_not_look():
    def body(comm):
        training = Training(comm, mistakes="ignore")
        assert not training.model._reducer.finds_not_finite
        training.step(e1=math.nan)
        assert training.model._reducer.not_finite is None

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dpcore.spawn(body, 2)


# ---- right programs --------------------------------------------------------------------------


@pytest.mark.parametrize("width", (SMALL, LARGE))
def test_a_scaler_that_skips_the_step_is_silent(width):
    def body(comm):
        training = Training(comm, width)
        scaler = GradScaler("cpu", init_scale=4.0)
        for step in range(6):
            training.optimizer.zero_grad()
            before = training.parameters()
            is_bad = step in (1, 2, 4)
            training.model.module.poison = {ELEMENT: math.inf} if is_bad and comm.rank == 1 else {}
            scaler.scale(training.model(torch.ones(3, 8)).sum()).backward()
            scaler.step(training.optimizer)
            scaler.update()
            after = training.parameters()
            assert is_bad == all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert training.told == []

    dpcore.spawn(body, 2, mode="threads")


def test_an_optimizer_that_skips_by_itself_is_silent():
    """A scaler hands what it found to fused optimizers, and calls their step in any case."""

    def body(comm):
        training = Training(comm)
        training.optimizer = torch.optim.AdamW(training.model.parameters(), fused=True)
        scaler = GradScaler("cpu", init_scale=4.0)
        before = training.parameters()
        training.model.module.poison = {ELEMENT: math.inf}
        scaler.scale(training.model(torch.ones(3, 8)).sum()).backward()
        steps = []
        training.optimizer.register_step_pre_hook(lambda *_: steps.append(1))
        scaler.step(training.optimizer)
        scaler.update()
        assert steps == [1]
        for one, other in zip(before, training.parameters(), strict=True):
            assert torch.equal(one, other)
        assert training.told == []

    dpcore.spawn(body, 2, mode="threads")


def test_a_program_that_repairs_or_skips_is_silent():
    def body(comm):
        training = Training(comm)
        training.backward(e1=math.nan)
        for parameter in training.model.parameters():
            parameter.grad.nan_to_num_()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.backward(e1=math.nan)  # and left out
        training.step()
        other = torch.optim.SGD(training.model.module.layers[1].parameters(), lr=0.1)
        training.optimizer.zero_grad()
        training.backward(e1=math.nan)
        other.step()  # of another parameter
        assert training.told == []
        training.optimizer.step()
        assert len(training.told) == 1

    dpcore.spawn(body, 2, mode="threads")


@pytest.mark.parametrize("with_no_sync", (False, True))
def test_accumulation_names_the_rank_that_began(with_no_sync):
    """Averaged NaN are on every rank, and come back with the next backward."""

    def body(comm):
        training = Training(comm)
        for _ in range(2):
            training.optimizer.zero_grad(set_to_none=False)
            poison = {"e6": math.nan} if comm.rank == 1 and _ == 1 else {}
            if with_no_sync:
                with training.model.no_sync():
                    training.backward(**poison)
            else:
                training.backward(**poison)
            training.backward()
            training.optimizer.step()
        (text,) = training.told
        step = 2 if with_no_sync else 3
        assert f"step {step}: rank 1's gradient of layers.0.weight" in text

    dpcore.spawn(body, 2, mode="threads")


def test_looking_changes_no_bit():
    def body(comm, mistakes):
        training = Training(comm, LARGE, mistakes=mistakes)
        for _ in range(3):
            training.step()
        return training.parameters()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        looked, plain = (dpcore.spawn(body, 2, mode, mode="threads") for mode in ("warn", "ignore"))
    for one, other in zip(looked[0], plain[0], strict=True):
        assert torch.equal(one, other)


# ---- where no sum of ours can look -----------------------------------------------------------


@pytest.mark.parametrize("schedule", ("bucketed", "priority", "dear"))
@pytest.mark.parametrize("how", ("left out", "repaired"))
def test_a_step_that_the_program_has_left_out_or_repaired_is_no_mistake(schedule, how):
    def body(comm):
        training = Training(comm, schedule=schedule)
        for step in range(4):
            training.optimizer.zero_grad()
            training.backward(**({"e9": math.nan} if step == comm.rank == 1 else {}))
            gradients = [p.grad for p in training.model.parameters()]
            if how == "repaired":
                for gradient in gradients:
                    gradient.nan_to_num_(0.0)
            if all(bool(gradient.isfinite().all()) for gradient in gradients):
                training.optimizer.step()
        assert all(bool(p.isfinite().all()) for p in training.parameters())
        return training.told

    assert dpcore.spawn(body, 2, mode="threads") == [[], []]


def test_one_rank_looks_when_it_is_asked(monkeypatch):
    def body(comm):
        training = Training(comm)
        training.step(e9=math.nan)
        return training.told

    assert dpcore.spawn(body, 1, mode="threads") == [[]]
    monkeypatch.setenv("DPCORE_CHECK_FINITE", "1")
    ((text,),) = dpcore.spawn(body, 1, mode="threads")
    assert text.startswith(
        "rank 0: step 1: the averaged gradient of layers.0.weight has 1 NaN among "
        f"{8 * SMALL} elements, first at element 9"
    )


@pytest.mark.parametrize("schedule", ("auto", "priority"))
def test_a_group_of_torch_looks_when_it_is_asked(monkeypatch, schedule):
    def body():
        training = Training(dist.group.WORLD, schedule=schedule)
        for step in range(2):
            training.step(**({"e9": math.nan} if step == dist.get_rank() == 1 else {}))
        training.model.flush()
        return training.model.backend, training.told

    monkeypatch.setenv("DPCORE_CHECK_FINITE", "1")
    for rank, (backend, told) in enumerate(in_group(body, 2, backend="gloo")):
        assert backend == "torch gloo"
        assert told[0].startswith(
            f"rank {rank}: step 2: the averaged gradient of layers.0.weight has 1 NaN among "
        )


def test_hooks_look_when_they_are_asked(monkeypatch):
    def body(comm):
        training = Training(comm)
        training.model.register_comm_hook(
            None, lambda state, bucket: _averaged(comm, bucket.buffer())
        )
        training.step(**({"e9": math.inf} if comm.rank == 1 else {}))
        return training.told

    assert dpcore.spawn(body, 2, mode="threads") == [[], []]
    monkeypatch.setenv("DPCORE_CHECK_FINITE", "1")
    for (text,) in dpcore.spawn(body, 2, mode="threads"):
        assert "the averaged gradient of layers.0.weight has 1 Inf among" in text


def _averaged(comm, buffer):
    comm.all_reduce(buffer, "mean")
    future = torch.futures.Future()
    future.set_result(buffer)
    return future


# ---- buffers ---------------------------------------------------------------------------------


class WithBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
        self.register_buffer("smallest", torch.tensor(math.inf))
        self.register_buffer("unknown", torch.tensor(math.nan))

    def forward(self, x):
        self.smallest = torch.minimum(self.smallest, x.detach().min())  # another tensor
        self.mask.fill_(-math.inf).triu_(2)
        return self.layer(self.norm(x))


@pytest.mark.parametrize("world", (2, 3))
def test_a_buffer_that_gets_a_nan_is_named(world):
    def body(comm):
        model = dpcore.DataParallel(WithBuffers(), comm=comm)
        told = []
        model._mistakes.warn = lambda kind, text: told.append((kind, text))
        for step in range(5):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            if step == 2:
                x[0, 0] = math.nan
            model.zero_grad()
            model(x).sum().backward()
            if step < 3:
                assert told == []
        kinds, texts = zip(*told, strict=True)
        assert set(kinds) == {"buffer not finite"}
        assert any(
            f"rank {comm.rank}: forward 4: rank 0's buffer norm.running_var, which goes to every "
            "rank, has 1 NaN among 8 elements" in text
            for text in texts
        )
        assert len(texts) == 3  # running_mean, running_var, smallest; in order, each once

    dpcore.spawn(body, world, mode="threads")


def test_buffers_with_infinities_are_silent():
    def body(comm):
        model = dpcore.DataParallel(WithBuffers(), comm=comm, mistakes="raise")
        for step in range(4):
            model.module.smallest.fill_(math.inf)  # as an observer that is reset
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            model(x).sum().backward()

    dpcore.spawn(body, 2, mode="threads")


def test_buffers_of_types_without_arithmetic_are_left_alone():
    def body(comm):
        net = nn.Linear(3, 2)
        net.register_buffer("scale", torch.full((4,), math.nan).to(torch.float8_e4m3fn))
        model = dpcore.DataParallel(net, comm=comm, mistakes="raise")
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()

    dpcore.spawn(body, 2, mode="threads")


def test_the_look_at_buffers():
    from dpcore import _C

    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
        tensors = [torch.ones(count, dtype=dtype) for count in (3, 0, 70, 1001)]
        tensors[2][5] = math.inf
        tensors[2][6] = -math.inf
        assert _C.first_with_nan(tensors) is None
        tensors[3][1000] = -math.nan
        assert _C.first_with_nan(tensors) == 3
        tensors[0][0] = math.nan
        assert _C.first_with_nan(tensors) == 0
