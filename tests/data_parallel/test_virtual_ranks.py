"""The weights are the same to the bit, whatever the number of ranks."""

import copy
import gc
import hashlib
import math
import random

import numpy
import pytest
import torch
from torch import nn

import dpcore as dp
from dpcore import _C
from dpcore.ddp.virtual_ranks.batches import cut
from dpcore.ddp.virtual_ranks.buffers import after_shards
from dpcore.ddp.virtual_ranks.tree import nodes_of, part_of, push
from dpcore.ddp.virtual_ranks.virtual_ranks import add
from dpcore.errors import Error, Mismatch, Unsupported

WORLDS = (1, 2, 3, 4, 8)
CASES = ((8, 32), (7, 30), (3, 32), (2, 9), (1, 16))  # shards, samples of a batch
STEPS = 3


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def alone():
    comm = dp.init(rank=0, world_size=1)
    yield comm
    dp.finalize()


# ---- the tree --------------------------------------------------------------------------------


def tree_of(begin, end):
    """Written down from its definition."""
    if end - begin == 1:
        return begin
    half = 1 << (end - begin - 1).bit_length() - 1
    return (tree_of(begin, begin + half), tree_of(begin + half, end))


def pair(left, right, node):
    return left, right


def test_ranks_add_as_one_tree():
    for shards in range(1, 34):
        for world in range(1, 12):
            every = []
            for rank in range(world):
                own, nodes = part_of(rank, world, shards), []
                for shard in own:
                    push(nodes, (shard, shard + 1), shard, pair, shards)
                assert [node for node, _ in nodes] == nodes_of(own, shards)
                assert len(nodes) <= max(1, 2 * math.log2(shards))
                every += nodes
                if shards % world == 0 and shards & (shards - 1) == world & (world - 1) == 0:
                    assert len(nodes) == 1
            root = []
            for node, value in every:
                push(root, node, value, pair, shards)
            assert root == [((0, shards), tree_of(0, shards))], (shards, world)


def test_a_missing_gradient_is_a_zero_also_by_its_sign():
    zero = torch.tensor([-0.0, 1.0])
    (found,) = add([None], [zero.clone()], {})
    assert not found.signbit().any() and torch.equal(found, zero)
    assert add([None], [None], {}) == [None]


# ---- the same bits ---------------------------------------------------------------------------


class Odd(nn.Module):
    """With dropout, running statistics, numbers of Python and numpy, a buffer that every forward
    changes, one that none does, and parameters that not all shards use, or none."""

    def __init__(self):
        super().__init__()
        self.into = nn.Linear(6, 16)
        self.norms = nn.ModuleList([nn.BatchNorm1d(16), nn.BatchNorm1d(16, momentum=None)])
        self.out, self.rare, self.never = nn.Linear(16, 1), nn.Linear(16, 1), nn.Linear(1, 1)
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("seen", torch.zeros(6))
        self.register_buffer("mask", torch.ones(6))

    def forward(self, x):
        self.seen += x.detach().sum(0)
        y = self.into(x * self.mask + 0.01 * random.random())
        for norm in self.norms:
            y = norm(y)
        y = nn.functional.dropout(y.relu(), 0.3, self.training)
        head = self.rare if self.training and numpy.random.rand() < 0.2 else self.out
        return head(y) * self.scale.float().mean()


def start(shards, **options):
    torch.manual_seed(3)
    module = Odd()
    model = dp.DataParallel(module, virtual_ranks=shards, **options)
    return model, torch.optim.AdamW(module.parameters(), lr=0.01)


