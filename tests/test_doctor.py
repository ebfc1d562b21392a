"""dpcore doctor: what it finds here is so, and what is missing comes with advice."""

import faulthandler
import json
import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dpcore
from dpcore.__main__ import main as command_line
from dpcore.tools import hosts
from dpcore.tools.diagnose import doctor, doctor_checks, doctor_gpu
from dpcore.tools.diagnose.finding import Finding
from tests.ranks import python


def test_the_whole_examination():
    command = ["-m", "dpcore", "doctor", "--json"]
    own = str(Path(sys.executable).parent)  # where an mpiexec may be
    environment = os.environ | {"PATH": os.pathsep.join([own, os.environ["PATH"]])}
    out = python.run(*command, capture_output=True, text=True, timeout=120, env=environment)
    report = json.loads(out.stdout)
    found = {finding["topic"]: finding for finding in report["findings"]}
    assert report["version"] == dpcore.__version__
    assert len(found) == len(report["findings"]) == len(doctor_checks.CHECKS) + 3
    assert report["seconds"] > 0
    assert report["budget"] == 10
    assert found["core"]["state"] == "ok"
    assert torch.__version__ in found["torch"]["text"]
    assert found["processors"]["text"].startswith(str(len(os.sched_getaffinity(0))))
    # On a busy machine the ranks may come too late: said as such, and never waited for.
    if found["self-test"]["state"] == "ok":
        assert "two ranks added 1 MB" in found["self-test"]["text"]
        assert (out.returncode, report["works"]) == (0, True)
    else:
        assert "had not finished after" in found["self-test"]["text"]
    for finding in report["findings"]:
        assert bool(finding["advice"]) == (finding["state"] != "ok"), finding


def _abort_quietly():
    faulthandler.disable()  # pytest's would print a stack into the middle of its dots
    os.abort()


SOMETHING = {"right": True, "seconds": 1e-3}


