"""Which algorithm "auto" is: the cost model, the constants it uses, and that all ranks agree."""

import json
import os
import sys
from dataclasses import astuple

import cloudpickle
import pytest
import torch

import dpcore as dp
from dpcore import _C
from dpcore.comm.communicators import costs
from dpcore.comm.launch.spawn import run_processes
from dpcore.tools.simulate.processors import calibrated
from tests.faults.test_network_start import rendezvous_url
from tests.ranks import python

cloudpickle.register_pickle_by_value(sys.modules[__name__])

MEMORY = [1e-6, 1e-6, 0.25e-9]


def written(folder, network, memory=MEMORY, added=0.1e-9, way="loopback"):
    """A cache with these constants; what XDG_CACHE_HOME is to be."""
    path = costs.cache_file({"XDG_CACHE_HOME": str(folder)})
    costs.save({"memory": memory, way: network, "added_byte": added}, path)
    return str(folder)


def explained(tmp_path, layout, network, nbytes, **options):
    """``comm.explain(nbytes)`` of every rank, on hosts that are pretended."""

    def body(comm):
        why = comm.explain(nbytes)
        tensor = torch.ones(nbytes // 4)
        comm.all_reduce(tensor)
        assert tensor.unique().tolist() == [comm.world_size]
        return why

    outcomes = run_processes(
        body, len(layout.split(",")),
        environment={
            "DPCORE_PRETEND_HOSTS": layout,
            "XDG_CACHE_HOME": written(tmp_path, network),
        },
        options={"transport": "shm+tcp", **options},
    )  # fmt: skip
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes), outcomes
    return [outcome.result for outcome in outcomes]


def test_what_the_model_expects_of_an_all_reduce(tmp_path):
    """Against the formulas, for ranks that are alone on their hosts."""
    n, size = 3, 300_000
    step, message, byte = network = [50e-6, 5e-6, 1e-9]
    why = explained(tmp_path, "0,1,2", network, size)[0]["all_reduce"]
    expected = {one.algorithm: one.seconds for one in why.candidates}
    share = (n - 1) / n * size
    two_shot = 2 * (step + 2 * (n - 1) * message) + 2 * share * byte + share * 0.1e-9
    one_shot = step + 2 * (n - 1) * message + (n - 1) * size * (byte + 0.1e-9)
    ring = 2 * (n - 1) * (step + 2 * message) + 2 * share * byte + share * 0.1e-9
    assert expected["two_shot"] == pytest.approx(two_shot)
    assert expected["hierarchical"] == pytest.approx(two_shot)  # nobody has a local peer
    assert expected["one_shot"] == pytest.approx(one_shot)
    assert expected["ring"] == pytest.approx(ring)
    assert [one.seconds for one in why.candidates] == sorted(expected.values())
    carried = {one.algorithm: one.network_bytes for one in why.candidates}
    assert carried["two_shot"] == pytest.approx(2 * share)
    assert carried["one_shot"] == pytest.approx((n - 1) * size)


@pytest.mark.parametrize(
    ("layout", "network", "chosen", "why"),
    [
        ("0,1,2", [0.9e-3, 1e-6, 0.1e-9], "one_shot", "expected to be the fastest"),
        ("0,1,2", [10e-6, 1e-6, 10e-9], "two_shot", "expected to be the fastest"),
        ("0,0,1,1", [10e-6, 1e-6, 10e-9], "hierarchical", "expected to be the fastest"),
        ("0,0,1,1", [0.9e-3, 1e-6, 0.01e-9], "one_shot", "recursive_doubling is not enough faster"),
    ],
)
def test_the_choice_follows_the_constants_and_is_the_same_on_all_ranks(
    tmp_path, layout, network, chosen, why
):
    results = explained(tmp_path, layout, network, 200_000)
    assert {result["all_reduce"].algorithm for result in results} == {chosen}
    assert why in results[0]["all_reduce"].why
    assert results[0].costs.source.startswith("measured, ")
    assert results[1].costs.source == "those of rank 0"


def test_deterministic_means_ordered_ones_only(tmp_path):
    why = explained(tmp_path, "0,0,1,1", [10e-6, 1e-6, 10e-9], 200_000, deterministic=True)[0]
    choice = why["all_reduce"]
    assert choice.algorithm == "two_shot"
    assert "deterministic=True allows (hierarchical is not)" in choice.why
    assert "refused by deterministic=True" in str(choice)
    assert all(one.allowed for one in why["broadcast"].candidates)  # nothing is added


def test_small_ones_go_with_the_entry_and_memory_needs_no_messages(tmp_path):
    why = explained(tmp_path, "0,0,1,1", [10e-6, 1e-6, 10e-9], 4096)[0]
    assert why["all_reduce"].algorithm == "entry"
    [near] = {dp.spawn(lambda comm: comm.explain(1 << 20)["all_reduce"].algorithm, 2)[0]}
    assert near == "memory"
    alone = dp.spawn(lambda comm: str(comm.explain(100)), 1)[0]
    assert "all_reduce: none, there is no other rank" in alone


