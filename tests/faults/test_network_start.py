"""Ranks that meet over TCP: who is let in, who is told what, and what strangers can do.

Items 18-24 of the catalogue: missing and duplicate ranks, other worlds, jobs, versions and
secrets, a port that is taken, and programs that are not ranks at all.
"""

import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
import time
import uuid
import warnings
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import pytest
import torch

import dpcore as dp
from dpcore import _C
from dpcore.comm.launch import session
from dpcore.comm.launch.spawn import run_processes
from tests.ranks import python

from .tries import in_time, three_tries

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TIMEOUT = 1.0


def free_port(host="127.0.0.1"):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def rendezvous_url(host="127.0.0.1"):
    return f"tcp://[{host}]:{free_port(host)}" if ":" in host else f"tcp://{host}:{free_port()}"


def meet(claims, url, before=None, timeout=TIMEOUT, environment=None, refused=None):
    """Each rank closes the communicator it was given and claims ``claims[r]``: (rank, world,
    seconds to wait before); ``before[r]()`` runs in between, and ``environment[r]`` is set.
    A file ``refused`` is there as soon as somebody was."""

    def body(comm):
        me = comm.rank
        dp.finalize()
        os.environ.update((environment or {}).get(me, {}))
        rank, world, patience = claims[me]
        time.sleep(patience)
        if before and me in before:
            before[me](url)
        begin = time.monotonic()
        try:
            again = dp.init(
                rank=rank, world_size=world, init_method=url, timeout=timeout, transport="tcp"
            )
            tensor = torch.ones(100_000)
            again.all_reduce(tensor)
            assert tensor.unique().tolist() == [float(world)]
        except dp.RendezvousError as error:
            if refused:
                refused.touch()
            return str(error), time.monotonic() - begin, begin
        return "met", time.monotonic() - begin, begin

    outcomes = run_processes(body, len(claims))
    assert [outcome.error for outcome in outcomes] == [None] * len(claims), outcomes
    begins = [outcome.result[2] for outcome in outcomes]
    # Whoever comes when the others have given up hears something else.
    in_time(max(begins) - min(begins) < timeout / 2, "they did not come together")
    return [outcome.result[:2] for outcome in outcomes]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_ranks_meet_at_an_address(host):
    results = meet([(0, 3, 0.1), (1, 3, 0), (2, 3, 0)], rendezvous_url(host), timeout=10)
    assert [result[0] for result in results] == ["met"] * 3


@three_tries
def test_another_number_of_connections_is_refused():
    more = {1: {"DPCORE_TCP_SOCKETS": "2"}}
    results = meet([(0, 2, 0), (1, 2, 0)], rendezvous_url(), environment=more)
    for message, _ in results:
        assert "3 connections per peer on rank 1, 2 on rank 0; DPCORE_TCP_SOCKETS must" in message


@three_tries
def test_everybody_who_came_hears_which_ranks_are_missing():
    results = meet([(0, 4, 0), (2, 4, 0)], rendezvous_url())
    for message, seconds in results:
        assert "2 of 4 ranks came to 127.0.0.1:" in message and "missing: 1, 3" in message
        in_time(seconds < TIMEOUT + 2)
    # Rank 0's patience counts; who starts after it waits for less.
    assert results[0][1] > 0.9 * TIMEOUT


@three_tries
def test_rank_0_is_missing():
    results = meet([(1, 3, 0), (2, 3, 0)], rendezvous_url())
    for message, seconds in results:
        assert "cannot reach rank 0 at 127.0.0.1:" in message
        assert "is it running, with the same MASTER_ADDR and MASTER_PORT" in message
        assert seconds > 0.9 * TIMEOUT
        in_time(seconds < TIMEOUT + 2)


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        ((1, 3, 0), "rank 1 is there already (process "),
        ((0, 3, 0), "cannot listen at 127.0.0.1:"),
        ((2, 4, 0), "world size 4 on rank 2, 3 on rank 0"),
    ],
    ids=["the same rank", "rank 0 twice", "another world"],
)
@three_tries
def test_a_rank_that_does_not_belong_is_refused_and_the_job_goes_on(odd, says, tmp_path):
    """Rank 2 completes the job once somebody was refused: of two that claim the same, one is."""
    refused = tmp_path / f"{time.monotonic_ns()}"

    def wait_for_the_refusal(url):
        deadline = time.monotonic() + 10
        while not refused.exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    results = meet(
        [(0, 3, 0), (1, 3, 0), (2, 3, 0), odd], rendezvous_url(),
        before={2: wait_for_the_refusal}, timeout=20, refused=refused,
    )  # fmt: skip
    outside = [3, *(r for r in range(3) if odd[:2] == (r, 3))]  # any of these
    assert sum(results[r][0] != "met" for r in outside) == 1
    assert sum(result[0] == "met" for result in results) == 3
    message, seconds = next(result for result in results if result[0] != "met")
    assert says in message
    in_time(seconds < 0.5, "not refused at once")


