"""One body of checks, contract.py, that every kind of communicator goes through."""

import inspect

import pytest
import torch

import dpcore
from dpcore import _C
from dpcore.comm.communicators.cupy_nccl import CupyCommunicator
from dpcore.comm.communicators.device import DeviceCommunicator
from dpcore.comm.communicators.mpi.communicator import MpiCommunicator
from dpcore.comm.communicators.protocol import GradientGroup
from dpcore.comm.communicators.torch_group import TorchCommunicator
from tests.comm import contract
from tests.comm.modes import HOW, MODES
from tests.cuda_host.conftest import fake, stand_in  # noqa: F401  (fixtures)
from tests.cuda_host.test_cupy import notes_of
from tests.ranks.devices import on_devices
from tests.ranks.groups import in_group
from tests.ranks.mpi import SAY, each_mpi, mpirun, needs_mpi

WORLD = 3


@pytest.mark.parametrize("mode", MODES)
def test_the_core_keeps_the_contract(mode):
    dpcore.spawn(contract.everything, WORLD, **HOW[mode])


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("backend", ("nccl", "cuda"))
def test_devices_keep_the_contract(backend):
    on_devices(contract.everything, WORLD, backend=backend)


def test_groups_of_torch_keep_the_contract():
    in_group(lambda: contract.everything(TorchCommunicator()), WORLD, backend="gloo")


def test_cupy_refuses_what_the_contract_refuses():
    """Over a stand-in for CuPy that moves no data."""

    def body(comm):
        contract.mistakes(comm)
        with pytest.raises(dpcore.Unsupported, match="no algorithm, layout"):
            comm.all_reduce(torch.ones(4), algorithm="ring", layout=7)
        with pytest.raises(dpcore.Unsupported, match="no tag"):
            comm.send(torch.ones(4), 1 - comm.rank, tag=3)
        assert comm.stats()["backend"] == "cupy" and comm.empty(2, 3).shape == (2, 3)

    called = [note[0] for note in notes_of(body) if isinstance(note, tuple)]
    assert called == ["allReduce", "keep"]  # whose wait() had a wrong argument


@needs_mpi
@each_mpi
@pytest.mark.parametrize("world", (2, 4))
def test_mpi_keeps_the_contract(tmp_path, launcher, world):
    run, said = mpirun(
        tmp_path,
        SAY
        + """
import dpcore
from tests.comm import contract
comm = dpcore.init(backend="mpi")
contract.gradient_group(comm)
contract.everything(comm)
say(comm.rank, "kept")
""",
        launcher,
        world,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert said == ["kept"] * world


def test_a_gradient_group_is_a_part_of_the_whole():
    def body(comm):
        assert isinstance(comm, GradientGroup)
        contract.gradient_group(comm)

    dpcore.spawn(body, WORLD, mode="threads")


def parameters_of(name, gives, gets, reduces, comes_from_root, goes_to_root):
    """Those of the method, as they follow from the core's table."""
    whole, exchanges = gives == "whole", gives == gets == "all parts"
    everyone_gets_the_same = gives != "all parts" and gets != "own part" and not goes_to_root
    words = ["tensor"] if whole else [] if gives == "nothing" else ["output", "input"]
    words += ["root"] * (comes_from_root or goes_to_root) + ["op"] * reduces
    words += (
        []
        if whole or name == "barrier"
        else ["output_sizes", "input_sizes"]
        if exchanges
        else ["sizes"]
    )
    words += ["async_op", "timeout"] + ["algorithm", "priority"] * (name != "barrier")
    return (
        words + ["factor"] * reduces + ["layout"] * (everyone_gets_the_same and name != "barrier")
    )


KINDS = (
    dpcore.Communicator,
    DeviceCommunicator,
    TorchCommunicator,
    MpiCommunicator,
    CupyCommunicator,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", _C.collectives(), ids=lambda row: row[0])
def test_the_methods_have_what_the_table_says(row, kind):
    signature = inspect.signature(getattr(kind, row[0]))
    assert sorted(signature.parameters) == sorted(["self", *parameters_of(*row)])
