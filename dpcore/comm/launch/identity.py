"""Which rank am I, of how many, in which job? Answered from what launchers leave behind.

The result is a name under which the ranks of one host meet. Only where no variable tells one job
from another (MPICH), the ranks agree on it, through MPI or the launcher.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dpcore.comm.communicators.checks import check_integer
from dpcore.comm.launch import mpi_rendezvous, pmi
from dpcore.errors import RendezvousError

_RANK_SETS = {
    "RANK and WORLD_SIZE (torchrun, plain)": ("RANK", "WORLD_SIZE"),
    "OMPI_COMM_WORLD_RANK and _SIZE (Open MPI)": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "PMI_RANK and PMI_SIZE (MPICH)": ("PMI_RANK", "PMI_SIZE"),
}


@dataclass(frozen=True)
class Identity:
    """A rank, its world, and the name that all ranks of the job share."""

    rank: int
    world_size: int
    job: str


def find_identity(
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Identity:
    """Arguments first, then the environment, then a world of one.

    >>> find_identity(environment={})
    Identity(rank=0, world_size=1, job='alone')
    >>> find_identity(environment={"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}).rank
    1
    """
    env = os.environ if environment is None else environment
    if rank is not None:
        rank = check_integer(rank, "rank")
    if world_size is not None:
        world_size = check_integer(world_size, "world_size")
    if (rank is None) != (world_size is None):
        raise RendezvousError("give both rank= and world_size=, or neither")
    if rank is None or world_size is None:
        found = _from_environment(env)
        if found is None:
            return Identity(0, 1, "alone")
        rank, world_size = found
    if not 0 <= rank < world_size:
        raise RendezvousError(
            f"rank {rank} in a world of {world_size}: rank must be 0..{world_size - 1}"
        )
    if world_size == 1:
        return Identity(0, 1, "alone")
    return Identity(rank, world_size, _job_name(env, init_method, rank, world_size))


def is_launched(environment: Mapping[str, str] | None = None) -> bool:
    """Whether a launcher started this process as one of its ranks.

    >>> is_launched({"RANK": "0", "WORLD_SIZE": "1"}), is_launched({})
    (True, False)
    """
    return _from_environment(os.environ if environment is None else environment) is not None


def spans_hosts(world_size: int, env: Mapping[str, str]) -> bool | None:
    """Whether the ranks are on several hosts, as far as the launcher says it.

    >>> spans_hosts(4, {"LOCAL_WORLD_SIZE": "2"}), spans_hosts(2, {"LOCAL_WORLD_SIZE": "2"})
    (True, False)
    >>> spans_hosts(4, {})
    """
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        if name in env:
            return int(env[name]) < world_size
    if _is_one_step(world_size, env):
        return int(env.get("SLURM_STEP_NUM_NODES", "1")) > 1
    return None


def _is_one_step(world_size: int, env: Mapping[str, str]) -> bool:
    """Whether a step of Slurm has all ranks, and is not one of several that start some each."""
    tasks = env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", world_size))
    return "SLURM_STEP_ID" in env and int(tasks) == world_size


def may_span_hosts(
    world_size: int, init_method: str | None = None, environment: Mapping[str, str] | None = None
) -> bool:
    """The same, and where no launcher says it, whether other hosts can reach the rendezvous.

    >>> plain = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    >>> may_span_hosts(4, None, plain), may_span_hosts(4, "tcp://127.0.0.1:29500", plain)
    (True, False)
    """
    env = os.environ if environment is None else environment
    if env.get("DPCORE_PRETEND_HOSTS"):
        return world_size > 1
    if init_method and not init_method.startswith(("tcp://", "file://", "env://")):
        return False  # a name only means something on this host
    said = spans_hosts(world_size, env)
    if said is not None or world_size == 1:
        return bool(said)
    if init_method is not None and init_method.startswith("tcp://"):
        host = init_method.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    elif init_method in (None, "env://") and "MASTER_PORT" in env:
        host = env.get("MASTER_ADDR", "localhost").strip("[]")
    else:
        return False
    return not (host in ("localhost", "::1") or host.startswith("127."))


def _from_environment(env: Mapping[str, str]) -> tuple[int, int] | None:
    answers = {
        label: (int(env[rank]), int(env[size]))
        for label, (rank, size) in _RANK_SETS.items()
        if rank in env and size in env
    }
    # The launcher nearest to us set its variables last: torchrun's win inside an MPI job of
    # one process per host. Two that disagree otherwise are a mistake, and not guessed at.
    if "TORCHELASTIC_RUN_ID" in env and "RANK" in env:
        return int(env["RANK"]), int(env["WORLD_SIZE"])
    if len(set(answers.values())) > 1:
        listed = "; ".join(f"{label}: rank {r} of {n}" for label, (r, n) in answers.items())
        raise RendezvousError(
            f"two launchers contradict each other: {listed}. Unset one set of variables, or pass "
            "rank= and world_size="
        )
    if not answers and {"SLURM_PROCID", "SLURM_STEP_ID"} <= env.keys():
        # Last of all, and never for one task: a shell in Slurm has these too, whatever it starts.
        size = int(env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS", "1"))
        return (int(env["SLURM_PROCID"]), size) if size > 1 else None
    return next(iter(answers.values()), None)


def slurm_address(env: Mapping[str, str]) -> str | None:
    """Where rank 0 of a Slurm step can listen: its first host, at a port made from job and step.

    >>> slurm_address({"SLURM_STEP_NODELIST": "gpu[07-09,12],login", "SLURM_JOB_ID": "1234567"})
    'gpu07:19567'
    """
    nodes, job = env.get("SLURM_STEP_NODELIST"), env.get("SLURM_JOB_ID")
    if not nodes or not job:
        return None
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        return None
    host = re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])
    step = int(env.get("SLURM_STEP_ID") or 0)  # several may run at once
    return f"{host}:{15000 + (int(job) + 7919 * step) % 10000}"


def _job_name(env: Mapping[str, str], init_method: str | None, rank: int, world_size: int) -> str:
    """A short name: the same for all ranks of a job, another one for any other job."""
    if init_method is None or init_method == "env://":
        parts = [env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")]
        ids = ["TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"]
        if _is_one_step(world_size, env) or not env.get("MASTER_PORT"):
            ids.append("SLURM_STEP_ID")
        if not env.get("PMIX_NAMESPACE", "").startswith("slurm."):  # it has the step in it
            ids.append("PMIX_NAMESPACE")
        parts += [env.get(name, "") for name in ids]
        if not any(parts):
            if mpi := mpi_rendezvous.connect(rank, world_size):
                parts.append(mpi.common_name())
            elif line := pmi.connect(env):
                parts.append(line.name)
        if not any(parts):
            raise RendezvousError(
                "the ranks have no rendezvous: set MASTER_ADDR and MASTER_PORT, or pass "
                "init_method='tcp://host:port' (any text that is the same on all ranks will do "
                "on one host)"
            )
    else:
        parts = [init_method]
    # The agents of several hosts count their restarts differently. Ranks that they start meet where
    # nothing is left of the ranks before: in a store under a fresh name, or at a new port.
    if env.get("GROUP_WORLD_SIZE", "1") == "1":
        parts.append(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    # Users of one host may give the same name. The user of a job on several hosts may have another
    # number on each, and one of them has the address to itself. Where there is a secret, it says
    # which ranks belong together.
    is_of_host = not may_span_hosts(world_size, init_method, env)
    has_secret = bool(env.get("DPCORE_SECRET") or env.get("DPCORE_SECRET_FILE"))
    if is_of_host and not has_secret and not (init_method or "").startswith("file://"):
        return f"dpcore/{os.geteuid()}/{digest}"
    return f"dpcore/{digest}"


class InstanceCounter:
    """How often the ranks of a job have met, so that it can have communicators after each other.
    Meetings that fail do not count: ranks may have tried a different number of times.

    Ranks that are threads each count for themselves. Of a rank that is a process, one thread may
    end and another one begin.
    """

    def __init__(self) -> None:
        self._of_process: dict[tuple[str, int], int] = {}
        self._of_thread = threading.local()

    @contextlib.contextmanager
    def next(self, identity: Identity, is_thread: bool = False) -> Iterator[str]:
        """The name to meet by. It counts if the block ends without an exception."""
        counts = self._of_process
        if is_thread:
            counts = self._of_thread.__dict__.setdefault("counts", {})
        who = identity.job, identity.rank
        number = counts.get(who, 0)
        yield f"{identity.job}/{number}"
        counts[who] = number + 1
