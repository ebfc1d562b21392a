"""A Slurm cluster of one node: this machine, from the packages of its distribution.

    with cluster(folder) as variables:
        subprocess.run(["srun", "-n", "2", ...], env={**os.environ, **variables})

Its daemons (munged, slurmctld, slurmd) run as this user, root, with everything that they keep in
``folder`` and ports of their own, so they meet no cluster that is there already.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

NODE = socket.gethostname()
PROGRAMS = ("srun", "sinfo", "slurmctld", "slurmd", "munged", "mungekey")
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
_CONFIGURATION = """
ClusterName=dpcore
SlurmctldHost={node}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={controller}
SlurmdPort={daemon}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
NodeName={node} NodeAddr={address} CPUs=4 State=UNKNOWN
PartitionName=all Nodes={node} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE
"""


def why_not():
    """Why there can be no such cluster here, or nothing."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    if missing:
        return f"needs {', '.join(missing)}: apt-get install slurmd slurmctld slurm-client munge"
    return "" if os.geteuid() == 0 else "needs root to start slurmd and munged"


def _free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def cluster(folder):
    """The variables by which srun finds it."""
    folder = Path(folder)
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)  # munged insists on a path that nobody else can write to
    configuration = folder / "slurm.conf"
    configuration.write_text(
        _CONFIGURATION.format(
            node=NODE, address="127.0.0.1", folder=folder,
            controller=_free_port(), daemon=_free_port(),
        )
    )  # fmt: skip
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
    environment = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(configuration)}
    key = folder / "munge.key"
    subprocess.run(["mungekey", "--create", f"--keyfile={key}"], check=True, env=environment)
    commands = [
        ["munged", "--foreground", "--force", f"--key-file={key}",
         f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid",
         f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed",
         "--num-threads=2"],
        ["slurmctld", "-D", "-c", "-i", "-f", str(configuration)],
        ["slurmd", "-D", "-c", "-f", str(configuration), "-N", NODE],
    ]  # fmt: skip
    with contextlib.ExitStack() as cleaning:
        said = cleaning.enter_context((folder / "said.log").open("wb"))
        for command in commands:
            process = subprocess.Popen(
                command, env=environment, stdout=said, stderr=said, stdin=subprocess.DEVNULL
            )
            cleaning.callback(_end, process)
            if command[0] == "munged":
                _wait_for((folder / "munge.socket").exists, folder)
        _wait_for(lambda: _is_idle(environment), folder)
        yield {"SLURM_CONF": str(configuration)}


def _is_idle(environment):
    command = ["sinfo", "--noheader", "--format=%T"]
    out = subprocess.run(command, env=environment, capture_output=True, text=True)
    return out.stdout.strip() == "idle"


def _wait_for(happened, folder, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            logs = "\n".join(path.read_text(errors="replace") for path in folder.glob("*.log"))
            raise RuntimeError(f"Slurm did not start in {seconds:g} s:\n{logs[-4000:]}")
        time.sleep(0.1)


def _end(process):
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
