"""Behind a real mpirun: ranks meet through the launcher or through MPI, beside programs of MPI."""

import pytest

from tests.ranks.mpi import SAY, WORLD, each_mpi, mpirun, needs_mpi, only_mpich

pytestmark = needs_mpi
# Ranks of one host meet without the launcher.
TWO_HOSTS = {"DPCORE_PRETEND_HOSTS": "a,b"}


@pytest.mark.parametrize("hosts", [{}, TWO_HOSTS], ids=["one host", "two hosts"])
def test_ranks_meet(tmp_path, hosts):
    """Over TCP rank 0 takes any free port, and of several hosts mpirun's daemon tells the others
    which, through PMIx."""
    run, said = mpirun(
        tmp_path,
        SAY
        + """
import torch, dpcore
from dpcore.comm.launch import pmix
assert "MASTER_PORT" not in os.environ
comm = dpcore.init(transport="tcp")
assert (pmix._of_process is not None) == ("DPCORE_PRETEND_HOSTS" in os.environ)
second = comm.split(0, comm.rank)
values = torch.arange(3.0) + comm.rank
second.all_reduce(values)
say(comm.rank, comm.rank, comm.transport, values.tolist())
dpcore.finalize()
""",
        **hosts,
    )
    assert run.returncode == 0, run.stderr
    assert said == ["0 tcp [1.0, 3.0, 5.0]", "1 tcp [1.0, 3.0, 5.0]"]


def test_a_rank_0_that_does_not_come_is_missed_at_the_deadline(tmp_path):
    run, said = mpirun(
        tmp_path,
        SAY
        + """
import time, dpcore
from dpcore.comm.launch import pmix
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
if rank == 0:
    assert pmix.connect(os.environ)  # who never enters makes mpirun call the whole job failed
    say(rank, "elsewhere")
    time.sleep(3)
else:
    try:
        dpcore.init(transport="tcp", timeout=1)
    except dpcore.RendezvousError as error:
        say(rank, error)
""",
        **TWO_HOSTS,
    )
    assert run.returncode == 0, run.stderr
    assert said[0] == "elsewhere"
    assert "rank 0 did not publish its address through PMIx in 1 s" in said[1]


def test_gradients_over_mpi4py(tmp_path):
    """The same training as one process with the whole batch, beside ranks of ours over TCP."""
    run, said = mpirun(
        tmp_path,
        SAY
        + """
from mpi4py import MPI
import torch, dpcore
from tests.data_parallel.models import OPTIMIZERS, assert_same_values, train, train_alone

ours = dpcore.init(transport="tcp")

class World:
    rank, world_size = ours.rank, ours.world_size

def over_mpi(module, comm):
    return dpcore.DataParallel(module, comm=MPI.COMM_WORLD, bucket_cap_mb=0.01)

model = train(World, OPTIMIZERS["momentum"], wrap=over_mpi)
assert over_mpi(torch.nn.Linear(1, 1), None).group is model.group  # one for all models
assert_same_values(model.module, train_alone(OPTIMIZERS["momentum"]))
beside = train(ours, OPTIMIZERS["momentum"])
assert_same_values(model.module, beside.module)
counts = torch.tensor([8 - 21 * ours.rank, 3], dtype=torch.int16)
model.group.all_reduce(counts, "mean", async_op=False)
assert counts.tolist() == [-2, 3]  # -5 / 2, toward zero
say(ours.rank, model.backend, beside.backend)
dpcore.finalize()
""",
    )
    assert run.returncode == 0, run.stderr
    assert said == ["mpi native"] * WORLD


MPI_FIRST = """
from mpi4py import MPI
import dpcore
"""
MPI_LAST = """
import sys, dpcore
assert "mpi4py" not in sys.modules
"""
MEET_TWICE = """
import torch
for transport in ("tcp", "shm"):
    comm = dpcore.init(transport=transport)
    values = torch.full((3,), comm.rank + 1.0)
    comm.all_reduce(values)
    assert values.tolist() == [3.0] * 3
    if transport == "tcp":
        dpcore.finalize()
from mpi4py import MPI
assert MPI.COMM_WORLD.allreduce(comm.rank) == 1
say(comm.rank, comm.transport)
dpcore.finalize()
"""


@each_mpi
@pytest.mark.parametrize(
    ("order", "hosts"),
    [(MPI_FIRST, {}), (MPI_FIRST, TWO_HOSTS), (MPI_LAST, {})],
    ids=["mpi_first", "mpi_first, two hosts", "mpi_last"],
)
def test_mpi_starts_and_ends_beside_us(tmp_path, launcher, order, hosts):
    """A rank has one line to its launcher. Once MPI has it, ranks of several hosts meet through
    MPI; those of one host need neither."""
    run, said = mpirun(tmp_path, SAY + order + MEET_TWICE, launcher, **hosts)
    assert run.returncode == 0, run.stderr
    assert said == ["shm"] * WORLD


@only_mpich
def test_mpi_starts_after_ranks_of_two_hosts_have_met(tmp_path, launcher):
    """Under Open MPI this hangs now and then (docs/running.md)."""
    run, said = mpirun(tmp_path, SAY + MPI_LAST + MEET_TWICE, launcher, **TWO_HOSTS)
    assert run.returncode == 0, run.stderr
    assert said == ["shm"] * WORLD


@each_mpi
def test_a_program_that_never_starts_mpi_ends_well(tmp_path, launcher):
    run, said = mpirun(
        tmp_path,
        SAY
        + """
import dpcore
from dpcore.comm.launch import mpi_rendezvous
comm = dpcore.init(transport="tcp")
assert not mpi_rendezvous.was_started()
say(comm.rank, comm.transport)
""",
        launcher,
        **TWO_HOSTS,
    )
    assert run.returncode == 0, run.stderr
    assert said == ["tcp"] * WORLD


@each_mpi
def test_ranks_of_torch_find_their_place(tmp_path, launcher):
    """Also twice in one program, as if on two hosts, and before MPI starts."""
    run, said = mpirun(
        tmp_path,
        SAY
        + """
import torch, torch.distributed as dist
from dpcore._autoload import register
register()  # the entry point does it where dpcore is installed
before = dict(os.environ)
try:
    dist.init_process_group("dpcore")
except ValueError as error:
    problem = str(error)
assert "RANK expected, but not set" in problem and 'init_method="dpcore://"' in problem, problem
for hosts in ("", "a,b"):
    os.environ["DPCORE_PRETEND_HOSTS"] = hosts
    dist.init_process_group("dpcore", init_method="dpcore://")
    rank, total = dist.get_rank(), torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    assert total.item() == 3 and dist.get_world_size() == 2
    dist.destroy_process_group()
added = set(os.environ) - set(before) - {"DPCORE_PRETEND_HOSTS", "DDP_DISABLE_COMM_MEM"}
from mpi4py import MPI
assert MPI.COMM_WORLD.rank == rank
say(rank, sorted(added))
""",
        launcher,
    )
    assert run.returncode == 0, run.stderr
    assert said == ["[]"] * WORLD
