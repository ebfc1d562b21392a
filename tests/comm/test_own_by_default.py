"""Algorithms of a program's own where none is named: in init(), in DPCORE_ALGORITHM, in groups."""

from functools import partial

import pytest
import torch

import dpcore
from tests.comm.modes import HOW, MODES
from tests.ranks.groups import in_group
from tests.swing import SWING


def exchange(world):
    """Everyone sends everything to everyone."""
    return [(0, a, b, 0, True) for a in range(world) for b in range(world) if a != b]


def paths(comm, collective="all_reduce"):
    return {path: ran["operations"] for path, ran in comm.stats().get(collective, {}).items()}


def check_all_reduce(comm, elements=1000):
    tensor = torch.arange(float(elements)) + comm.rank
    comm.all_reduce(tensor)
    others = sum(range(comm.world_size))
    torch.testing.assert_close(tensor, torch.arange(float(elements)) * comm.world_size + others)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("algorithm", [SWING, exchange])
def test_all_sizes_run_it_and_other_collectives_choose(mode, algorithm):
    def body(comm):
        for elements in (1, 7, 1000, 300_000):
            check_all_reduce(comm, elements)
        comm.broadcast(torch.ones(3))
        assert paths(comm) == {"moves": 4}
        assert "moves" not in paths(comm, "broadcast")
        check_all_reduce(comm)
        comm.all_reduce(torch.ones(3), algorithm="two_shot")
        assert sum(paths(comm).values()) == 6
        assert comm.world_size < 3 or paths(comm)["moves"] == 5 + (mode == "tcp")

    dpcore.spawn(body, 4, algorithm=algorithm, **HOW[mode])


def test_a_schedule_is_for_its_number_of_ranks():
    made = dpcore.Schedule("pairs", "all_reduce", 2, 1, exchange(2))

    def body(comm):
        check_all_reduce(comm)
        assert paths(comm) == {"moves": 1}

    dpcore.spawn(body, 2, mode="threads", algorithm=made)
    with pytest.raises(
        dpcore.Unsupported,
        match="algorithm pairs for 3 ranks: it is a schedule for 2 ranks; pass a function",
    ):
        dpcore.spawn(body, 3, mode="threads", algorithm=made)


def test_one_rank_needs_none():
    def alone(comm):
        check_all_reduce(comm)

    dpcore.spawn(alone, 1, mode="threads", algorithm=SWING)


def test_groups_call_the_function_again_and_refuse_what_it_lacks():
    def body(comm):
        half = comm.split(comm.rank // 2)
        check_all_reduce(half)
        assert paths(half) == {"moves": 1}
        assert half.explain(8)["all_reduce"].algorithm.endswith("swing.py:swing")
        alone = comm.split(comm.rank)
        check_all_reduce(alone)
        if comm.rank == 3:
            assert comm.split(None) is None
        else:
            with pytest.raises(
                dpcore.Unsupported, match=r"swing for 3 ranks: swing\.py:\d+: Value"
            ):
                comm.split(0)
        check_all_reduce(comm)  # which goes on

    dpcore.spawn(body, 4, mode="threads", algorithm=SWING)


def test_a_schedule_is_refused_by_groups_of_another_size():
    made = dpcore.Schedule("all", "all_reduce", 4, 1, exchange(4))

    def body(comm):
        with pytest.raises(
            dpcore.Unsupported, match="algorithm all for 2 ranks: it is a schedule for 4 ranks; pas"
        ):
            comm.split(comm.rank // 2)
        check_all_reduce(comm.split(0))

    dpcore.spawn(body, 4, mode="threads", algorithm=made)


def test_explain_says_so_and_what_it_is_expected_to_take():
    def body(comm):
        choice = comm.explain(1 << 20)["all_reduce"]
        assert choice.algorithm == "exchange"
        assert choice.why.startswith("a schedule of the program's own, asked for by algorithm=")
        (own,) = [one for one in choice.candidates if one.algorithm == "exchange"]
        assert own.steps == 1 and own.ordered and own.seconds > 0
        assert comm.explain(1 << 20)["broadcast"].why.startswith("all ranks share memory")

    dpcore.spawn(body, 3, mode="threads", algorithm=exchange)


def wrong(world):
    return exchange(world)[:-1]


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        (wrong, r"algorithm wrong for 3 ranks is wrong: .*chunk 0 of rank 1 lacks the contrib"),
        (SWING, r"swing\.py:swing for 3 ranks: swing\.py:\d+: ValueError: swing is for 2, 4, 8"),
        ("nowhere.py:swing", r"there is no file nowhere\.py"),
    ],
)
def test_what_is_wrong_is_said_before_ranks_wait_for_each_other(algorithm, says):
    with pytest.raises(dpcore.Unsupported, match=says):
        dpcore.init(rank=0, world_size=3, init_method="nobody comes", algorithm=algorithm)
    for nothing in (None, 3):
        with pytest.raises(TypeError, match=rf"algorithm: expected a .*, not {nothing}"):
            dpcore.init(rank=0, world_size=1, algorithm=nothing)


