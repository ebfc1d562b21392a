"""Behind a real mpirun: ranks meet through its PMIx, and gradients can go over mpi4py."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MPIRUN = Path(sys.executable).with_name("mpirun")
WORLD = 2

pytestmark = pytest.mark.skipif(
    not MPIRUN.exists(), reason="Open MPI is not installed beside this Python"
)


def mpirun(tmp_path, body, **variables):
    """Each rank writes what it says into a file of its own: mpirun mixes their output."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(body))
    without = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in without}
    environment |= {"PYTHONPATH": str(ROOT), "SAID": str(tmp_path), **variables}
    options = ["--allow-run-as-root", "--oversubscribe", "-n", str(WORLD)]
    run = subprocess.run(
        [MPIRUN, *options, sys.executable, script],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    said = [path.read_text() for path in sorted(tmp_path.glob("rank*"))]
    return run, said


SAY = """
import os
from pathlib import Path

def say(rank, *words):
    Path(os.environ["SAID"], f"rank{rank}").write_text(" ".join(map(str, words)))
"""


def test_ranks_meet_through_pmix(tmp_path):
    """Over TCP rank 0 takes any free port, and mpirun's daemon tells the others which."""
    run, said = mpirun(
        tmp_path,
        SAY
        + """
import torch, dpcore
assert "MASTER_PORT" not in os.environ
comm = dpcore.init(transport="tcp")
second = comm.split(0, comm.rank)
values = torch.arange(3.0) + comm.rank
second.all_reduce(values)
say(comm.rank, comm.rank, comm.transport, values.tolist())
dpcore.finalize()
""",
    )
    assert run.returncode == 0, run.stderr
    assert said == ["0 tcp [1.0, 3.0, 5.0]", "1 tcp [1.0, 3.0, 5.0]"]


def test_a_rank_0_that_does_not_come_is_missed_at_the_deadline(tmp_path):
    run, said = mpirun(
        tmp_path,
        SAY
        + """
import time, dpcore
from dpcore import pmix
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
from mpi4py import MPI  # first of all: Open MPI wants to be the one who enters PMIx
import dpcore
from tests.data_parallel.models import OPTIMIZERS, assert_same_values, train, train_alone

ours = dpcore.init(transport="tcp")

class World:
    rank, world_size = ours.rank, ours.world_size

def over_mpi(module, comm):
    return dpcore.DataParallel(module, comm=MPI.COMM_WORLD, bucket_cap_mb=0.01)

model = train(World, OPTIMIZERS["momentum"], wrap=over_mpi)
assert_same_values(model.module, train_alone(OPTIMIZERS["momentum"]))
beside = train(ours, OPTIMIZERS["momentum"])
assert_same_values(model.module, beside.module)
say(ours.rank, model.backend, beside.backend)
dpcore.finalize()
""",
    )
    assert run.returncode == 0, run.stderr
    assert said == ["mpi native"] * WORLD
