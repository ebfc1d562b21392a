"""Tensors whose elements lie in no memory are refused by name, and the communicator goes on; and
arrays whose order in memory does not matter are taken as they are."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

import dpcore
from dpcore.comm.communicators.torch_group import TorchCommunicator
from tests.ranks.groups import in_group


def fake():
    with FakeTensorMode():
        return torch.ones(4)


def freed():
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def shortened():
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(8)
    return tensor


WITHOUT_MEMORY = {
    "FakeTensor": (fake, "this is a FakeTensor"),
    "TwoTensor": (lambda: TwoTensor(torch.ones(4), torch.ones(4)), "this is a TwoTensor"),
    "MaskedTensor": (
        lambda: masked_tensor(torch.ones(4), torch.ones(4).bool()),
        "this is a MaskedTensor",
    ),
    "functional": (lambda: torch._to_functional_tensor(torch.ones(4)), "functional tensor"),
    "zero": (lambda: torch._efficientzerotensor(4), "efficient zero tensor"),
    "freed": (freed, "memory was freed: it needs 16 bytes, its storage has 0"),
    "shortened": (shortened, "it needs 16 bytes, its storage has 8"),
}
each_kind = pytest.mark.parametrize(
    ("make", "message"), WITHOUT_MEMORY.values(), ids=WITHOUT_MEMORY
)


@each_kind
@pytest.mark.filterwarnings("ignore")
def test_the_communicator_refuses_tensors_without_memory(make, message):
    def body(comm):
        peer, ones = 1 - comm.rank, torch.ones(4)
        for call in (
            lambda: comm.all_reduce(make()),
            lambda: comm.all_reduce(make(), "max", async_op=True),
            lambda: comm.all_gather(torch.ones(8), make()),
            lambda: comm.reduce_scatter(make(), torch.ones(8)),
            lambda: comm.send(make(), peer),
            lambda: comm.recv(make(), peer, async_op=True),
        ):
            with pytest.raises(dpcore.Unsupported, match=message):
                call()
        comm.all_reduce(ones)
        assert ones.tolist() == [2.0] * 4

    dpcore.spawn(body, 2, mode="threads")


@pytest.mark.filterwarnings("ignore")
def test_torch_distributed_refuses_tensors_without_memory():
    """Only those that get there: torch asks subclasses first, and makes zeros of zero tensors."""

    def body():
        ones = torch.ones(4)
        for name in ("freed", "shortened"):
            refuses(*WITHOUT_MEMORY[name])
        dist.all_reduce(ones)
        assert ones.tolist() == [2.0] * 4

    def refuses(make, message):
        peer, ones = 1 - dist.get_rank(), torch.ones(4)
        for call in (
            lambda: dist.all_reduce(make()),
            lambda: dist.broadcast(make(), 0, async_op=True),
            lambda: dist.all_gather([torch.ones(4), make()], ones),
            lambda: dist.all_gather_into_tensor(torch.ones(8), make()),
            lambda: dist.reduce_scatter_tensor(make(), torch.ones(8)),
            lambda: dist.all_to_all_single(ones, make()),
            lambda: dist.send(make(), peer),
        ):
            with pytest.raises(dpcore.Unsupported, match=message):
                call()

    in_group(body, 2)


def test_tensors_without_elements_need_no_memory():
    def body(comm):
        empty = torch.ones(0)
        comm.all_reduce(empty)
        comm.all_reduce(np.ones((0, 3), order="F"))
        comm.all_gather(torch.ones(0), empty)

    dpcore.spawn(body, 2, mode="threads")


def test_arrays_of_one_order_only_are_taken():
    """A column, a row and a number lie alike in both orders."""

    def body(comm):
        for shape in ((4, 1), (1, 4), (4,), ()):
            array = np.asfortranarray(np.full(shape, comm.rank + 1.0))
            comm.all_reduce(array)
            assert np.all(array == 3.0)
        array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
        comm.all_reduce(array.T)  # the same memory on all ranks
        assert array.tolist() == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]

    dpcore.spawn(body, 2, mode="threads")


def test_a_group_of_torch_is_given_memory_in_one_order_only():
    def body():
        comm = TorchCommunicator()
        for buffer in (np.ones((2, 3), order="F"), torch.ones(3, 2).t()):
            with pytest.raises(dpcore.Unsupported, match="not contiguous"):
                comm.all_reduce(buffer)

    in_group(body, 1, backend="gloo")
