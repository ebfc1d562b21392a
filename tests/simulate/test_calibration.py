"""What ``dpcore calibrate`` writes, as the simulator's processors and links."""

import json
import time
from itertools import count
from types import SimpleNamespace

import pytest

from dpcore.base.link import Speed
from dpcore.comm.communicators import costs
from dpcore.errors import Unsupported
from dpcore.tools.simulate import Network, NetworkOperation
from dpcore.tools.simulate.choice import DEFAULT_COSTS
from dpcore.tools.simulate.links import FIRST_WINDOW
from dpcore.tools.simulate.processors import Processors, calibrated

MEASURED = {
    "memory": [2e-6, 1e-6, 2e-10],
    "loopback": [8e-6, 5e-6, 4e-10],
    "added_byte": 5e-11,
    "operation": 20e-6,
    "memory_operation": 1e-6,
    "message": 2e-6,
    "tcp_message": 5e-6,
    "wake": 30e-6,
    "busy_wake": 2e-3,
    "woken": 3e-5,
    "copied_byte": 1e-10,
    "reduced_byte": 1.5e-10,
    "fused_byte": 1.2e-10,
    "tcp_byte": 2.5e-10,
    "update_call": 4e-4,
}
NETWORK = {"network": [60e-6, 9e-6, 8e-9], "after_pause": 2e-3}


def test_what_is_written_is_read(tmp_path):
    path = costs.save(MEASURED, tmp_path / "costs.json")
    found = calibrated(path)
    cores = costs.fingerprint()["processors"]
    assert found.processors == Processors(
        cores=cores,
        operation=20e-6,
        memory_operation=1e-6,
        message=2e-6,
        tcp_message=5e-6,
        copied_byte=1e-10,
        reduced_byte=1.5e-10,
        fused_byte=1.2e-10,
        tcp_byte=2.5e-10,
        wake=30e-6,
        busy_wake=2e-3,
        woken=3e-5,
        update_call=4e-4,
        costs=costs.Costs(costs.Way(2e-6, 1e-6, 2e-10), DEFAULT_COSTS.network, 5e-11, str(path)),
    )
    assert (found.network, found.source) == (None, str(path))


def test_the_network_between_hosts_is_added_to_the_file(tmp_path):
    """A launcher's ranks measure it later, and keep what the file had."""
    path = tmp_path / "costs.json"
    costs.save(MEASURED, path)
    costs.save(NETWORK, path)
    found = calibrated(path)
    assert found.network.inter == Speed(pytest.approx(1.25e8), 60e-6)
    assert (found.network.first_window, found.network.goodput) == (FIRST_WINDOW, 1.0)
    assert found.network.is_tcp
    assert found.processors.costs.network == costs.Way(60e-6, 9e-6, 8e-9)
    assert found.processors.operation == 20e-6
    costs.save({**NETWORK, "after_pause": 1e-6}, path)
    assert calibrated(path).network.first_window == 0


def test_a_file_of_another_machine_predicts_that_machine(tmp_path, monkeypatch):
    path = costs.save(MEASURED, tmp_path / "costs.json")
    content = json.loads(path.read_text())
    content["machine"] = {"processor": "abacus", "processors": 96}
    path.unlink()
    path.write_text(json.dumps(content))
    assert calibrated(path).processors.cores == 96
    assert costs.load("loopback", path).source.startswith("defaults")  # auto does not use it here


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda c: {**c, "wake": "soon"}, "is no file of dpcore calibrate: it is damaged .'wake'"),
        (lambda c: {**c, "format": 9}, "has another format; type: dpcore calibrate"),
        (lambda c: {**c, "machine": {}}, "is no file of dpcore calibrate: 'processors'"),
        (lambda c: {"machine": c["machine"], "format": 1, **NETWORK}, "has no memory, added_byte"),
    ],
)
def test_a_file_that_is_none_says_why(tmp_path, spoil, message):
    path = costs.save(MEASURED, tmp_path / "costs.json")
    content = spoil(json.loads(path.read_text()))
    path.unlink()
    path.write_text(json.dumps(content))
    with pytest.raises(Unsupported, match=message):
        calibrated(path)


def test_without_a_file_the_command_to_type_is_named(tmp_path):
    with pytest.raises(Unsupported, match=r"none\.json does not exist; type: dpcore calibrate"):
        calibrated(tmp_path / "none.json")


def test_the_measured_floors_are_what_the_simulator_says_of_them(tmp_path):
    """The command works out ``operation`` and ``wake`` from two floors, which come out again."""
    processors = calibrated(costs.save(MEASURED, tmp_path / "costs.json")).processors
    for latency, wakes in ((1e-6, 0), (1e-3, 2)):
        free_of = {} if wakes else {"wake": 0.0}
        given = Processors(**{**vars(processors), **free_of})
        operation = NetworkOperation(64, [0.0, 0.0], background=False)
        Network(2, Speed(0.0, latency), "one_shot", given).run([operation])
        floor = 2 * latency + 20e-6 + 2 * 2e-6 + wakes * 30e-6
        assert operation.finished == pytest.approx([floor] * 2, rel=1e-3)


def test_a_message_that_other_programs_hide_is_measured_again(capsys):
    from dpcore.tools.diagnose import calibrate

    floors = iter([5e-6, 4e-6, 5e-6, 5e-6, 4e-6, 34e-6])
    assert calibrate._floors(lambda chunks: next(floors)) == (4e-6, pytest.approx(1e-6))
    tried = []
    few, message = calibrate._floors(lambda chunks: tried.append(chunks) or 5e-6)
    assert (few, message, tried) == (5e-6, 0, [1, 16] * 4)
    calibrate._tell_of_zeros({"message": 1e-6, "tcp_message": message})
    (said,) = capsys.readouterr().err.splitlines()
    assert "too busy to measure tcp_message" in said


def test_both_ranks_measure_as_often():
    import dpcore
    from dpcore.tools.diagnose import calibrate

    def body(comm):
        floors = iter([2.0, 1.0, 1.0, 16.0] if comm.rank == 0 else [1.0, 9.0, 3.0, 3.0])
        few, message = calibrate._floors(lambda chunks: next(floors), calibrate._alike(comm))
        return few, message, len(list(floors))

    assert dpcore.spawn(body, 2) == [(1.0, 0.5, 0), (3.0, 0.5, 0)]


def test_a_rank_may_measure_the_optimizer_more_often_than_the_other():
    """Each as often as it can; they meet before and after."""
    import dpcore
    from dpcore.tools.diagnose import calibrate

    def body(comm):
        clock = SimpleNamespace(perf_counter=count().__next__, thread_time=time.thread_time)
        calibrate.time = clock
        return calibrate._update_call(comm, 9 * comm.rank)

    assert min(dpcore.spawn(body, 2)) >= 0
