"""Memory that an operation uses stays where it is until the operation is complete."""

import array
import gc
import threading
import time
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist

import dpcore
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
