"""Which rank of how many: what is read from the variables of launchers, and in which order."""

import os
import socket
import threading
import time

import pytest

import dpcore
from dpcore.comm.launch import mpi_rendezvous
from dpcore.comm.launch.identity import (
    find_identity,
    is_launched,
    may_span_hosts,
    slurm_address,
    spans_hosts,
)
from dpcore.comm.launch.pmi import Pmi

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}
PLAIN = {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "host", "MASTER_PORT": "1"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "prterun@1"}
MPICH = {"PMI_RANK": "4", "PMI_SIZE": "5", "MASTER_PORT": "1"}
SLURM = {"SLURM_PROCID": "5", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "6",
         "SLURM_JOB_ID": "77"}  # fmt: skip
SHELL_IN_SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "77"}
SHELL_OF_SRUN = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1",
                 "SLURM_JOB_ID": "77"}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "rank", "world"),
    [
        ({}, 0, 1),
        (TORCHRUN, 1, 2),
        (PLAIN, 2, 3),
        (OPEN_MPI, 3, 4),
        (MPICH, 4, 5),
        (SLURM, 5, 6),
        (SHELL_IN_SLURM, 0, 1),
        (SHELL_OF_SRUN, 0, 1),
        (OPEN_MPI | TORCHRUN, 1, 2),  # torchrun started by mpirun, once per host
        (SLURM | TORCHRUN, 1, 2),
        (SLURM | OPEN_MPI, 3, 4),
    ],
    ids=[
        "nobody",
        "torchrun",
        "plain",
        "openmpi",
        "mpich",
        "slurm",
        "shell",
        "shell-of-srun",
        "torchrun-in-mpi",
        "torchrun-in-slurm",
        "mpi-in-slurm",
    ],
)
def test_rank_and_world(environment, rank, world):
    identity = find_identity(environment=environment)
    assert (identity.rank, identity.world_size) == (rank, world)


def test_launchers_that_contradict_each_other_are_named():
    with pytest.raises(dpcore.RendezvousError) as caught:
        find_identity(environment=PLAIN | OPEN_MPI)
    assert "RANK and WORLD_SIZE (torchrun, plain): rank 2 of 3" in str(caught.value)
    assert "OMPI_COMM_WORLD_RANK and _SIZE (Open MPI): rank 3 of 4" in str(caught.value)
    agreeing = OPEN_MPI | {"RANK": "3", "WORLD_SIZE": "4"}
    assert find_identity(environment=agreeing).rank == 3
    assert find_identity(1, 2, environment=PLAIN | OPEN_MPI).rank == 1  # arguments win


@pytest.mark.parametrize(("agents", "names"), [(None, 2), ("1", 2), ("2", 1)])
def test_a_restart_meets_under_another_name_where_all_ranks_know_its_number(agents, names):
    """The agents of several hosts do not: one whose ranks were well counts no restart."""
    started = TORCHRUN if agents is None else TORCHRUN | {"GROUP_WORLD_SIZE": agents}
    jobs = {
        find_identity(environment=started | {"TORCHELASTIC_RESTART_COUNT": str(count)}).job
        for count in (0, 1)
    }
    assert len(jobs) == names


BY_HAND = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


def job(environment, init_method=None):
    return find_identity(0, 4, init_method, environment).job


@pytest.mark.parametrize("told, tasks, names", [(BY_HAND, 1, 1), (BY_HAND, 4, 2), ({}, 1, 2)])
def test_steps_of_slurm_have_names_of_their_own_unless_told_an_address(told, tasks, names):
    steps = [
        told | SLURM | {
            "SLURM_STEP_ID": str(step),
            "SLURM_STEP_NUM_TASKS": str(tasks),
            "PMIX_NAMESPACE": f"slurm.pmix.77.{step}",
        }
        for step in range(2)
    ]  # fmt: skip
    assert len({job(step) for step in steps}) == names


