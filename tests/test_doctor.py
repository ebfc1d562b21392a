"""dpcore doctor: what it finds here is so, and what is missing comes with advice."""

import faulthandler
import json
import os
import socket
import subprocess
import sys
import time

import pytest
import torch

import dpcore
from dpcore import doctor, doctor_checks
from dpcore.__main__ import main as command_line


def test_the_whole_examination():
    command = [sys.executable, "-m", "dpcore", "doctor", "--json"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=120)
    report = json.loads(out.stdout)
    found = {finding["topic"]: finding for finding in report["findings"]}
    assert report["version"] == dpcore.__version__
    assert len(found) == len(report["findings"]) == len(doctor_checks.CHECKS) + 2
    assert found["core"]["state"] == "ok"
    assert torch.__version__ in found["torch"]["text"]
    assert found["processors"]["text"].startswith(str(len(os.sched_getaffinity(0))))
    # On a busy machine the ranks may come too late: said as such, and never waited for.
    if found["self-test"]["state"] == "ok":
        assert "two ranks added 1 MB" in found["self-test"]["text"]
        assert (out.returncode, report["works"]) == (0, True)
    else:
        assert "were not done after 8 s" in found["self-test"]["text"]
    for finding in report["findings"]:
        assert bool(finding["advice"]) == (finding["state"] != "ok"), finding


def _abort_quietly():
    faulthandler.disable()  # pytest's would print a stack into the middle of its dots
    os.abort()


SOMETHING = {"right": True, "seconds": 1e-3}


@pytest.mark.parametrize(
    ("body", "state", "text"),
    [
        (lambda rank: SOMETHING, "ok", "two ranks added 1 MB in mapped memory in 1.00 ms"),
        (lambda rank: SOMETHING | {"right": rank == 0}, "trouble", "two ranks got a wrong sum"),
        (lambda rank: SOMETHING | {"right": 1 // rank}, "trouble", "ZeroDivisionError"),
        (lambda rank: _abort_quietly(), "trouble", "the rank died"),
        (lambda rank: time.sleep(60), "trouble", "were not done after 1 s"),
    ],
    ids=["right", "wrong", "raises", "dies", "hangs"],
)
def test_what_becomes_of_the_two_ranks(monkeypatch, body, state, text):
    monkeypatch.setattr(doctor, "_SELF_TEST_SECONDS", 1.0 if "not done" in text else 30.0)
    test = doctor.SelfTest(body)
    finding = test.finding()
    assert finding.state == state
    assert text in finding.text
    for process, _ in test._ranks:
        with pytest.raises(ChildProcessError):  # neither runs on nor waits to be collected
            os.waitpid(process, os.WNOHANG)


def test_a_check_that_fails_is_a_finding():
    def broken_thing():
        raise ZeroDivisionError("nobody thought of this")

    finding = doctor._tried(broken_thing)
    assert finding.topic == "broken thing"
    assert "nobody thought of this" in finding.text


def test_trouble_decides_the_exit_status(monkeypatch, capsys):
    findings = [
        doctor.Finding("kernel", "ok", "new"),
        doctor.Finding("CUDA", "missing", "no driver", "only for GPUs"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    assert command_line(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "only for GPUs" in out
    assert "dpcore works here" in out
    findings.append(doctor.Finding("core", "trouble", "does not load", "build it"))
    assert command_line(["doctor"]) == 1
    assert "dpcore does not work here" in capsys.readouterr().out


def test_missing_programs_and_packages_are_named(monkeypatch):
    monkeypatch.setattr(doctor_checks.shutil, "which", lambda _: None)
    monkeypatch.setattr(doctor_checks, "_version_of", lambda _: "")
    for check, word in (
        (doctor_checks.mpi, "pip install mpi4py"),
        (doctor_checks.namespaces, "iproute2"),
        (doctor_checks.cupy, "CuPy"),
        (doctor_checks.drawing, "--png"),
    ):
        finding = check()
        assert finding.state == "missing"
        assert word in finding.advice


def test_a_sandbox_without_memfd_is_trouble(monkeypatch):
    def forbidden(*_):
        raise PermissionError("memfd_create is not allowed")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    finding = doctor_checks.kernel()
    assert finding.state == "trouble"
    assert "memfd_create is not allowed" in finding.text


def test_interfaces_have_their_addresses():
    finding = doctor_checks.interfaces()
    names = [name for _, name in socket.if_nameindex()]
    assert all(name in finding.text for name in names)
    if "lo" in names:
        assert "lo 127.0.0.1" in finding.text


@pytest.mark.parametrize("limit", ["50000 100000", "max 100000"])
def test_limits_of_containers_are_told(monkeypatch, limit):
    monkeypatch.setattr(doctor_checks, "_cgroup", lambda name: limit if name == "cpu.max" else "")
    assert ("0.5 by the limit" in doctor_checks.processors().text) == limit.startswith("50000")
