"""Chakra's traces of programs: read, refused, and simulated."""

import json

import pytest

from dpcore.__main__ import main
from dpcore.base.link import Speed
from dpcore.errors import Mismatch, Unsupported
from dpcore.reference.plans import PlanError, chakra
from dpcore.reference.plans.chakra import COLLECTIVE, COMPUTE, SEND, Node
from dpcore.tools.simulate.graphs import predict_graphs, read_graphs

SECOND = Speed(1e6, 0.0)  # a second for each MB


def collective(number, after=(), nbytes=1_000_000, kind=0):
    said = {"comm_type": kind, "comm_size": nbytes}
    return Node(number, f"collective {number}", COLLECTIVE, tuple(after), said)


def compute(number, after=(), micros=1_000_000):
    return Node(number, f"layer {number}", COMPUTE, tuple(after), {}, micros)


def written(path, *nodes):
    chakra.write_nodes(nodes, path)
    return path


def test_what_is_written_is_read(tmp_path):
    nodes = [compute(0), collective(1, [0], kind=7), compute(2, [0, 1], 5)]
    assert chakra.read(written(tmp_path / "run.et", *nodes)) == nodes


def test_collectives_go_beside_computing_and_nodes_wait_for_what_they_depend_on():
    hidden = predict_graphs([[compute(0), collective(1, [0]), compute(2, [0])]], 2, SECOND)
    exposed = predict_graphs([[compute(0), collective(1, [0]), compute(2, [1])]], 2, SECOND)
    assert hidden.total_ms == pytest.approx(2000, rel=0.01)
    assert exposed.total_ms == pytest.approx(3000, rel=0.01)
    assert exposed.exposed_ms == pytest.approx(1000, rel=0.02)
    serial = predict_graphs([[compute(0), compute(1)]], 2, SECOND)
    assert serial.total_ms == pytest.approx(2000)  # a rank computes one node at a time


def test_halves_take_half_of_an_all_reduce():
    half = predict_graphs([[collective(0, kind=7)]], 2, SECOND)
    whole = predict_graphs([[collective(0)]], 2, SECOND)
    assert half.total_ms == pytest.approx(whole.total_ms / 2, rel=0.01)


def test_ranks_wait_for_the_slowest(tmp_path):
    graphs = [[compute(0, (), micros), collective(1, [0])] for micros in (1_000_000, 3_000_000)]
    assert predict_graphs(graphs, 2, SECOND).total_ms == pytest.approx(4000, rel=0.01)


def test_the_commands_take_a_trace(tmp_path, capsys):
    path = str(written(tmp_path / "run.et", compute(0), collective(1, [0])))
    asked = ["simulate", path, "--link", "8mbit,0us", "--world", "2,4", "--json"]
    assert main(asked) == 0
    lines = json.loads(capsys.readouterr().out)
    assert [line["world"] for line in lines] == [2, 4]
    assert lines[0]["total_ms"] == pytest.approx(2000, rel=0.01)
    assert main(["show", path]) == 0
    assert "1 all_reduce of 1000000 bytes together" in capsys.readouterr().out
    assert main([*asked, "--best"]) == 2
    assert "--best is for a recorded run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("nodes", "kind", "message"),
    (
        ([compute(0, [1]), compute(1, [0])], PlanError, r"circle: 0 \(layer 0\), 1 \(layer 1\)"),
        ([Node(0, "to 1", SEND)], Unsupported, r"node 0 \(to 1\) is a single send"),
        ([collective(3, kind=6)], Unsupported, r"node 3 \(collective 3\) is of kind all_to_all"),
    ),
)
def test_what_is_not_simulated_is_refused_by_file_and_node(tmp_path, nodes, kind, message):
    with pytest.raises(kind, match=r"run\.et.*" + message):
        read_graphs([written(tmp_path / "run.et", *nodes)])


def test_another_version_and_a_trace_that_was_cut_off(tmp_path):
    path = written(tmp_path / "run.et", compute(0), collective(1, [0]))
    content = path.read_bytes()
    path.write_bytes(content[:-3])
    with pytest.raises(PlanError, match=r"run\.et is no trace .* cut off, from byte \d+ on"):
        chakra.read(path)
    path.write_bytes(content.replace(b"chakra.0.0.4", b"chakra.0.9.9"))
    with pytest.raises(PlanError, match=r"first message: the schema is .*0\.9\.9, and 0\.0\.4"):
        chakra.read(path)


def test_ranks_with_other_collectives_are_told(tmp_path):
    paths = [written(tmp_path / f"run.{n}.et", collective(0, nbytes=n)) for n in (8, 16)]
    with pytest.raises(Mismatch, match=r"differ from collective 0 on"):
        read_graphs(paths)
