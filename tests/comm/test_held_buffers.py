"""Memory that an operation uses stays where it is until the operation is complete."""

import array
import gc
import os
import threading
import time
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist

import dpcore
from tests.ranks import python
from tests.ranks.groups import in_group

LENGTH = 200_000  # too long for a mailbox


def shrink(buffer):
    buffer.release() if isinstance(buffer, memoryview) else buffer.pop()


BUFFERS = {
    "bytearray": lambda: bytearray(b"\1" * LENGTH),
    "array": lambda: array.array("f", [1.0] * LENGTH),
    "memoryview": lambda: memoryview(bytearray(b"\1" * LENGTH)),
}
each_buffer = pytest.mark.parametrize("make", BUFFERS.values(), ids=BUFFERS)


@each_buffer
def test_a_buffer_in_flight_cannot_be_resized(make):
    def body(comm):
        for start in (
            lambda buffer: comm.all_reduce(buffer, "max", async_op=True),
            lambda buffer: comm.all_gather(
                np.ones(2 * LENGTH, *kind(buffer)), buffer, async_op=True
            ),
            lambda buffer: (comm.send if comm.rank else comm.recv)(
                buffer, 1 - comm.rank, async_op=True
            ),
        ):
            buffer = make()
            if comm.rank == 1:
                comm.recv(torch.ones(1), 0, tag=1)
                start(buffer).wait()
            else:
                work = start(buffer)
                with pytest.raises(BufferError):
                    shrink(buffer)
                comm.send(torch.ones(1), 1, tag=1)
                work.wait()
            shrink(buffer)

    def kind(buffer):
        return ("f4",) if isinstance(buffer, array.array) else ("u1",)

    dpcore.spawn(body, 2, mode="threads")


@each_buffer
def test_a_dropped_work_holds_its_buffer_until_it_is_complete(make):
    def body(comm):
        buffer = make()
        if comm.rank == 1:
            comm.recv(torch.ones(1), 0, tag=1)
            comm.all_reduce(buffer, "max")
        else:
            comm.all_reduce(buffer, "max", async_op=True)
            gc.collect()
            with pytest.raises(BufferError):
                shrink(buffer)
            comm.send(torch.ones(1), 1, tag=1)
        comm.barrier()
        comm.all_reduce(torch.ones(1))  # any call lets go of what is complete
        shrink(buffer)

    dpcore.spawn(body, 2, mode="threads")


def test_a_dropped_communicator_ends_what_is_in_flight_before_its_memory_goes():
    def body(comm):
        part = comm.split(0)
        if comm.rank == 0:
            alive = weakref.ref(memory := np.ones(LENGTH, "f4"))
            part.all_reduce(memory, async_op=True)
            del memory
            comm.send(torch.ones(1), 1)
            del part  # waits for rank 1
            gc.collect()
            assert alive() is None
        else:
            comm.recv(torch.ones(1), 0)
            mine = np.ones(LENGTH, "f4")
            part.all_reduce(mine)
            assert np.all(mine == 2.0)
        comm.barrier()

    dpcore.spawn(body, 2, mode="threads")


def test_a_dropped_communicator_that_a_model_uses_as_well():
    """The model's reducer keeps the core, so nobody but the communicator ends what it began."""
    entered, freed = threading.Event(), []

    def body(comm):
        part = comm.split(0)
        model = dpcore.DataParallel(torch.nn.Linear(2, 2), comm=part)
        if comm.rank == 0:
            memory = np.ones(LENGTH, "f4")
            weakref.finalize(memory, lambda: freed.append(entered.is_set()))
            part.all_reduce(memory, async_op=True)
            del memory
            comm.send(torch.ones(1), 1)
            del part, model
            gc.collect()
        else:
            comm.recv(torch.ones(1), 0)
            time.sleep(0.2)
            entered.set()
            part.all_reduce(np.ones(LENGTH, "f4"))
        comm.barrier()

    dpcore.spawn(body, 2, mode="threads")
    assert freed == [True]


def refuses_to_resize_what_is_in_flight(collectives, rank):
    """And allows it again when the last operation on it is complete."""
    tensor = torch.ones(LENGTH)
    if rank == 1:
        collectives.recv(torch.ones(1), 0)
        for _ in range(2):
            collectives.broadcast(torch.ones(LENGTH), 1)
        return
    works = [collectives.broadcast(t, 1, async_op=True) for t in (torch.ones(LENGTH), tensor)]
    for grow in (
        lambda: tensor.resize_(4 * LENGTH),
        lambda: tensor.untyped_storage().resize_(0),
    ):
        with pytest.raises(RuntimeError, match="not resizable"):
            grow()
    collectives.send(torch.ones(1), 1)
    for work in works:
        work.wait()
    tensor.untyped_storage().resize_(8 * LENGTH)
    from_numpy = torch.from_numpy(np.ones(3, "f4"))  # never was resizable, and is not now
    assert not from_numpy.untyped_storage().resizable()


def test_a_tensor_in_flight_cannot_be_resized():
    def body(comm):
        refuses_to_resize_what_is_in_flight(comm, comm.rank)

    dpcore.spawn(body, 2, mode="threads")


