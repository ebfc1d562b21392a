"""Gradients into buckets and back by one launch each, on devices of the host."""

import pytest
import torch

import dpcore
from dpcore.comm.communicators.torch_group import TorchCommunicator
from tests.cuda_host import gradient_copies as bodies
from tests.ranks.devices import calls, on_devices
from tests.ranks.groups import in_group

pytestmark = pytest.mark.usefixtures("fake")

NARROW = [torch.float16, torch.bfloat16]
BACKENDS = ["nccl", "cuda"]


def run(body, world, *args, backend="nccl", **options):
    return on_devices(lambda comm: body(comm, "cpu", *args), world, backend=backend, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_launch_per_bucket(dtype, as_view, backend):
    run(bodies.one_launch_per_bucket, 2, as_view, dtype, backend=backend)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("narrow", NARROW)
def test_in_a_narrow_type(narrow, as_view, world):
    run(bodies.in_a_narrow_type, world, as_view, narrow)


@pytest.mark.parametrize("narrow", NARROW)
def test_forward_in_a_narrow_type(narrow):
    run(bodies.forward_in_a_narrow_type, 2, narrow)


def test_the_library_is_given_the_narrow_type(fake):
    """What travels is bfloat16 (ncclBfloat16 is 9), and nothing else is averaged."""
    run(bodies.in_a_narrow_type, 2, True, torch.bfloat16)
    averages = [call for call in calls(fake) if call.startswith("AllReduce") and "op 4" in call]
    assert averages and all(" x 9 " in call for call in averages), averages[:3]


@pytest.mark.parametrize("narrow", [None, torch.bfloat16])
@pytest.mark.parametrize("as_view", [True, False])
def test_two_backwards_of_one_forward(as_view, narrow):
    run(bodies.two_backwards_of_one_forward, 2, as_view, narrow)


def test_other_layouts_are_copied_alone():
    run(bodies.other_layouts_are_copied_alone, 2)


def test_more_than_a_launch_can_carry():
    run(bodies.more_than_a_launch_can_carry, 2)


@pytest.mark.parametrize("narrow", [None, torch.bfloat16])
@pytest.mark.parametrize("as_view", [True, False])
def test_unused_gradients(as_view, narrow):
    run(bodies.unused_gradients, 2, as_view, narrow)


@pytest.mark.parametrize("narrow", [None, torch.float16])
def test_ranks_without_inputs(narrow):
    run(bodies.ranks_without_inputs, 2, narrow)


class OnDevice(TorchCommunicator):
    """A group of torch whose tensors are on a device: here that of the host, said to be so."""

    _copies_on = "host"
    _compiled = property(lambda self: self)  # by calls of Python, which alone know such a device


@pytest.mark.parametrize("as_view", [True, False])
def test_over_a_group_of_torch(as_view):
    """Of a program that has called init_process_group("nccl"), say."""

    def body():
        comm = OnDevice()
        bodies.one_launch_per_bucket(comm, "cpu", as_view)
        bodies.in_a_narrow_type(comm, "cpu", as_view, torch.bfloat16)
        bodies.two_backwards_of_one_forward(comm, "cpu", as_view, None)
        bodies.unused_gradients(comm, "cpu", as_view, torch.bfloat16)
        bodies.more_than_a_launch_can_carry(comm, "cpu")
        bodies.ranks_without_inputs(comm, "cpu", None)

    in_group(body, 2, backend="gloo")


def test_a_type_that_dpcore_lacks_is_no_reason_to_refuse_a_group_of_torch():
    def body():
        module = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(4, dtype=torch.complex32))])
        dpcore.DataParallel(module, comm=OnDevice(), init_sync=False)

    in_group(body, 1, backend="gloo")
