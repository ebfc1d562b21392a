"""`mpiexec` over two machines, which are network namespaces: one unchanged program, both libraries.

The ranks meet through the launcher, and what they send each other goes over the network between.
"""

import os
import re
import subprocess

import pytest

from dpcore.tools.compare.collectives.wires import Wire
from tests.faults.hosts import hosts, why_not
from tests.ranks import python
from tests.ranks.mpi import MPICH, MPIRUN, ROOT, each_mpi, needs_mpi

LINE = re.compile(r"steps 1 to 60 on 2 ranks, (\w+): loss [\d.]+, parameters (\w{12})")


def train(between, launcher, *options):
    """What `mpiexec` with a rank on each host says."""
    words = [python.executable(), "examples/train.py", *options]
    environment = {name: value for name, value in os.environ.items() if name != "MASTER_PORT"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["DPCORE_SOCKET_IFNAME"] = "eth0"  # the names of these hosts lead nowhere
    if launcher == "mpich":
        environment["MPI4PY_LIBMPI"] = str(MPICH / "lib" / "libmpi.so.12")
        command = [str(MPICH / "bin" / "mpiexec"), "-n", "2", *between.mpich()]
    else:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        command = [str(MPIRUN), "-n", "2", *between.openmpi()]
    outcome = subprocess.run(
        between.before_mpiexec(launcher, [*command, *words]), cwd=ROOT, env=environment,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    (found,) = LINE.findall(outcome.stdout)
    return found


@needs_mpi
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
@each_mpi
def test_a_rank_on_each_of_two_machines(launcher):
    with hosts(2) as made:
        addresses = (made.address(0), made.address(1))
        between = Wire("cable", "eth0", tuple(made.names), addresses)
        native, digest = train(between, launcher)
        assert native == "native"
        if os.environ.get("DPCORE_TEST_FULL"):
            assert train(between, launcher, "--backend", "mpi") == ("mpi", digest)