def test_a_tensor_in_flight_of_torch_distributed_cannot_be_resized():
    def body():
        refuses_to_resize_what_is_in_flight(dist, dist.get_rank())

    in_group(body, 2)


def test_a_storage_that_two_operations_read_is_fixed_until_both_are_complete():
    def body(comm):
        tensor = torch.ones(LENGTH)
        if comm.rank == 0:
            works = [comm.send(tensor, 1, tag=tag, async_op=True) for tag in (1, 2)]
            comm.barrier()
            works[0].wait()
            with pytest.raises(RuntimeError, match="not resizable"):
                tensor.untyped_storage().resize_(0)
            comm.send(torch.ones(1), 1, tag=3)
            works[1].wait()
            tensor.untyped_storage().resize_(0)
        else:
            comm.barrier()
            comm.recv(tensor, 0, tag=1)
            comm.recv(torch.ones(1), 0, tag=3)
            comm.recv(tensor, 0, tag=2)

    dpcore.spawn(body, 2, mode="threads")


# ---- one tensor in two operations ------------------------------------------------------------


def overlapping(comm):
    """Calls whose memory is in use by the all-reduce of ``x[100:]``, and some whose is not."""
    x = torch.ones(2 * LENGTH)
    half = x[LENGTH:]
    refused = {
        "all_reduce": lambda: comm.all_reduce(x, async_op=True),
        "at once": lambda: comm.all_reduce(half),
        "all_gather": lambda: comm.all_gather(torch.empty(4), x[LENGTH + 7 :][:2], async_op=True),
        "send": lambda: comm.send(x[-1:], 1 - comm.rank, async_op=True),
        "recv": lambda: comm.recv(x[LENGTH : LENGTH + 1], 1 - comm.rank, async_op=True),
    }
    return x, half, refused


def test_memory_in_use_by_an_operation_in_flight_is_refused():
    def body(comm):
        x, half, refused = overlapping(comm)
        if comm.rank == 1:
            comm.recv(torch.ones(1), 0)
            comm.all_reduce(half)
        else:
            work = comm.all_reduce(half, async_op=True)
            for name, call in refused.items():
                with pytest.raises(dpcore.Unsupported) as raised:
                    call()
                assert "in use by operation 0 (all_reduce of 200000 x float32, sum)" in str(
                    raised.value
                ), name
            beside = comm.send(x[:LENGTH], 1, tag=5, async_op=True)
            comm.send(torch.ones(1), 1)
            work.wait()
            beside.wait()
        if comm.rank == 1:
            comm.recv(torch.empty(LENGTH), 0, tag=5)
        comm.all_reduce(x)  # what was refused took no number: the ranks still agree
        assert half.unique().tolist() == [4.0]

    dpcore.spawn(body, 2, mode="threads")


def test_memory_that_operations_only_read_may_be_in_several():
    def body(comm):
        x = torch.full((LENGTH,), float(comm.rank))
        results = [torch.empty(2 * LENGTH) for _ in range(3)]
        works = [comm.all_gather(result, x, async_op=True) for result in results]
        for work in works:
            work.wait()
        return [result.sum().item() for result in results]

    assert dpcore.spawn(body, 2, mode="threads") == [[LENGTH] * 3] * 2


CHECKED = """
import pytest, torch
import dpcore

def body(comm):
    beside = comm.split(0)
    x = torch.ones(200_000)
    if comm.rank == 0:
        work = comm.all_reduce(x, async_op=True)
        with pytest.raises(dpcore.Unsupported, match="in use by operation 2 .all_reduce"):
            beside.all_reduce(x)
        comm.send(torch.ones(1), 1)
        work.wait()
    else:
        comm.recv(torch.ones(1), 0)
        comm.all_reduce(x)
    beside.all_reduce(x)
    return x[0].item()

print(dpcore.spawn(body, 2, mode="threads"))
"""


def test_with_dpcore_check_other_communicators_are_asked_as_well():
    environment = os.environ | {"DPCORE_CHECK": "1"}
    done = python.run("-c", CHECKED, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "[4.0, 4.0]", done.stderr


def keeps_the_memory_of_a_tensor(collectives, rank):
    if rank == 1:
        collectives.recv(torch.ones(1), 0)
        collectives.all_reduce(torch.ones(LENGTH))
        return
    alive = weakref.ref(memory := np.ones(LENGTH, "f4"))
    tensor = torch.from_numpy(memory)
    del memory
    work = collectives.all_reduce(tensor, async_op=True)
    tensor.data = torch.zeros(1)
    gc.collect()
    assert alive() is not None and not work.is_completed()
    collectives.send(torch.ones(1), 1)
    work.wait()
    assert alive() is None


def test_a_tensor_keeps_its_memory_though_it_is_given_another():
    def body(comm):
        keeps_the_memory_of_a_tensor(comm, comm.rank)

    dpcore.spawn(body, 2, mode="threads")


def test_torch_distributed_keeps_the_memory_of_a_tensor_that_is_given_another():
    def body():
        keeps_the_memory_of_a_tensor(dist, dist.get_rank())

    in_group(body, 2)