@pytest.mark.parametrize(
    ("body", "state", "text"),
    [
        (lambda rank, _: SOMETHING, "ok", "two ranks added 1 MB in mapped memory in 1.00 ms"),
        (lambda rank, _: SOMETHING | {"right": rank == 0}, "trouble", "two ranks got a wrong sum"),
        (lambda rank, _: SOMETHING | {"right": 1 // rank}, "trouble", "ZeroDivisionError"),
        (lambda rank, _: _abort_quietly(), "trouble", "the process died"),
        (lambda rank, _: time.sleep(60), "trouble", "had not finished after 1.0 s"),
    ],
    ids=["right", "wrong", "raises", "dies", "hangs"],
)
def test_what_becomes_of_the_two_ranks(body, state, text):
    test = doctor.SelfTest(body, time.monotonic() + (1.0 if "not finished" in text else 30.0))
    finding = test.finding()
    assert finding.state == state
    assert text in finding.text
    for rank in test.ranks:
        with pytest.raises(ChildProcessError):  # neither runs on nor waits to be collected
            os.waitpid(rank.process, os.WNOHANG)


@pytest.mark.parametrize(("looked", "left"), [(0.0, 9.5), (4.0, 5.5), (9.0, 2.0), (30.0, 2.0)])
def test_the_ranks_get_what_is_left_of_ten_seconds(monkeypatch, looked, left):
    """By a clock that only moves while the core is loaded. Two seconds they always get."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    granted = []

    class Ranks:
        def __init__(self, body, deadline):
            granted.append(deadline - clock.now)

        def finding(self):
            return Finding("self-test", "ok", "fine")

    def core_that_takes_long():
        clock.now += looked
        return Finding("core", "ok", "loaded")

    monkeypatch.setattr(doctor, "time", clock)
    monkeypatch.setattr(doctor, "SelfTest", Ranks)
    monkeypatch.setattr(doctor_checks, "compiled_core", core_that_takes_long)
    monkeypatch.setattr(doctor_checks, "CHECKS", ())
    monkeypatch.setattr(doctor_gpu, "driver_release", lambda: None)
    topics = [finding.topic for finding in doctor.examine(begin=1000.0)]
    assert topics == ["core", "CUDA", "self-test"]
    assert granted == [left]


def test_a_check_that_fails_is_a_finding():
    def broken_thing():
        raise ZeroDivisionError("nobody thought of this")

    finding = doctor._tried(broken_thing)
    assert finding.topic == "broken thing"
    assert "nobody thought of this" in finding.text


def test_trouble_decides_the_exit_status(monkeypatch, capsys):
    findings = [
        Finding("kernel", "ok", "new"),
        Finding("CUDA", "missing", "no driver", "only for GPUs"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda begin: findings)
    assert command_line(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "only for GPUs" in out
    assert "dpcore works here" in out
    findings.append(Finding("core", "trouble", "does not load", "build it"))
    assert command_line(["doctor"]) == 1
    assert "dpcore does not work here" in capsys.readouterr().out


def without_programs(patch):
    patch.setattr(doctor_checks, "why_not", hosts.why_not.__wrapped__)  # which remembers nothing
    patch.setattr(hosts.shutil, "which", lambda _: None)


def without_packages(patch):
    patch.setattr(doctor_checks, "version_of", lambda _: "")


def without_rights(patch):
    refused = subprocess.CompletedProcess([], 1, "", "ip: Operation not permitted")
    patch.setattr(doctor_checks, "why_not", hosts.why_not.__wrapped__)
    patch.setattr(hosts.shutil, "which", lambda name: f"/usr/bin/{name}")
    patch.setattr(hosts.subprocess, "run", lambda *_, **__: refused)


def without_network(patch):
    patch.setattr(doctor_checks.socket, "if_nameindex", lambda: [(1, "lo")])


def without_descriptors(patch):
    patch.setattr(doctor_checks.resource, "getrlimit", lambda _: (256, 4096))


def without_processors(patch):
    patch.setattr(doctor_checks.os, "sched_getaffinity", lambda _: {0})


def without_torch(patch):
    patch.setattr(doctor_checks.importlib.util, "find_spec", lambda _: None)


def without_addresses(patch):
    patch.setattr(doctor_checks.resource, "getrlimit", lambda _: (1 << 30, 1 << 30))


def without_memfd(patch):
    def forbidden(*_):
        raise PermissionError("memfd_create is not allowed")

    patch.setattr(os, "memfd_create", forbidden)


@pytest.mark.parametrize(
    ("check", "lacking", "state", "step"),
    [
        (doctor_checks.cupy, without_packages, "missing", "pip install cupy-cuda13x"),
        (doctor_checks.drawing, without_packages, "missing", "pip install matplotlib"),
        (doctor_checks.namespaces, without_programs, "missing", "apt-get install iproute2"),
        (doctor_checks.namespaces, without_rights, "missing", "sudo"),
        (doctor_checks.interfaces, without_network, "missing", "ip addr"),
        (doctor_checks.descriptors, without_descriptors, "missing", "ulimit -n 4096"),
        (doctor_checks.processors, without_processors, "missing", "docker run --cpus 2"),
        (doctor_checks.memory, without_addresses, "missing", "ulimit -v unlimited"),
        (doctor_checks.kernel, without_memfd, "trouble", "docker run --security-opt"),
        (doctor_checks.torch_build, without_torch, "trouble", "pip install torch"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_is_missing_comes_with_a_command(monkeypatch, check, lacking, state, step):
    lacking(monkeypatch)
    finding = check()
    assert finding.state == state
    assert step in finding.advice


def test_interfaces_have_their_addresses():
    finding = doctor_checks.interfaces()
    names = [name for _, name in socket.if_nameindex()]
    assert all(name in finding.text for name in names)
    if "lo" in names:
        assert "lo 127.0.0.1" in finding.text


@pytest.mark.parametrize("limit", ["50000 100000", "max 100000"])
def test_limits_of_containers_are_told(monkeypatch, limit):
    monkeypatch.setattr(doctor_checks, "_cgroup", lambda name: limit if name == "cpu.max" else "")
    monkeypatch.setattr(doctor_checks.os, "sched_getaffinity", lambda _: {0, 1, 2})
    finding = doctor_checks.processors()
    assert ("0.5 by the limit" in finding.text) == limit.startswith("50000")
    assert finding.state == ("missing" if limit.startswith("50000") else "ok")


IPV6 = """\
fe8000000000000000fc00fffe000001 04 40 20 80     eth0
fd000000000000000000000000000002 04 40 00 82     eth0
00000000000000000000000000000001 01 80 10 80       lo
"""


@pytest.mark.parametrize(
    ("addresses", "state"),
    [(IPV6, "ok"), (IPV6.partition("\n")[0], "missing"), ("", "missing")],
    ids=["global", "of-the-link", "none"],
)
def test_a_host_with_only_ipv6_can_be_reached(monkeypatch, tmp_path, addresses, state):
    (tmp_path / "if_inet6").write_text(addresses)
    monkeypatch.setattr(doctor_checks, "_IPV6_ADDRESSES", tmp_path / "if_inet6")
    monkeypatch.setattr(doctor_checks.socket, "if_nameindex", lambda: [(1, "lo"), (4, "eth0")])
    monkeypatch.setattr(doctor_checks, "_address_of", lambda name: "")
    finding = doctor_checks.interfaces()
    assert finding.state == state
    assert ("eth0 fd00::2" in finding.text) == (state == "ok")


@pytest.mark.parametrize(
    ("chosen", "state"), [("cubic", "ok"), ("bbr", "missing"), (None, "ok")], ids=str
)
def test_a_congestion_control_that_pauses_is_pointed_out(monkeypatch, tmp_path, chosen, state):
    setting = tmp_path / "tcp_congestion_control"
    if chosen:
        setting.write_text(f"{chosen}\n")
    monkeypatch.setattr(doctor_checks, "_CONGESTION", setting)
    finding = doctor_checks.tcp()
    assert (finding.state, (chosen or "does not tell") in finding.text) == (state, True)
    assert ("sysctl" in finding.advice) == (state == "missing")


def test_the_self_test_needs_no_port_whatever_launcher_is_around(monkeypatch):
    seen, alone = [], partial(dpcore.init, rank=0, world_size=1)

    def init(**options):
        seen.append(options)
        return alone()

    monkeypatch.setattr("dpcore.comm.launch.session.init", init)
    monkeypatch.setattr(doctor, "_ELEMENTS", 1000)
    before = dict(os.environ)
    assert not doctor.add_two_numbers(0, 5.0)["right"]  # it is alone
    assert seen[0]["transport"] == "shm" and str(os.getppid()) in seen[0]["init_method"]
    assert os.environ == before