@pytest.mark.parametrize(
    ("environment", "init_method", "names"),
    [
        (BY_HAND, None, 1),
        (BY_HAND, "tcp://10.0.0.1:29500", 1),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}, None, 1),
        ({}, "file:///shared/by/hosts", 1),
        (BY_HAND | {"MASTER_ADDR": "localhost"}, None, 2),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, None, 2),
        (BY_HAND, "a name of this host", 2),
    ],
)
def test_the_number_of_the_user_is_in_names_that_mean_one_host(
    monkeypatch, environment, init_method, names
):
    found = set()
    for user in (1000, 1001):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        found.add(job(environment, init_method))
    assert len(found) == names


def test_one_argument_of_two():
    with pytest.raises(dpcore.RendezvousError, match="both rank= and world_size="):
        find_identity(rank=1)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"LOCAL_WORLD_SIZE": "4"}, False),
        ({"LOCAL_WORLD_SIZE": "2"}, True),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, True),
        ({"MPI_LOCALNRANKS": "4"}, False),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2"}, True),
        ({"SLURM_STEP_NUM_NODES": "2"}, None),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "4"}, False),
        # A step for each host, and ranks that were told who they are.
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}, None),
    ],
)
def test_whether_the_job_spans_hosts(environment, expected):
    assert spans_hosts(4, environment) is expected
    if expected is not None:
        assert may_span_hosts(4, "tcp://node0:1", environment) is expected


@pytest.mark.parametrize(
    ("init_method", "environment", "expected"),
    [
        (None, BY_HAND, True),
        (None, {**BY_HAND, "MASTER_ADDR": "localhost"}, False),
        ("env://", {**BY_HAND, "MASTER_ADDR": "127.0.1.1"}, False),
        ("tcp://[::1]:29500", BY_HAND, False),
        ("tcp://[fd77::1]:29500", {}, True),
        ("tcp://10.0.0.1:29500", {}, True),
        ("a name of this host", BY_HAND, False),
        ("a name of this host", {"DPCORE_PRETEND_HOSTS": "a,b"}, True),
        ("a name of this host", {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, False),  # of a launcher around
        ("file:///shared/by/hosts", {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, True),
        (None, {}, False),
    ],
)
def test_whether_ranks_that_nobody_launched_may_be_on_several_hosts(
    init_method, environment, expected
):
    assert may_span_hosts(2, init_method, environment) is expected
    assert not may_span_hosts(1, init_method, environment)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("one", "one"),
        ("a,b", "a"),
        ("n[1-3]", "n1"),
        ("gpu-[007,9],x", "gpu-007"),
        ("n3[12]", "n312"),
        ("rack[1-2]node[3-4]", "rack1node3"),
        ("gpu[07-09]-ib,login", "gpu07-ib"),
    ],
)
def test_the_first_host_of_a_slurm_step(nodes, host):
    assert slurm_address({"SLURM_STEP_NODELIST": nodes, "SLURM_JOB_ID": "12"}) == f"{host}:15012"


def test_steps_of_a_job_meet_at_ports_of_their_own():
    job = {"SLURM_STEP_NODELIST": "one", "SLURM_JOB_ID": "12"}
    addresses = {slurm_address(job | {"SLURM_STEP_ID": str(step)}) for step in range(100)}
    assert len(addresses) == 100 and "one:15012" in addresses


def test_no_launcher_and_no_slurm():
    assert slurm_address({}) is None
    assert not is_launched({})
    assert is_launched(SLURM)
    assert not is_launched(SHELL_OF_SRUN)


# ---- PMI -------------------------------------------------------------------------------------


class Mpiexec(threading.Thread):
    """Answers as MPICH's does, a byte at a time."""

    def __init__(self, line, answers):
        super().__init__(daemon=True)
        self.line, self.answers, self.questions = line, answers, []

    def run(self):
        for question in self.line.makefile():
            self.questions.append(question.strip())
            if question.split()[0] not in self.answers:
                self.line.shutdown(socket.SHUT_RDWR)
                return
            answer = self.answers[question.split()[0]]
            for byte in answer.encode() + b"\n" if answer else b"":
                self.line.send(bytes([byte]))


ANSWERS = {
    "cmd=init": "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
    "cmd=get_my_kvsname": "cmd=my_kvsname kvsname=kvs_7",
    "cmd=put": "cmd=put_result rc=0 msg=success",
    "cmd=barrier_in": "cmd=barrier_out",
    "cmd=get": "cmd=get_result rc=0 msg=success value=10.0.0.1:5=x",
    "cmd=finalize": "cmd=finalize_ack",
}


