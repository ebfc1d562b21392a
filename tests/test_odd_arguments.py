"""Wrong types and odd values for every argument of the public functions: what is refused is refused
in dpcore's words, and the communicator goes on.

Whether a value is taken at all is each function's own matter (its tests say it). Here none may end
in pybind11's list of signatures, in an error of C++, or in one that Python raised somewhere within.
"""

import contextlib
import io
import math

import numpy as np
import pytest
import torch
from torch import nn

import dpcore as dp
from tests.comm.modes import HOW

ODD = {
    "None": None, "'3'": "3", "''": "", "b'x'": b"x", "half a pair": "\ud800", "nul": "a\0b",
    "2**70": 2**70, "-2**70": -(2**70), "2**31": 2**31, "-1": -1, "0": 0, "1.5": 1.5, "1j": 1j,
    "nan": math.nan, "inf": math.inf, "-inf": -math.inf, "True": True,
    "[]": [], "[1, 2]": [1, 2], "['a']": ["a"], "()": (), "{}": {}, "{1}": {1},
    "object": object(), "int": int, "lambda": lambda *_: 0, "module": nn.Linear(1, 1),
    "numpy 1": np.int64(1), "numpy .5": np.float32(0.5), "array": np.array([1, 2]),
    "array of one": np.array(1), "objects": np.array([None, 1]), "text": np.array(["a", "b"]),
    "times": np.array(["2020-01-01"], "M8[D]"),
    "tensor 1": torch.tensor(1), "tensor 1.5": torch.tensor(1.5), "vector": torch.ones(2),
}  # fmt: skip
RAW = (
    "incompatible function arguments", "incompatible constructor", "Unable to cast",
    "std::", "bad_alloc", "vector::", "basic_string", "INTERNAL ASSERT", "unpacking long long",
    "has no attribute", "not supported between", "unsupported operand", "is not iterable",
    "not subscriptable", "has no len", "is ambiguous", "unpack", "weak reference", "unhashable",
    "indices must be", "argument of type", "cannot be interpreted", "can't be interpreted",
    "must be real number", "os.PathLike", "not callable", "codec can't", "invalid literal",
    "could not convert", "too large to convert", "NotImplemented", "positional argument",
    "unexpected keyword",
)  # fmt: skip
FEW = 100  # what is made of numbers must not be huge


def is_many(value):
    return isinstance(value, int | float) and not value <= FEW and not value >= 2**60


def raw_text(error):
    """What is raw in an error, or nothing."""
    of_files = FileNotFoundError | IsADirectoryError
    is_own = isinstance(error, TypeError | ValueError | dp.Error | of_files)
    says_hook = isinstance(error, KeyError) and "needs a parameter named" in str(error)  # as torch
    if (is_own or says_hook) and not any(words in str(error) for words in RAW):
        return ""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def raw_errors(call, check=lambda: None):
    """By the value's name. ``check`` comes after every call."""
    found = {}
    for name, value in ODD.items():
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                call(value)
        except Exception as error:
            if text := raw_text(error):
                found[name] = text
        check()
    return found


ones = torch.ones


def whole(comm):
    return ones(2 * comm.world_size)


def of_root(comm):
    return whole(comm) if comm.rank == 0 else None


def waited(work):
    if work is not None:
        work.wait()


def closed(group):
    if group is not None:
        group.close()


