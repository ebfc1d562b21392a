"""Ranks of one host that meet over TCP: a process of another user is refused by both sides, unless
both know the job's secret."""

import os
import sys
import warnings

import cloudpickle
import pytest

from dpcore import _C
from dpcore.comm.launch import rendezvous
from dpcore.comm.launch.identity import Identity

from .test_network_start import meet, rendezvous_url
from .tries import three_tries

cloudpickle.register_pickle_by_value(sys.modules[__name__])

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user, too")


def become_nobody(url):
    os.setuid(NOBODY)


def pretend_to_be_root(url):
    """The job's name holds the user's number, as a text that any process can send."""
    become_nobody(url)
    os.geteuid = lambda: 0


@as_root
@pytest.mark.parametrize(("stranger", "host"), [(0, "127.0.0.1"), (1, "127.0.0.1"), (1, "::1")])
@three_tries
def test_another_user_is_refused_by_both_sides(stranger, host):
    users = [0, 0]
    users[stranger] = NOBODY
    listens, comes = meet(
        [(0, 2, 0), (1, 2, 0)], rendezvous_url(host),
        before={stranger: pretend_to_be_root}, timeout=3.0,
    )  # fmt: skip
    assert "missing: 1; refused: what says to be rank 1 " in listens[0]
    assert f"belongs to user {users[1]}, and rank 0 to user {users[0]}; " in listens[0]
    if "refused by rank 0" not in comes[0]:  # whichever finds it first
        assert f"what listens as rank 0 at {'[::1]' if ':' in host else host}:" in comes[0]
        assert f"belongs to user {users[0]}, and rank 1 to user {users[1]}; " in comes[0]
    assert "set DPCORE_SECRET (or DPCORE_SECRET_FILE) to the same on all ranks" in comes[0]


@as_root
def test_the_secret_decides_where_there_is_one():
    secrets = {r: {"DPCORE_SECRET": "right"} for r in range(2)}
    results = meet(
        [(0, 2, 0), (1, 2, 0)], rendezvous_url(),
        before={1: become_nobody}, timeout=10, environment=secrets,
    )  # fmt: skip
    assert [result[0] for result in results] == ["met"] * 2


def options():
    return rendezvous.tcp_options(Identity(0, 2, "job"), "job", rendezvous_url(), 1.0, {})


def test_where_the_kernel_does_not_tell_users_the_host_is_trusted_with_a_warning(monkeypatch):
    monkeypatch.setattr(rendezvous, "_warned", False)
    monkeypatch.setattr(_C, "knows_users_at", lambda address: False)
    with (
        pytest.warns(RuntimeWarning, match="without a secret: everybody on this host is trusted"),
        options(),
    ):
        pass


def test_where_the_kernel_tells_users_nothing_is_warned_of(monkeypatch):
    monkeypatch.setattr(rendezvous, "_warned", False)
    assert _C.knows_users_at("127.0.0.1:1") and _C.knows_users_at("[::1]:1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with options():
            pass