def pmi_with(answers):
    ours, theirs = socket.socketpair()
    server = Mpiexec(theirs, answers)
    server.start()
    return Pmi(ours.detach()), server


def test_pmi_publishes_and_reads(monkeypatch):
    # A test before may have started MPI in this process.
    monkeypatch.setattr(mpi_rendezvous, "was_started", lambda: False)
    pmi, server = pmi_with(ANSWERS)
    assert pmi.name == "kvs_7"
    with pmi.publish("job/0", "10.0.0.1:5"):
        pass
    assert pmi.read("job/0", time.monotonic() + 5) == "10.0.0.1:5=x"
    pmi.leave()
    assert server.questions[2:] == [
        "cmd=put kvsname=kvs_7 key=job/0 value=10.0.0.1:5",
        "cmd=barrier_in",
        "cmd=barrier_in",
        "cmd=get kvsname=kvs_7 key=job/0",
        "cmd=finalize",
    ]


def test_pmi_leaves_the_line_as_mpi_expects_it():
    """MPI reads from the same descriptor, before or after, and ends it when it was started."""
    ours, theirs = socket.socketpair()
    server = Mpiexec(theirs, ANSWERS)
    server.start()
    pmi = Pmi(ours.fileno())
    assert os.get_blocking(ours.fileno())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mpi_rendezvous, "was_started", lambda: True)
        pmi.leave()
    del pmi
    assert "cmd=finalize" not in server.questions
    ours.sendall(b"cmd=get key=of-mpi\n")  # still open
    assert ours.makefile("rb").readline().startswith(b"cmd=get_result")


def test_pmi_that_refuses_or_hangs_up():
    pmi, _ = pmi_with(ANSWERS | {"cmd=get": "cmd=get_result rc=-1 msg=key_not_found"})
    with pytest.raises(dpcore.RendezvousError, match="key_not_found"):
        pmi.read("job/0", time.monotonic() + 5)
    pmi, _ = pmi_with(ANSWERS | {"cmd=barrier_in": ""})
    with pytest.raises(dpcore.RendezvousError, match=r"no answer in 0 s; have all ranks come\?"):
        pmi.read("job/0", time.monotonic())
    known = {name: answer for name, answer in ANSWERS.items() if name != "cmd=barrier_in"}
    pmi, _ = pmi_with(known)
    with pytest.raises(dpcore.RendezvousError, match="mpiexec does not answer 'cmd=barrier_in'"):
        pmi.read("job/0", time.monotonic() + 5)


# ---- MPI -------------------------------------------------------------------------------------


class World:
    """MPI's communicator of two ranks, as rank 1 sees it: ``sent`` is what rank 0 broadcasts."""

    def __init__(self, sent):
        self.sent = sent

    def Get_rank(self):  # noqa: N802
        return 1

    def Ibcast(self, buffer, root):  # noqa: N802
        if self.sent is not None:
            buffer[: len(self.sent)] = self.sent
        return self

    def Test(self):  # noqa: N802
        return self.sent is not None


def test_a_rendezvous_through_mpi_names_what_went_wrong():
    mpi = mpi_rendezvous.MpiStore(World(b"job/0 10.0.0.1:5".ljust(512)))
    assert mpi.read("job/0", time.monotonic()) == "10.0.0.1:5"
    with pytest.raises(dpcore.RendezvousError, match=r"rank 1 expected job/1 from rank 0 .*job/0"):
        mpi.read("job/1", time.monotonic())
    with pytest.raises(dpcore.RendezvousError, match="set MASTER_ADDR and MASTER_PORT"):
        mpi_rendezvous.MpiStore(World(None)).read("job/0", time.monotonic())
    patient = mpi_rendezvous.MpiStore(World(None), 0.01).publish("job/0", "10.0.0.1:5")
    with pytest.raises(dpcore.RendezvousError, match="did not all come"), patient:
        pass


def test_without_an_mpi_of_our_ranks_it_is_not_used():
    assert mpi_rendezvous.connect(0, 2) is None
