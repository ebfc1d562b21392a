"""Schedules as Chakra's execution traces: what is written, and what is refused when it is read."""

import re
from dataclasses import replace

import pytest

from dpcore import reference
from dpcore.__main__ import main
from dpcore.reference.plans import PlanError, chakra
from dpcore.reference.plans.chakra import COMPUTE, RECEIVE, SEND, Node


def finish(graphs):
    """Runs all ranks as a simulator does; the steps of messages that arrived, by rank."""
    done = [set() for _ in graphs]
    sent = set()
    progress = True
    while progress:
        progress = False
        for rank, nodes in enumerate(graphs):
            for node in nodes:
                said = node.attributes
                if node.number in done[rank] or not set(node.after) <= done[rank]:
                    continue
                if node.kind == SEND:
                    sent.add((rank, said["comm_dst"], said["comm_tag"], said["comm_size"]))
                elif node.kind == RECEIVE:
                    asked = (said["comm_src"], rank, said["comm_tag"], said["comm_size"])
                    if asked not in sent:
                        continue
                    sent.remove(asked)
                done[rank].add(node.number)
                progress = True
    assert not sent and [len(nodes) for nodes in graphs] == [len(of) for of in done]


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_every_algorithm_is_a_graph_that_ends(tmp_path, collective):
    for name in reference.algorithms_of(collective):
        plan = reference.make_schedule(name, collective, 4)
        graphs = [chakra.read(path) for path in chakra.write(plan, 1000, tmp_path)]
        assert graphs == [chakra.nodes_of(plan, rank, 1000) for rank in range(4)]
        sends = [node for nodes in graphs for node in nodes if node.kind == SEND]
        assert len(sends) == len(plan.moves)
        finish(graphs)


def test_the_ring_sends_its_bytes_and_adds_in_half_of_its_steps(tmp_path):
    plan = reference.make_schedule("ring", "all_reduce", 4)
    nodes = chakra.nodes_of(plan, 1, 1001)
    of = {kind: [n for n in nodes if n.kind == kind] for kind in (SEND, RECEIVE, COMPUTE)}
    assert [len(found) for found in of.values()] == [6, 6, 3]
    assert {node.attributes["comm_dst"] for node in of[SEND]} == {2}
    assert sum(node.attributes["comm_size"] for node in of[SEND][:4]) in (1000, 1001)


@pytest.fixture
def file(tmp_path):
    plan = reference.make_schedule("ring", "all_reduce", 2)
    return chakra.write(plan, 64, tmp_path)[0]


def test_a_file_that_was_cut_off_or_is_another_one_is_refused(file):
    whole = file.read_bytes()
    for cut in (whole[:-1], whole[:20], b"\xff" * 40, b"{}", b""):
        file.write_bytes(cut)
        with pytest.raises(PlanError, match=rf"^{re.escape(str(file))} (is no trace|has no nodes)"):
            chakra.read(file)
    with pytest.raises(PlanError, match=r"nothing\.et: No such file"):
        chakra.read(file.with_name("nothing.et"))


def test_a_circle_is_refused_by_its_names(file):
    nodes = chakra.read(file)
    chakra.check(nodes, "x.et")
    turned = [replace(nodes[0], after=(len(nodes) - 1,)), *nodes[1:]]
    with pytest.raises(
        PlanError, match=r"^x\.et, nodes depend on each other in a circle: 0 \(step"
    ):
        chakra.check([*turned[:-1], replace(nodes[-1], after=(0,))], "x.et")
    with pytest.raises(PlanError, match=r"^x\.et, node 0 \(a\) depends on node 7, which does not"):
        chakra.check([Node(0, "a", COMPUTE, (7,))], "x.et")


def test_show_writes_it_for_any_number_of_ranks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["show", "ring", "--world", "12", "--sizes", "4K", "--export", "chakra"]) == 0
    said = capsys.readouterr().out
    assert said == "wrote ring.chakra/all_reduce_ring.RANK.et for 12 ranks\n"
    assert len(list((tmp_path / "ring.chakra").iterdir())) == 12
    assert main(["show", "ring", "--sizes", "4K"]) == 2
    assert "--sizes is for --export chakra" in capsys.readouterr().err
    assert main(["show", "ring", "--export", "kineto"]) == 2
    assert "--export is for a trace" in capsys.readouterr().err