def test_constants_of_rank_0_count_where_ranks_differ(tmp_path):
    caches = [
        written(tmp_path / "a", [0.9e-3, 1e-6, 0.1e-9]),
        written(tmp_path / "b", [10e-6, 1e-6, 10e-9]),
    ]
    place = rendezvous_url()

    def body(comm):
        me = comm.rank
        dp.finalize()
        os.environ["XDG_CACHE_HOME"] = caches[me % 2]
        again = dp.init(rank=me, world_size=3, init_method=place, transport="tcp", timeout=20)
        return again.explain(200_000)

    results = dp.spawn(body, 3)
    assert {why["all_reduce"].algorithm for why in results} == {"one_shot"}
    assert {tuple(why.costs.as_list()) for why in results} == {
        (*MEMORY, 0.9e-3, 1e-6, 0.1e-9, 0.1e-9)
    }


def test_what_was_measured_counts_for_ranks_that_share_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", written(tmp_path, [1e-5] * 3))
    why = dp.spawn(lambda comm: comm.explain(1 << 20), 2)[0]
    assert why.costs.source.startswith("measured, ")
    assert why.costs.memory.step == MEMORY[0]


def test_a_link_is_what_algorithms_are_chosen_by():
    def body(comm):
        return comm.explain(1 << 20)

    for link, chosen in {"1gbit,1us": "two_shot", "100gbit,50ms": "one_shot"}.items():
        results = dp.spawn(body, 3, mode="threads", link=link)
        assert {why["all_reduce"].algorithm for why in results} == {chosen}
        assert results[0].costs.source.endswith("the network is the emulated link")


def test_who_knows_better_says_so():
    def body(comm):
        why = comm.explain(1 << 20)
        tensor = torch.ones(1 << 18)
        comm.all_reduce(tensor)
        return why["all_reduce"].algorithm, why["all_reduce"].why, list(comm.stats()["all_reduce"])

    for settings in ({"environment": {"DPCORE_ALGORITHM": "ring"}}, {"options": {}}):
        if "options" in settings:
            settings["options"] = {"algorithm": "ring"}
        outcomes = run_processes(body, 2, **settings)
        for outcome in outcomes:
            assert outcome.error is None, outcome.traceback
            assert outcome.result == (
                "ring", "asked for by algorithm= or DPCORE_ALGORITHM", ["moves"]
            )  # fmt: skip


# ---- the file ---------------------------------------------------------------------------------


def test_without_a_file_there_are_defaults_and_a_reason(tmp_path):
    found = costs.load(path=tmp_path / "none.json")
    assert found.as_list() == _C.default_costs()
    assert found.source == ("defaults (this machine is not calibrated; type: dpcore calibrate)")


def test_what_was_saved_is_read_and_kept(tmp_path):
    path = tmp_path / "dpcore" / "costs.json"
    assert costs.save({"memory": MEMORY, "loopback": [1e-5] * 3, "added_byte": 1e-10}, path) == path
    assert path.stat().st_mode & 0o777 == 0o444
    assert costs.load("loopback", path).network == costs.Way(1e-5, 1e-5, 1e-5)
    costs.save({"network": [2e-5] * 3}, path)  # all that ranks on several hosts measure
    assert costs.load("loopback", path).network.step == 1e-5
    assert costs.load("network", path).network.step == 2e-5


def spoiled(content, **changes):
    return json.dumps({**content, **changes})


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda c: json.dumps(c)[:-9], "it is damaged ("),
        (lambda c: "", "it is damaged ("),
        (lambda c: "[1, 2]", "it has another format"),
        (lambda c: spoiled(c, format=99), "it has another format"),
        (
            lambda c: spoiled(c, machine={"processor": "abacus"}),
            "measured on another machine: {",
        ),
        (lambda c: spoiled(c, memory=[1e-6, 1e-6]), "it is damaged ('memory' is [1e-06, 1e-06])"),
        (lambda c: spoiled(c, memory=[1e-6, -1e-6, 1e-9]), "it is damaged ('memory' is"),
        (lambda c: spoiled(c, memory=[1e-6, 1e-6, float("nan")]), "it is damaged ('memory' is"),
        (lambda c: spoiled(c, added_byte="a lot"), "it is damaged ('added_byte' is 'a lot')"),
        (lambda c: json.dumps({k: c[k] for k in c if k != "network"}), "it has no 'network'"),
    ],
)
def test_a_file_that_is_no_good_is_not_used_with_a_reason(tmp_path, spoil, reason):
    path = tmp_path / "costs.json"
    costs.save({"memory": MEMORY, "network": [1e-5] * 3, "added_byte": 1e-10}, path)
    content = json.loads(path.read_text())
    path.unlink()
    path.write_text(spoil(content))
    found = costs.load("network", path)
    assert found.as_list() == _C.default_costs()
    assert reason in found.source and str(path) in found.source


def test_calibrating(tmp_path):
    command = ["-m", "dpcore", "calibrate", "--seconds", "0.02"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = python.run(*command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    path = costs.cache_file({"XDG_CACHE_HOME": str(tmp_path)})
    assert f"written to {path}" in done.stdout
    found = costs.load("loopback", path)
    assert found.source == f"measured, {path}"
    assert all(0 <= value < 0.1 for value in found.as_list())
    assert found.memory.step > 0 and found.network.step > 0 and found.added_byte > 0
    assert costs.load("network", path).source.endswith(
        "it has no 'network'; type: dpcore calibrate)"
    )
    processors = calibrated(path).processors
    assert processors.costs.memory == found.memory
    assert all(0 <= value < 1e-2 for value in astuple(processors)[2:-1])
    assert processors.operation > 0 and 0 < processors.copied_byte < 1e-6
