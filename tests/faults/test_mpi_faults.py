"""``backend="mpi"``: a rank is late, stops, dies, or gives up; what the other says, and when."""

import time

import pytest

from tests.faults.tries import in_time, three_tries
from tests.ranks.mpi import SAY, each_mpi, mpirun, needs_mpi

pytestmark = needs_mpi

BEGIN = (
    SAY
    + """
import signal, sys, time, torch, dpcore
comm = dpcore.init(backend="mpi")
comm.barrier()
began = time.monotonic()

def heard(error):
    say(comm.rank, f"{time.monotonic() - began:.2f}", type(error).__name__, error)
"""
)


def seconds_of(line):
    return float(line.split()[0])


def run_ranks(tmp_path, first, second, launcher, options=()):
    """What rank 0 does, and rank 1."""
    lines = {"if comm.rank == 0:": first, "else:": second}
    body = BEGIN + "try:\n"
    for condition, code in lines.items():
        body += f"    {condition}\n" + "".join(f"        {line}\n" for line in code)
    body += "except dpcore.Error as error:\n    heard(error)\n    sys.exit(0)\n"
    return mpirun(tmp_path, body, launcher, options=options)


@each_mpi
@three_tries
def test_a_late_rank_is_named_at_the_deadline(tmp_path, launcher):
    """It computes, and its thread answers: it has not come to the operation."""
    run, said = run_ranks(
        tmp_path,
        ["comm.all_reduce(torch.ones(4), timeout=1)"],
        ["time.sleep(3)", "comm.all_reduce(torch.ones(4))"],
        launcher,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Timeout rank 0: all_reduce 2 (4 elements of torch.float32, sum)" in said[0]
    assert "rank 1 has called 1 collective of this communicator, not 2" in said[0]
    assert "MPI may still use the buffer" in said[0]
    in_time(1 <= seconds_of(said[0]) < 2.5)
    assert "PeerLost rank 1: rank 0 gave up: Timeout" in said[1]


@each_mpi
def test_the_first_error_comes_again(tmp_path, launcher):
    run, said = run_ranks(
        tmp_path,
        [
            "work = comm.recv(torch.ones(4), 1, async_op=True)",
            "try: work.wait(0.5)",
            "except dpcore.Timeout as error: first = str(error)",
            "assert work.is_completed() and 'recv 1' in first, first",
            "try: comm.barrier()",
            "except dpcore.Timeout as error: assert str(error) == first",
            "comm.close()",
            "say(0, 'again')",
        ],
        ["time.sleep(2)", "comm.barrier()"],
        launcher,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert said[0] == "again" and "PeerLost" in said[1]


@each_mpi
def test_a_program_that_gave_up_knows_it(tmp_path, launcher):
    """`close` has nothing to tell it, as with the other communicators."""
    run, said = run_ranks(
        tmp_path,
        [
            "comm.abort('no more data')",
            "comm.close()",
            "say(0, 'closed')",
        ],
        ["comm.barrier()"],
        launcher,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert said[0] == "closed" and "PeerLost rank 1: rank 0 gave up: no more data" in said[1]


@each_mpi
@three_tries
def test_a_stopped_rank_does_not_answer_and_the_job_ends(tmp_path, launcher):
    run, said = run_ranks(
        tmp_path,
        ["comm.all_reduce(torch.ones(4), timeout=1)"],
        ["os.kill(os.getpid(), signal.SIGSTOP)"],
        launcher,
    )
    assert run.returncode != 0  # by MPI_Abort: MPI_Finalize would wait for the stopped one
    assert "rank 1 did not answer" in said[0]
    in_time(seconds_of(said[0]) < 4)
    assert "rank 0: ends the job with MPI_Abort" in run.stdout + run.stderr


@each_mpi
@three_tries
def test_an_uncaught_error_reaches_the_others_at_once(tmp_path, launcher):
    run, said = run_ranks(
        tmp_path,
        ["comm.all_reduce(torch.ones(4))"],
        ["time.sleep(0.5)", "raise ValueError('no such file: data.csv')"],
        launcher,
    )
    assert run.returncode != 0
    assert said[0].split(" ", 1)[1] == (
        "PeerLost rank 0: rank 1 gave up: ValueError: no such file: data.csv"
    )
    in_time(seconds_of(said[0]) < 2)
    assert "ValueError: no such file" in run.stderr


@each_mpi
def test_a_message_of_another_size(tmp_path, launcher):
    run, said = run_ranks(
        tmp_path,
        ["comm.recv(torch.ones(4), 1)"],
        ["comm.send(torch.ones(3), 0)", "time.sleep(1)", "comm.barrier()"],
        launcher,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Mismatch rank 0: recv 1 (4 elements" in said[0]
    assert "rank 1 sent 12 bytes, not 16" in said[0]
    assert "PeerLost rank 1: rank 0 gave up: Mismatch" in said[1]


@each_mpi
@three_tries
def test_a_killed_rank_ends_the_job(tmp_path, launcher):
    """That is what both launchers do, whatever the other ranks wait for."""

    began = time.monotonic()
    run, said = run_ranks(
        tmp_path,
        ["comm.all_reduce(torch.ones(4))"],
        ["os.kill(os.getpid(), signal.SIGKILL)"],
        launcher,
    )
    assert run.returncode != 0 and not said
    in_time(time.monotonic() - began < 15)


REDUCE = "comm.all_reduce(torch.ones(4))"


@pytest.mark.parametrize(
    ("meanwhile", "what"),
    [([], "all_reduce 2"), (["time.sleep(2)"], "messages between ranks over MPI")],
)
@three_tries
def test_a_killed_rank_where_the_library_notices_it(tmp_path, meanwhile, what):
    """Open MPI with its support for faults, and ranks that may go on. Rank 1 dies when rank 0 has
    left the barrier, which would notice it, too."""
    run, said = run_ranks(
        tmp_path,
        [*meanwhile, REDUCE],
        ["time.sleep(0.5)", "os.kill(os.getpid(), signal.SIGKILL)"],
        "openmpi",
        options=("--with-ft", "mpi", "--enable-recovery"),
    )
    assert said, run.stdout + run.stderr
    assert f"PeerLost rank 0: {what}" in said[0] and "PROC_FAILED" in said[0]
    in_time(seconds_of(said[0]) < 5)


def test_ranks_that_do_not_come_to_init(tmp_path):
    run, said = mpirun(
        tmp_path,
        SAY
        + """
import time
from mpi4py import MPI
import dpcore
rank = MPI.COMM_WORLD.rank
if rank == 1:
    time.sleep(3)
else:
    try:
        dpcore.init(backend="mpi", timeout=1)
    except dpcore.RendezvousError as error:
        say(rank, error)
""",
    )
    assert said and "rank 0: not all 2 MPI ranks arrived within 1 s" in said[0]
    assert run.returncode == 0, run.stderr


def test_waiting_for_any_message_names_who_does_not_answer(tmp_path):
    run, said = run_ranks(
        tmp_path,
        ["comm.recv(torch.ones(4), None, timeout=1)"],
        ["time.sleep(3)", "comm.barrier()"],
        "openmpi",
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Timeout rank 0: recv 1" in said[0] and "all ranks answered" in said[0]