NOBODY = 99  # no rank: the call is refused on that ground, or on that of the odd value before
COLLECTIVES = {
    "all_reduce, tensor": lambda c, v: c.all_reduce(v),
    "all_reduce, op": lambda c, v: c.all_reduce(ones(4), v),
    "all_reduce, op by name": lambda c, v: c.all_reduce(ones(4), op=v, factor=1.0),
    "all_reduce, factor": lambda c, v: c.all_reduce(ones(4), "premul_sum", factor=v),
    "all_reduce, layout": lambda c, v: c.all_reduce(ones(4), layout=v),
    "all_reduce, priority": lambda c, v: c.all_reduce(ones(4), priority=v),
    "all_reduce, timeout": lambda c, v: c.all_reduce(ones(4), timeout=v),
    "all_reduce, algorithm": lambda c, v: c.all_reduce(ones(4), algorithm=v),
    "all_reduce, async_op": lambda c, v: waited(c.all_reduce(ones(4), async_op=v)),
    "broadcast, tensor": lambda c, v: c.broadcast(v),
    "broadcast, root": lambda c, v: c.broadcast(ones(4), v),
    "reduce, root": lambda c, v: c.reduce(ones(4), v),
    "reduce, op": lambda c, v: c.reduce(ones(4), 0, v),
    "reduce_scatter, output": lambda c, v: c.reduce_scatter(v, whole(c)),
    "reduce_scatter, input": lambda c, v: c.reduce_scatter(ones(2), v),
    "reduce_scatter, sizes": lambda c, v: c.reduce_scatter(ones(2), whole(c), sizes=v),
    "all_gather, output": lambda c, v: c.all_gather(v, ones(2)),
    "all_gather, input": lambda c, v: c.all_gather(whole(c), v),
    "all_gather, sizes": lambda c, v: c.all_gather(whole(c), ones(2), sizes=v),
    "all_gather, a size": lambda c, v: c.all_gather(whole(c), ones(2), sizes=[v] * c.world_size),
    "gather, root": lambda c, v: c.gather(of_root(c), ones(2), v),
    "scatter, root": lambda c, v: c.scatter(ones(2), of_root(c), v),
    "all_to_all, output": lambda c, v: c.all_to_all(v, whole(c)),
    "all_to_all, sizes": lambda c, v: c.all_to_all(
        whole(c), whole(c), output_sizes=v, input_sizes=v
    ),
    "all_to_all, one list": lambda c, v: c.all_to_all(whole(c), whole(c), output_sizes=v),
    "send, tensor": lambda c, v: c.send(v, NOBODY),
    "send, tag": lambda c, v: c.send(ones(2), NOBODY, tag=v),
    "send, timeout": lambda c, v: c.send(ones(2), NOBODY, timeout=v),
    "recv, tensor": lambda c, v: c.recv(v, NOBODY),
    "recv, tag": lambda c, v: c.recv(ones(2), NOBODY, tag=v),
    "barrier, timeout": lambda c, v: c.barrier(timeout=v),
    "barrier, async_op": lambda c, v: waited(c.barrier(async_op=v)),
    "wait": lambda c, v: c.all_reduce(ones(4), async_op=True).wait(v),
    "empty": lambda c, v: None if is_many(v) else c.empty(v),
    "empty, second": lambda c, v: None if is_many(v) else c.empty(2, v),
    "empty, dtype": lambda c, v: c.empty(2, dtype=v),
    "split, color": lambda c, v: closed(c.split(v)),
    "split, key": lambda c, v: closed(c.split(0, v)),
    "explain": lambda c, v: str(c.explain(v)),
    "mesh, a size": lambda c, v: dp.mesh(c, data=v).close(),
}
OF_ONE = {  # of two ranks, one would be right
    "scatter, output": lambda c, v: c.scatter(v, ones(2)),
    "gather, output": lambda c, v: c.gather(v, ones(2)),
    "gather, input": lambda c, v: c.gather(ones(2), v),
    "scatter, input": lambda c, v: c.scatter(ones(2), v),
    "send, dst": lambda c, v: c.send(ones(2), v),
    "recv, src": lambda c, v: c.recv(ones(0), v),
    "abort": lambda c, v: None if isinstance(v, str) and v != "\ud800" else c.abort(v),
    "dpcore.broadcast, root": lambda c, v: dp.broadcast(ones(2), v),
    "mesh, comm": lambda c, v: dp.mesh(v, data=1),
}


def ring():
    return dp.schedule("ring", "all_reduce", 2)


def own(**given):
    usual = {"algorithm": "own", "collective": "all_reduce", "world": 2, "chunks": 2, "moves": []}
    dp.check_schedule(dp.Schedule(**usual | given))