def test_an_order_that_depends_on_the_layout_is_refused_when_deterministic():
    def init(comm):
        raise AssertionError

    with pytest.raises(dpcore.Unsupported, match=r"algorithm '.*swing' adds in an order"):
        dpcore.spawn(init, 4, mode="threads", algorithm=SWING, deterministic=True)
    dpcore.spawn(check_all_reduce, 4, mode="threads", algorithm=exchange, deterministic=True)


def test_ranks_that_differ_are_told_so():
    def body(comm):
        own = exchange if comm.rank else (lambda world: (2, [*two_chunks(world)]))
        comm.all_reduce(torch.ones(4), algorithm=own)

    def two_chunks(world):
        return [(0, a, b, c, True) for _, a, b, _, _ in exchange(world) for c in (0, 1)]

    with pytest.raises(dpcore.Mismatch, match="the algorithms differ"):
        dpcore.spawn(body, 2, mode="threads")


def test_calls_take_functions_and_files_and_keep_what_is_proved():
    calls = []

    def counted(world):
        calls.append(world)
        return exchange(world)

    def body(comm):
        for _ in range(3):
            for algorithm in (counted, SWING):
                tensor = torch.ones(5)
                comm.all_reduce(tensor, algorithm=algorithm)
                assert tensor.tolist() == [2.0] * 5
        assert paths(comm) == {"moves": 6}
        with pytest.raises(TypeError, match="expected a name, FILE:NAME, a function of the number"):
            comm.all_reduce(torch.ones(5), algorithm=3)
        with pytest.raises(dpcore.Unsupported, match="this schedule is for all_reduce, not for br"):
            comm.broadcast(torch.ones(5), algorithm=counted)

    dpcore.spawn(body, 2, mode="threads")
    assert calls == [2, 2]  # once on each rank


def test_more_algorithms_than_are_kept():
    def body(comm):
        for _ in range(2):
            for _ in range(40):
                tensor = torch.ones(5)
                comm.all_reduce(tensor, algorithm=partial(exchange))
                assert tensor.tolist() == [2.0] * 5

    dpcore.spawn(body, 2, mode="threads")


def test_the_variable_names_it_for_groups_of_torch(monkeypatch):
    monkeypatch.setenv("DPCORE_ALGORITHM", SWING)

    def body():
        group = torch.distributed.group.WORLD
        tensor = torch.ones(5)
        torch.distributed.all_reduce(tensor)
        assert tensor.tolist() == [2.0] * 5
        model = dpcore.DataParallel(torch.nn.Linear(3, 2), schedule="bucketed")
        model(torch.ones(4, 3)).sum().backward()
        return paths(dpcore.communicator_of(group))

    for taken in in_group(body, 2):
        assert set(taken) == {"moves"}


def test_backend_options_refuse_files():
    with pytest.raises(dpcore.Unsupported, match="take dpcore's algorithms by name"):
        in_group(lambda: None, 2, device="cuda", algorithm=SWING)