@three_tries
def test_another_secret_is_refused_by_both_sides():
    secrets = {r: {"DPCORE_SECRET": "right" if r < 2 else "wrong"} for r in range(3)}
    results = meet([(0, 3, 0), (1, 3, 0), (2, 3, 0)], rendezvous_url(), environment=secrets)
    assert "rank 2: rank 0 does not know the secret of this job" in results[2][0]
    for message, _ in results[:2]:
        assert (
            "missing: 2; refused: the process that says to be rank 2 does not know the secret"
            in message
        )


def test_the_same_secret_lets_everybody_in():
    secrets = {r: {"DPCORE_SECRET": "right"} for r in range(2)}
    results = meet([(0, 2, 0), (1, 2, 0)], rendezvous_url(), timeout=10, environment=secrets)
    assert [result[0] for result in results] == ["met"] * 2


@three_tries
def test_another_restart_of_the_job_is_refused():
    restarts = {r: {"TORCHELASTIC_RESTART_COUNT": str(r)} for r in range(2)}
    results = meet([(0, 2, 0), (1, 2, 0)], rendezvous_url(), environment=restarts)
    assert "another job, or another restart of this one, meets here" in results[1][0]


# ---- strangers on the port of rank 0 ----------------------------------------------------------


def connected(url):
    host, port = url.removeprefix("tcp://").split(":")
    deadline = time.monotonic() + 5
    while True:
        try:
            return socket.create_connection((host, int(port)), timeout=5)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def http(url):
    with connected(url) as line:
        line.sendall(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n" + b"x" * 1000)
        with contextlib.suppress(ConnectionResetError):
            assert line.recv(100) == b""  # hung up, without an answer


def noise(url):
    dice = random.Random(1)
    for size in (0, 1, 7, 8, 9, 100, 183, 184, 185, 4096, 100_000):
        # Refused before all was said, perhaps.
        with connected(url) as line, contextlib.suppress(OSError):
            line.sendall(dice.randbytes(size))


def greeting_with_noise(url):
    """The right first word, and then nonsense."""
    dice = random.Random(2)
    for _ in range(20):
        with connected(url) as line, contextlib.suppress(ConnectionResetError):
            line.sendall(bytes.fromhex("0a0d647074637031") + dice.randbytes(400))
            line.recv(1000)


def silent(url):
    kept_open.extend(connected(url) for _ in range(50))


kept_open = []  # until the process ends


def scan(url):
    for _ in range(50):
        connected(url).close()


@pytest.mark.parametrize("stranger", [http, noise, greeting_with_noise, silent, scan])
@three_tries
def test_strangers_do_not_disturb(stranger):
    results = meet([(0, 2, 0), (1, 2, 0)], rendezvous_url(), before={1: stranger}, timeout=10)
    assert [result[0] for result in results] == ["met"] * 2
    in_time(results[0][1] < 5)


@three_tries
def test_the_port_is_taken():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        url = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        results = meet([(0, 2, 0), (1, 2, 0)], url)
    assert "cannot listen at 127.0.0.1:" in results[0][0] and "choose another" in results[0][0]
    in_time(results[0][1] < 0.5)
    assert "rank 1: a process listens as rank 0 at 127.0.0.1:" in results[1][0]
    assert "is it stopped, or is the port taken by another program?" in results[1][0]


@three_tries
def test_what_listens_hangs_up():
    """A proxy, or a tunnel, whose other end is not there: it is asked until the deadline."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:

        def hang_up():
            with contextlib.suppress(OSError):
                while True:
                    proxy.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        results = meet([(1, 2, 0)], f"tcp://127.0.0.1:{proxy.getsockname()[1]}")
        proxy.shutdown(socket.SHUT_RDWR)
    assert "rank 1: what listens as rank 0 at 127.0.0.1:" in results[0][0]
    assert "hangs up; is rank 0 running, or is the port another program's?" in results[0][0]
    in_time(results[0][1] < TIMEOUT + 2)


def test_who_cannot_connect_is_heard_at_once():
    """Rank 1 finds that somebody has the name at which ranks of its host meet. Rank 2 waits for it
    there, and rank 0 for the connections of both."""
    job = f"connect-{uuid.uuid4().hex}"
    listener = _C.TcpListener.at("127.0.0.1:0")
    address = listener.address

    def join(rank):
        host = "a" if rank == 0 else "b"
        mine = listener if rank == 0 else None
        tcp = _C.TcpOptions(address, mine, "", "", 1, shares_memory=True, host_label=host)
        begin = time.monotonic()
        with pytest.raises(dp.RendezvousError) as caught:
            session.connect(job, rank, 3, timeout=30, transport="shm+tcp", tcp=tcp)
        return str(caught.value), time.monotonic() - begin

    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(f"\0{job}/local/1")
        stranger.listen()
        with ThreadPoolExecutor(3) as ranks:
            results = list(ranks.map(join, range(3)))
    problem = "rank 1: another process is already rank 0 of"
    assert results[0][0].startswith(problem)
    assert results[1][0].startswith(problem)
    assert results[2][0].startswith(f"rank 2: told by rank 0: {problem}")
    assert max(seconds for _, seconds in results) < 10


# ---- where the address comes from -------------------------------------------------------------


def run_ranks(script, environments):
    ranks = [
        python.start(
            "-c", script, env={**os.environ, **environment},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for environment in environments
    ]  # fmt: skip
    said = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), said
    return [out.strip() for out, _ in said]


SUM = """
import torch, dpcore as dp
comm = dp.init(transport="tcp", timeout=20{more})
t = torch.full((5,), comm.rank + 1.0)
comm.all_reduce(t)
print(f"{{comm.transport}} {{t[0].item()}}\\n", end="", flush=True)  # in one piece
dp.finalize()
"""


def plain(world, port):
    return [
        {"RANK": str(r), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
         "MASTER_PORT": str(port)}
        for r in range(world)
    ]  # fmt: skip


@pytest.mark.patient
def test_plain_variables():
    assert run_ranks(SUM.format(more=""), plain(2, free_port())) == ["tcp 3.0"] * 2


@pytest.mark.patient
def test_a_file_which_is_gone_afterwards(tmp_path):
    path = tmp_path / "rendezvous"
    path.write_text("left behind by an earlier job\n")
    script = SUM.format(more=f", init_method='file://{path}'")
    assert run_ranks(script, plain(2, 1)) == ["tcp 3.0"] * 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.patient
def test_the_store_of_torch_distributed():
    script = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
    script += SUM.format(more="") * 2 + "dist.destroy_process_group()"
    assert run_ranks(script, plain(2, free_port())) == ["tcp 3.0\ntcp 3.0"] * 2


@pytest.mark.patient
def test_torchrun_whose_agent_has_the_port(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(SUM.format(more="") * 2)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = python.run(*command, script, capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n")[:-1] == ["tcp 3.0"] * 4, done.stderr


# ---- secrets ----------------------------------------------------------------------------------


def test_a_secret_file_must_be_private(tmp_path):
    from dpcore.comm.launch.rendezvous import read_secret

    path = tmp_path / "secret"
    path.write_text("right\n")
    path.chmod(0o644)
    with pytest.raises(dp.RendezvousError, match="chmod 600"):
        read_secret({"DPCORE_SECRET_FILE": str(path)})
    path.chmod(0o600)
    assert read_secret({"DPCORE_SECRET_FILE": str(path)}) == "right"
    path.write_text("")
    with pytest.raises(dp.RendezvousError, match="is empty"):
        read_secret({"DPCORE_SECRET_FILE": str(path)})
    assert read_secret({}) == ""


def test_a_network_without_a_secret_is_worth_one_warning(monkeypatch):
    from dpcore.comm.launch import rendezvous

    monkeypatch.setattr(rendezvous, "_warned", False)
    with pytest.warns(RuntimeWarning, match=r"10\.1\.2\.3:5 without a secret"):
        rendezvous._warn_once("10.1.2.3:5", "on that network")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rendezvous._warn_once("10.1.2.3:5", "on that network")