def plan(**given):
    if not any(map(is_many, given.values())):
        dp.pipeline_plan(**{"name": "1F1B", "stages": 2, "microbatches": 2} | given)


def started(**given):
    """A world of one, or a rank of two that nobody else comes to."""
    try:
        dp.init(**{"rank": 0, "world_size": 1, "timeout": 0.05} | given)
    finally:
        dp.finalize()


def spawned(world=1, mode="threads", **given):
    if not is_many(world):
        dp.spawn(lambda comm: comm.rank, world, mode=mode, **given)


WITHOUT_RANKS = {
    "algorithms_of": dp.algorithms_of,
    "schedule, algorithm": lambda v: dp.schedule(v, "all_reduce", 2),
    "schedule, collective": lambda v: dp.schedule("ring", v, 2),
    "schedule, world": lambda v: dp.schedule("ring", "all_reduce", v),
    "schedule, root": lambda v: dp.schedule("ring", "all_reduce", 2, v),
    "schedule, hosts": lambda v: dp.schedule("hierarchical", "all_reduce", 2, 0, v),
    "check_schedule": dp.check_schedule,
    "schedule_cost, schedule": lambda v: dp.schedule_cost(v, 4, 4),
    "schedule_cost, count": lambda v: dp.schedule_cost(ring(), v, 4),
    "schedule_cost, bytes": lambda v: dp.schedule_cost(ring(), 4, v),
    "Schedule, a move": lambda v: own(moves=[v]),
    "spawn, function": lambda v: dp.spawn(v, 1, mode="threads"),
    "spawn, world": spawned,
    "init of two, init_method": lambda v: started(rank=1, world_size=2, init_method=v),
    "init of two, transport": lambda v: started(
        rank=1, world_size=2, transport=v, init_method="tcp://127.0.0.1:1"
    ),
    "init of cuda, device": lambda v: started(backend="cuda", device=v),
    "compose_comm_hooks": dp.compose_comm_hooks,
    "monitor, model": dp.monitor,
    "gradient_noise_scale, model": dp.gradient_noise_scale,
    "measure_overlap, model": lambda v: dp.measure_overlap(v, lambda: 0),
    **{
        f"Schedule, {name}": lambda v, name=name: own(**{name: v})
        for name in ("algorithm", "collective", "world", "chunks", "moves", "root", "ordered")
    },
    **{
        f"pipeline_plan, {name}": lambda v, name=name: plan(**{name: v})
        for name in ("name", "stages", "microbatches", "ranks")
    },
    **{
        f"init, {name}": lambda v, name=name: None if is_many(v) else started(**{name: v})
        for name in (
            "rank", "world_size", "init_method", "transport", "timeout", "link", "algorithm",
            "deterministic", "device",
        )
    },
    **{
        f"spawn, {name}": lambda v, name=name: spawned(**{name: v})
        for name in ("mode", "timeout", "transport", "algorithm")
    },
}  # fmt: skip


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def wrapped(**given):
    made = dp.DataParallel(model(), **given)
    made(ones(1, 2)).sum().backward()
    return made


def zero1(call):
    made = dp.DataParallel(model(), schedule="zero1")
    optimizer = dp.DistributedOptimizer(sgd(made), made)
    made(ones(1, 2)).sum().backward()
    call(optimizer)


def block(kind, **given):
    module = model()
    outer = (sgd(module),) if kind is dp.DiLoCo else ()
    return kind(module, sgd(module), *outer, **given)


def entered(entry):
    with entry:
        pass


def trace(**given):
    if not any(map(is_many, given.values())):
        with dp.trace(**given):
            dp.barrier()


