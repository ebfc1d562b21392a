"""docs/running.md: each command is run as it stands there, where its launcher is installed."""

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.ranks import python, slurm
from tests.ranks.mpi import MPICH, MPIRUN

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = re.split(r"^## ", (ROOT / "docs" / "running.md").read_text(), flags=re.MULTILINE)[1:]
BLOCKS = [
    (section.splitlines()[0], block)
    for section in SECTIONS
    for block in re.findall(r"^```bash\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
]
CASES = [(title, block, "openmpi" if title == "mpiexec" else "") for title, block in BLOCKS]
CASES += [(title, block, "mpich") for title, block in BLOCKS if title == "mpiexec"]
LINE = re.compile(r"steps (\d+) to 60 on (\d) ranks, (\w+): loss [\d.]+, parameters (\w{12})")


def run(block, folder, launcher, **variables):
    """In a folder that has the examples, with forked ranks. Root, and more ranks than cores, need
    Open MPI's leave."""
    (folder / "examples").symlink_to(ROOT / "examples")
    without = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in without}
    path = [str(python.folder()), str(Path(sys.executable).parent), environment["PATH"]]
    if launcher == "mpich":
        path.insert(1, str(MPICH / "bin"))  # its environment has a Python without torch
        environment["MPI4PY_LIBMPI"] = str(MPICH / "lib" / "libmpi.so.12")
    environment |= {
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": str(ROOT),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        **variables,
    }
    return subprocess.run(
        ["bash", "-ec", block], cwd=folder, env=environment,
        capture_output=True, text=True, timeout=150,
    )  # fmt: skip


def why_not(title, launcher):
    """Why a command can't be run here, or nothing."""
    if title == "Slurm" and not has_cluster():
        return slurm.why_not()
    if title == "Ray Train":
        if find_spec("ray") is None:
            return "needs Ray: pip install '.[ray]' in the clone"
        return "" if os.environ.get("DPCORE_TEST_FULL") else "takes long: DPCORE_TEST_FULL=1"
    if title == "mpiexec" and launcher == "mpich":
        return "" if (MPICH / ".stamp").exists() else "type: make .venv-mpich/.stamp"
    if title == "mpiexec" and not MPIRUN.exists():
        return "Open MPI is not installed beside this Python"
    return ""


@cache
def has_cluster():
    """Whether srun leads to a cluster that is there already."""
    command = ["srun", "--immediate=5", "-n", "1", "true"]
    there = shutil.which("srun") is not None
    return there and subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


_digests = {}  # by the number of ranks: of all launchers


@pytest.mark.parametrize(
    ("title", "block", "launcher"),
    CASES,
    ids=[f"{title}-{launcher}-{number}" for number, (title, _, launcher) in enumerate(CASES)],
)
def test_a_command_trains_the_same_model(tmp_path, title, block, launcher):
    if reason := why_not(title, launcher):
        pytest.skip(reason)
    if title == "Slurm" and not has_cluster():
        with slurm.cluster(tmp_path / "slurm") as variables:
            outcome = run(block, tmp_path, launcher, **variables)
    else:
        outcome = run(block, tmp_path, launcher)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    (found,) = set(LINE.findall(outcome.stdout))  # Ray may repeat what a worker prints
    first, ranks, backend, digest = found
    assert first == ("21" if "--fail-at" in block else "1")
    assert ranks == ("1" if title == "One process" else "2")
    assert backend == ("mpi" if "--backend mpi" in block else "native")
    assert _digests.setdefault(ranks, digest) == digest


@pytest.mark.parametrize("name", ["trainjob", "jobset"])
def test_pods_start_the_example_with_the_jobs_secret(name):
    """The schemas of Kubernetes' resources are not here; what has to fit together is."""
    yaml = pytest.importorskip("yaml")
    text = (ROOT / "examples" / "kubernetes" / f"{name}.yaml").read_text()
    manifest = yaml.safe_load(text)

    def values(key, inside=manifest):
        children = inside.values() if isinstance(inside, dict) else inside
        found = [inside[key]] if isinstance(inside, dict) and key in inside else []
        deeper = [child for child in children if isinstance(child, dict | list)]
        return found + [value for child in deeper for value in values(key, child)]

    (command,) = values("command")
    assert command[0] == "torchrun" and command[-1] == "/scripts/train.py"
    assert "create configmap train --from-file=examples/train.py" in text
    assert values("configMap") == [{"name": "train"}]
    (secret,) = values("secretKeyRef")
    assert f"create secret generic {secret['name']} --from-literal={secret['key']}=" in text
    assert "DPCORE_SECRET" in values("name") and manifest["metadata"]["name"] == "train"
    (mounts,), (volumes,) = values("volumeMounts"), values("volumes")
    assert [mount["name"] for mount in mounts] == [volume["name"] for volume in volumes]
    if name == "jobset":
        (pods,) = values("parallelism")
        assert values("completions") == [pods] and f"--nnodes={pods}" in command
        assert "--master-addr=train-node-0-0.train" in command  # job, pod and service of rank 0


def test_every_launcher_has_a_section():
    titles = [title for title, _ in BLOCKS]
    launchers = {"One process", "torchrun", "mpiexec", "Slurm", "Ray Train", "By hand"}
    assert launchers == set(titles)
    assert titles.count("torchrun") == titles.count("mpiexec") == 2
