"""Calls without options go straight to the core, past the Python function that has the signature.
Every other call is left to that function, which reports mistakes in its own words."""

import copy
import inspect
import pickle
import sys
import weakref

import pytest
import torch
import torch.distributed as dist

import dpcore
from dpcore.comm.communicators import collectives

QUICK = [
    "all_reduce", "broadcast", "reduce", "reduce_scatter", "all_gather", "gather", "scatter",
    "all_to_all", "send", "recv",
]  # fmt: skip


def functions_entered(call):
    """The functions of collectives.py that a call enters."""
    entered = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename == collectives.__file__:
            entered.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


def plain_and_other_calls(comm):
    x, y = torch.ones(2), torch.zeros(2)
    plain = [
        lambda: comm.all_reduce(x),
        lambda: comm.all_reduce(x, "max"),
        lambda: comm.all_reduce(tensor=x, op="mean"),
        lambda: comm.broadcast(x),
        lambda: comm.broadcast(x, root=0),
        lambda: comm.reduce(x, 0, "sum"),
        lambda: comm.reduce(x, op="sum", root=0),
        lambda: comm.reduce_scatter(y, x),
        lambda: comm.all_gather(y, input=x),
        lambda: comm.gather(y, x, 0),
        lambda: comm.scatter(y, x, root=0),
        lambda: comm.all_to_all(y, x),
        lambda: dpcore.Communicator.broadcast(comm, x),
    ]
    for place, call in enumerate(plain):
        assert functions_entered(call) == [], place
    others = {
        "all_reduce": [
            lambda: comm.all_reduce(x, "avg"),
            lambda: comm.all_reduce(x, dist.ReduceOp.SUM),
            lambda: comm.all_reduce(x, factor=1.0),
            lambda: comm.all_reduce(x, async_op=True).wait(),
            lambda: comm.all_reduce(x, **{"".join("op"): "sum"}),  # equal, and not the interned one
        ],
        "reduce": [lambda: comm.reduce(x, op="sum")],
    }
    for name, calls in others.items():
        for call in calls:
            assert name in functions_entered(call), inspect.getsource(call)
    return x.tolist(), y.tolist()


def test_calls_without_options_enter_no_function_of_ours():
    assert dpcore.spawn(plain_and_other_calls, 1, mode="threads") == [([1, 1], [1, 1])]


def messages(comm):
    x = torch.full((2,), float(comm.rank))
    if comm.rank == 0:
        assert functions_entered(lambda: comm.send(x, 1)) == []
        assert functions_entered(lambda: comm.send(x, 1, tag=3)) == ["send"]
    else:
        assert functions_entered(lambda: comm.recv(x, src=None)) == []
        assert functions_entered(lambda: comm.recv(x, 0, tag=3)) == ["recv"]
    return x.tolist()


def test_messages_without_a_tag_do_not_either():
    assert dpcore.spawn(messages, 2, mode="threads") == [[0, 0], [0, 0]]


def mistakes(comm):
    x = torch.ones(2)
    for call, words in [
        (comm.all_reduce, r"all_reduce\(\) missing 1 required positional argument: 'ten"),
        (lambda: comm.all_reduce(x, "sum", x), r"all_reduce\(\) takes from 2 to 3 positional"),
        (lambda: comm.all_reduce(x, tensor=x), "multiple values for argument 'tensor'"),
        (lambda: comm.all_reduce(x, operator="sum"), "unexpected keyword argument 'operator'"),
        (lambda: comm.all_reduce(x, None), "op: expected a name"),
        (lambda: comm.all_reduce(x, ["sum"]), "op: expected a name"),
        (lambda: comm.broadcast(x, "0"), "root: expected an integer, not '0'"),
        (dpcore.Communicator.broadcast, r"broadcast\(\) missing 2 required"),
    ]:
        with pytest.raises(TypeError, match=words):
            call()
    with pytest.raises(dpcore.Unsupported, match='unknown reduction "concat"'):
        comm.all_reduce(x, "concat")
    for option in ("timeout", "priority", "layout"):
        with pytest.raises(TypeError, match=f"{option}: expected .*, not None"):
            comm.all_reduce(x, **{option: None})


def test_mistakes_are_told_by_the_function():
    dpcore.spawn(mistakes, 1, mode="threads")


class Counting(dpcore.Communicator):
    calls = 0

    def broadcast(self, tensor, root=0, **options):
        self.calls += 1
        return super().broadcast(tensor, root, **options)


def in_a_class_of_its_own(comm):
    mine = Counting(comm._native)
    mine.broadcast(torch.ones(2))
    mine.broadcast(torch.ones(2), 0, timeout=5.0)
    return mine.calls


def test_a_subclass_calls_its_base():
    assert dpcore.spawn(in_a_class_of_its_own, 1, mode="threads") == [2]


def test_one_without_a_core_says_so():
    nobody = dpcore.Communicator.__new__(dpcore.Communicator)
    with pytest.raises(AttributeError, match="_native"):
        nobody.broadcast(torch.ones(2))


@pytest.mark.parametrize("name", QUICK)
def test_a_quick_method_looks_like_its_function(name):
    method = getattr(dpcore.Communicator, name)
    function = inspect.unwrap(method)
    assert type(method) is not type(function)
    assert method.__name__ == name and method.__doc__ == function.__doc__
    assert inspect.signature(method) == inspect.signature(function)
    assert inspect.isroutine(method) and name in inspect.getsource(method)


def in_a_compiled_function(comm):
    @torch.compile(backend="eager")
    def doubled(x):
        y = x * 2
        comm.all_reduce(y)
        comm.broadcast(y, 0)
        return y + 1

    return doubled(torch.ones(2)).tolist()


def test_a_compiled_function_may_call_them():
    """torch.compile leaves the calls to the interpreter, with the communicator in front."""
    assert dpcore.spawn(in_a_compiled_function, 2) == [[5, 5], [5, 5]]


def test_it_is_pickled_copied_and_weakly_referenced_as_a_function_is():
    method = dpcore.Communicator.broadcast
    assert pickle.loads(pickle.dumps(method)) is method
    assert copy.deepcopy(method) is method
    assert weakref.ref(method)() is method


def references(comm):
    x, op = torch.ones(2), "".join("sum")
    counts = sys.getrefcount(x), sys.getrefcount(op), sys.getrefcount(comm._native)
    for _ in range(100):
        comm.all_reduce(x, op=op)
        comm.broadcast(x)
        comm.all_reduce(x, op, priority=1)
        with pytest.raises(ValueError, match="root 3"):
            comm.broadcast(x, 3)
    after = sys.getrefcount(x), sys.getrefcount(op), sys.getrefcount(comm._native)
    return after, counts


def test_no_reference_is_kept():
    ((after, counts),) = dpcore.spawn(references, 1, mode="threads")
    assert after == counts


def test_a_flag_that_is_neither_true_nor_false():
    """Its own error, before the operation has a number: ranks stay in step."""

    def body(comm):
        x = torch.ones(2)
        if comm.rank == 0:
            with pytest.raises(TypeError, match="async_op: expected True or False, not tensor"):
                comm.all_reduce(x, async_op=torch.ones(2))
        comm.all_reduce(x)
        return x.tolist()

    assert dpcore.spawn(body, 2, mode="threads") == [[2.0, 2.0]] * 2