MODELS = {
    "DataParallel, module": dp.DataParallel,
    "DataParallel, a class": lambda v: dp.DataParallel(nn.Linear),
    "DistributedOptimizer, optimizer": lambda v: dp.DistributedOptimizer(
        v, dp.DataParallel(model(), schedule="zero1")
    ),
    "DistributedOptimizer, model": lambda v: dp.DistributedOptimizer(sgd(model()), v),
    "zero1, max_norm": lambda v: zero1(lambda o: o.clip_grad_norm_(v)),
    "zero1, norm_type": lambda v: zero1(lambda o: o.clip_grad_norm_(1.0, v)),
    "zero1, closure": lambda v: zero1(lambda o: o.step(v)),
    "zero1, set_to_none": lambda v: zero1(lambda o: o.zero_grad(v)),
    "zero1, state": lambda v: zero1(lambda o: o.load_state_dict(v)),
    "zero1, param_group": lambda v: zero1(lambda o: o.add_param_group(v)),
    "LocalSGD, module": lambda v: dp.LocalSGD(v, sgd(model())),
    "LocalSGD, optimizer": lambda v: dp.LocalSGD(model(), v),
    "DiLoCo, outer optimizer": lambda v: dp.DiLoCo(model(), sgd(model()), v),
    "LocalSGD, state": lambda v: block(dp.LocalSGD).load_state_dict(v),
    "DiLoCo, state": lambda v: block(dp.DiLoCo).load_state_dict(v),
    "hook": lambda v: dp.DataParallel(model()).register_comm_hook(None, v),
    "monitor, steps": lambda v: dp.monitor(dp.DataParallel(model()), v).close(),
    "measure_overlap, steps": lambda v: dp.measure_overlap(wrapped(), lambda: 0, v),
    **{
        f"DataParallel, {name}": lambda v, name=name: wrapped(**{name: v})
        for name in (
            "device_ids", "output_device", "dim", "broadcast_buffers", "init_sync",
            "process_group", "bucket_cap_mb", "find_unused_parameters", "check_reduction",
            "gradient_as_bucket_view", "static_graph", "delay_all_reduce_named_params",
            "param_to_hook_all_reduce", "mixed_precision", "device_mesh",
            "skip_all_reduce_unused_params", "bucket_cap_mb_list", "batched_grad_copy",
            "forward_sync_buffers", "lazy_bucket_allocation", "comm", "schedule", "deterministic",
        )
    },
    **{
        f"LocalSGD, {name}": lambda v, name=name: entered(block(dp.LocalSGD, **{name: v}))
        for name in ("sync_every", "comm", "process_group")
    },
    **{
        f"DiLoCo, {name}": lambda v, name=name: entered(
            block(dp.DiLoCo, **{"sync_every": 4} | {name: v})
        )
        for name in (
            "sync_every", "fragments", "fragment_sync_delay", "bits", "fragment_update_alpha",
            "comm", "process_group",
        )
    },
    **{
        f"gradient_noise_scale, {name}": lambda v, name=name: entered(
            dp.gradient_noise_scale(dp.DataParallel(model()), **{name: v})
        )
        for name in ("window", "every", "batch_size")
    },
}  # fmt: skip


@pytest.fixture
def comm():
    made = dp.init(rank=0, world_size=1)
    yield made
    with contextlib.suppress(dp.Error):  # what was aborted
        dp.finalize()


@pytest.mark.parametrize("name", COLLECTIVES | OF_ONE)
def test_calls_of_one_rank(name, comm):
    call = (COLLECTIVES | OF_ONE)[name]
    assert raw_errors(lambda value: call(comm, value), comm.barrier) == {}


def test_calls_of_two_ranks():
    """Both make the same mistake, and go on."""

    def body(comm):
        return {
            name: found
            for name, call in COLLECTIVES.items()
            if (found := raw_errors(lambda value, call=call: call(comm, value), comm.barrier))
        }

    assert dp.spawn(body, 2, **HOW["threads"]) == [{}] * 2


@pytest.mark.parametrize("name", WITHOUT_RANKS)
def test_calls_without_ranks(name):
    assert raw_errors(WITHOUT_RANKS[name]) == {}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_calls_of_models(name, comm):
    assert raw_errors(MODELS[name], comm.barrier) == {}


@pytest.mark.parametrize("name", ["path", "comm", "capacity"])
def test_calls_of_trace(name, comm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # paths of the values lie there
    assert raw_errors(lambda value: trace(**{name: value}), comm.barrier) == {}