def batches(samples, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(samples, 6, generator=generator)
        yield {"x": x, "y": x.sin().sum(1, keepdim=True)}


def train(model, optimizer, taken):
    for batch in taken:
        optimizer.zero_grad()
        for shard in model.shards(batch):
            nn.functional.mse_loss(model(shard["x"]), shard["y"]).backward()
        optimizer.step()


def digest(model):
    """Of parameters and buffers."""
    raw = b"".join(
        tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for tensor in model.module.state_dict().values()
    )
    return hashlib.sha256(raw).hexdigest()


def digests(comm):
    torch.set_num_threads(1)
    torch.manual_seed(100 + comm.rank)
    outside = torch.get_rng_state()
    found = {}
    for shards, samples in CASES:
        model, optimizer = start(shards)
        torch.set_rng_state(outside)
        train(model, optimizer, batches(samples, STEPS))
        assert torch.equal(torch.get_rng_state(), outside)  # the program's own numbers stay
        assert model.module.never.weight.grad is None
        found[shards, samples] = digest(model)
    return found


def test_the_bits_do_not_depend_on_the_world():
    found = {world: dp.spawn(digests, world) for world in WORLDS}
    expected = found[1][0]
    assert len(set(expected.values())) == len(CASES)
    assert found == {world: [expected] * world for world in WORLDS}


def test_the_bits_do_not_depend_on_the_transport():
    assert dp.spawn(digests, 3, transport="tcp") == dp.spawn(digests, 1) * 3


def in_pieces(comm, saved, part):
    """Takes a part of the steps from a checkpoint, and each rank loads only its own samples."""
    torch.set_num_threads(1)
    model, optimizer = start(4)
    if saved is not None:
        module, its, virtual = saved
        model.module.load_state_dict(module)
        optimizer.load_state_dict(its)
        model.virtual.load_state_dict(virtual)
    for batch in list(batches(32, 6))[part]:
        numbers = model.virtual.part(list(range(32)))
        mine = {name: tensor[numbers] for name, tensor in batch.items()}
        optimizer.zero_grad()
        for shard in model.shards(mine, total=32):
            nn.functional.mse_loss(model(shard["x"]), shard["y"]).backward()
        optimizer.step()
    states = (model.module.state_dict(), optimizer.state_dict(), model.virtual.state_dict())
    return copy.deepcopy(states), digest(model)


def test_a_run_goes_on_with_another_number_of_ranks():
    saved, _ = dp.spawn(in_pieces, 3, None, slice(0, 2))[0]
    saved, _ = dp.spawn(in_pieces, 1, saved, slice(2, 4))[0]
    ends = dp.spawn(in_pieces, 2, saved, slice(4, 6))
    assert {end for _, end in ends} == {dp.spawn(in_pieces, 1, None, slice(0, 6))[0][1]}


# ---- the right values ------------------------------------------------------------------------


def plain_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


@pytest.mark.parametrize("samples", (16, 19, 3))
def test_unequal_shards_are_weighted_by_their_samples(alone, samples):
    x = torch.randn(samples, 6, dtype=torch.float64)
    whole, module = plain_model(), plain_model()
    whole(x).pow(2).mean().backward()
    model = dp.DataParallel(module, virtual_ranks=8)
    taken = 0
    for inputs in model.shards(x):
        taken += len(inputs)
        model(inputs).pow(2).mean().backward()
    assert taken == samples
    for mine, expected in zip(module.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad)


def accumulated(comm):
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = dp.DataParallel(plain_model(), virtual_ranks=2)
    held = []
    for _ in range(2):
        for inputs in model.shards(torch.ones(4, 6, dtype=torch.float64)):
            model(inputs).mean().backward()
        gradient = model.module[0].weight.grad
        held.append((gradient, gradient.clone()))
    assert held[0][0] is held[1][0]
    assert torch.equal(held[1][1], 2 * held[0][1])
    return held[1][1]


def test_gradients_that_were_not_zeroed_are_added_to():
    """On several ranks, they lie where the next ones are added."""
    one, *others = (dp.spawn(accumulated, world) for world in (1, 2))
    assert all(torch.equal(one[0], other) for of_world in others for other in of_world)


def last_and_this_step(comm):
    """Momentum by hand: the program holds the gradients of the step before, or a part of them."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = dp.DataParallel(plain_model(), virtual_ranks=2)
    held = []
    for step in range(4):
        model.zero_grad()
        for inputs in model.shards(torch.ones(4, 6, dtype=torch.float64) + step):
            model(inputs).mean().backward()
        gradient = model.module[0].weight.grad
        part = gradient if step % 2 else gradient[1:]
        held.append((part, part.clone()))
    return [torch.equal(now, then) for now, then in held], held[-1][1]


def test_gradients_that_the_program_holds_keep_their_numbers():
    one, *others = (outcome for world in (1, 2) for outcome in dp.spawn(last_and_this_step, world))
    assert all(same for outcome in (one, *others) for same in outcome[0])
    assert all(torch.equal(one[1], other[1]) for other in others)


def test_the_memory_of_gradients_that_nobody_holds_is_used_again():
    def body(comm):
        torch.set_num_threads(1)
        model, places = dp.DataParallel(plain_model(), comm=comm, virtual_ranks=2), set()
        for _ in range(4):
            model.zero_grad()
            for inputs in model.shards(torch.ones(4, 6, dtype=torch.float64)):
                model(inputs).mean().backward()
            places.add(model.module[0].weight.grad.data_ptr())
        return len(places)

    assert dp.spawn(body, 2) == [1, 1]


def test_memory_stays_warm_as_long_as_the_model_lives(alone):
    before = _C.warm_memory_figures()["is_on"]
    for gradients in ("copied", "born"):
        model = dp.DataParallel(plain_model(), virtual_ranks=2, gradients=gradients)
        assert _C.warm_memory_figures()["is_on"] == (before or gradients == "born")
        del model
        gc.collect()
        assert _C.warm_memory_figures()["is_on"] == before


@pytest.mark.parametrize("momentum", (0.1, None))
def test_running_statistics_are_those_of_a_rank_that_saw_all_shards(alone, momentum):
    norm = nn.BatchNorm1d(6, momentum=momentum)
    expected = copy.deepcopy(norm)
    model = dp.DataParallel(nn.Sequential(norm, nn.Linear(6, 1)), virtual_ranks=4)
    for step in range(3):
        for inputs in model.shards(torch.randn(16, 6) + step):
            expected(inputs)
            model(inputs).mean().backward()
    assert norm.num_batches_tracked == expected.num_batches_tracked == 12
    torch.testing.assert_close(norm.running_mean, expected.running_mean)
    torch.testing.assert_close(norm.running_var, expected.running_var)


def test_statistics_of_a_module_that_a_shard_did_not_use_stay():
    start = torch.tensor([5.0, 4.0], dtype=torch.float64)
    for momentum in (0.1, None):
        found = after_shards(start, torch.tensor([1]), [momentum], [start.clone()] * 3)
        assert torch.equal(found, start)


def test_other_buffers_are_what_the_last_shard_left(alone):
    model, _ = start(4)
    x = torch.arange(16.0).view(16, 1).expand(16, 6)
    for inputs in model.shards(x):
        model(inputs).sum().backward()
    assert model.module.seen.tolist() == [12 + 13 + 14 + 15] * 6


def test_autocast_around_the_loop(alone):
    model = dp.DataParallel(plain_model().float(), virtual_ranks=4)
    x, gradients = torch.randn(16, 6), []
    for is_around in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_around):
            for inputs in model.shards(x):
                with torch.autocast("cpu", torch.bfloat16):
                    output = model(inputs)
                output.float().mean().backward()
        gradients.append(model.module[0].weight.grad)
        model.zero_grad()
    assert torch.equal(*gradients) and gradients[0].dtype == torch.float32


def test_a_copy_of_the_model_has_its_shards(alone):
    model, optimizer = start(2)
    train(model, optimizer, batches(8, 1))
    other = copy.deepcopy(model)
    assert (other.virtual.step, other.virtual.seed) == (1, model.virtual.seed)
    for one in (model, other):
        train(one, torch.optim.SGD(one.parameters(), lr=0.1), batches(8, 1))
    assert digest(model) == digest(other)


def test_batches_of_many_kinds_are_cut():
    pair = torch.utils.data.default_collate([(torch.ones(2), {"name": "a"}, 3)] * 4)
    inputs, names, numbers = cut(pair, 1, 3, 4)
    assert (inputs.shape, names, numbers.tolist()) == ((2, 2), {"name": ["a", "a"]}, [3, 3])
    assert inputs.untyped_storage().nbytes() == 16  # memory of its own
    with pytest.raises(ValueError, match="has 4 samples and another 3"):
        cut((torch.ones(4), torch.ones(3)), 0, 1, 4)
    with pytest.raises(TypeError, match="cannot cut a object"):
        cut((torch.ones(4), object()), 0, 1, 4)


# ---- refused, in words -----------------------------------------------------------------------


def loop_that(does, model, x):
    for number, inputs in enumerate(model.shards(x)):
        if does == "breaks" and number == 1:
            break
        if does == "raises" and number == 1:
            raise RuntimeError("mine")
        loss = model(inputs).mean()
        if does != "forgets" or number != 1:
            loss.backward()


def test_a_loop_that_is_left_early(alone):
    x = torch.ones(8, 6, dtype=torch.float64)
    for does, raised in (("breaks", None), ("raises", "mine"), ("forgets", "no parameter got")):
        model = dp.DataParallel(plain_model(), virtual_ranks=4)
        state = torch.get_rng_state()
        if raised is None:
            loop_that(does, model, x)
        else:
            with pytest.raises((RuntimeError, Error), match=raised):
                loop_that(does, model, x)
        assert torch.equal(torch.get_rng_state(), state)
        with pytest.raises(Error, match=r"left in step 1 in shard 1 of 4"):
            model.shards(x)
        with pytest.raises(Error, match="an optimizer steps, and the loop"):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.virtual._unfinished = ""  # finalize() would raise as well


def test_the_others_hear_of_a_loop_that_is_left_early():
    def body(comm):
        torch.set_num_threads(1)
        model = dp.DataParallel(plain_model(), virtual_ranks=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            loop_that("breaks" if comm.rank == 1 else "", model, torch.ones(8, 6).double())
            optimizer.step()
        except Error as problem:
            return str(problem)

    for said in dp.spawn(body, 2):
        assert "an optimizer steps, and the loop over the shards" in said


def test_a_forward_outside_of_the_loop(alone):
    model = dp.DataParallel(plain_model(), virtual_ranks=4)
    x = torch.ones(2, 6, dtype=torch.float64)
    with pytest.raises(Error, match=r"belongs into `for shard in model\.shards"):
        model(x)
    with torch.no_grad():
        assert torch.equal(model(x), model.module(x))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "zero2"}, "a schedule"),
        ({"schedule": "sequential"}, "a schedule"),
        ({"static_graph": True}, "static_graph"),
    ],
)
def test_options_that_are_refused(alone, options, words):
    with pytest.raises(Unsupported, match=f"in this version not with {words}"):
        dp.DataParallel(plain_model(), virtual_ranks=4, **options)


def test_models_that_are_refused(alone):
    for module, words in (
        (nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), "SyncBatchNorm"),
        (nn.Embedding(4, 2, sparse=True), "sparse gradients"),
    ):
        with pytest.raises(Unsupported, match=words):
            dp.DataParallel(module, virtual_ranks=4)
    with pytest.raises(ValueError, match="virtual_ranks 0 is out of range"):
        dp.DataParallel(plain_model(), virtual_ranks=0)
    with pytest.raises(Unsupported, match="wrapped without virtual_ranks"):
        dp.DataParallel(plain_model()).shards(torch.ones(2, 6))


def test_calls_that_are_refused(alone):
    model = dp.DataParallel(plain_model(), virtual_ranks=4)
    for call in (
        lambda: model.register_comm_hook(None, lambda state, bucket: None),
        lambda: model.no_sync().__enter__(),
        lambda: model.join().__enter__(),
        lambda: model.weighted(3).__enter__(),
        lambda: dp.monitor(model),
        lambda: dp.gradient_noise_scale(model),
    ):
        with pytest.raises(Unsupported, match="virtual_ranks"):
            call()


def test_a_number_of_threads_that_was_not_chosen(alone, monkeypatch):
    from dpcore.comm.launch import threads

    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "_before", 2)
    torch.set_num_threads(2)
    with pytest.raises(Unsupported, match="computes with 2 threads because of the processors"):
        dp.DataParallel(plain_model(), virtual_ranks=4)
    torch.set_num_threads(3)
    model = dp.DataParallel(plain_model(), virtual_ranks=4)
    torch.set_num_threads(1)
    with pytest.raises(Mismatch, match="with 1 threads, and had threads=3"):
        model.shards(torch.ones(8, 6))


def test_ranks_that_would_not_compute_alike():
    def body(comm):
        torch.set_num_threads(3 if comm.rank == 2 else 1)
        with pytest.raises(Mismatch) as caught:
            dp.DataParallel(plain_model(), virtual_ranks=4)
        return str(caught.value)

    for said in dp.spawn(body, 3):
        assert "Rank 0 has 'threads=1' where rank 2 has 'threads=3'" in said


def test_ranks_with_different_batches():
    def body(comm):
        torch.set_num_threads(1)
        model = dp.DataParallel(plain_model(), virtual_ranks=4)
        with pytest.raises(Mismatch) as caught:
            loop_that("", model, torch.ones(8 + comm.rank, 6).double())
        return str(caught.value)

    for said in dp.spawn(body, 2):
        assert "samples in the batch is 8 on rank 0 and 9 on rank 1" in said


def test_a_checkpoint_of_another_run(alone):
    model = dp.DataParallel(plain_model(), virtual_ranks=4)
    state = dp.DataParallel(plain_model(), virtual_ranks=2).virtual.state_dict()
    with pytest.raises(Mismatch, match=r"virtual_ranks=2, and this run 4"):
        model.virtual.load_state_dict(state)
    with pytest.raises(ValueError, match=r"part has 8 samples, and this rank's are 0 to 8"):
        model.shards(torch.ones(8, 6), total=9)
