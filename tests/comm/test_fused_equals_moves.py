"""A fused path names the schedule that it implements: the same bits, and the bytes it costs."""

import itertools
import math

import pytest
import torch

import dpcore
from tests.comm.modes import HOW, MODES

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.complex64)
OPS = {
    torch.float32: ("sum", "mean", "prod", "max", "premul_sum"),
    torch.bfloat16: ("sum", "mean", "min", "premul_sum"),
    torch.int8: ("sum", "prod", "bxor"),
    torch.complex64: ("sum", "mean", "prod", "premul_sum"),
}
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
WHOLE = ("all_reduce", "broadcast", "reduce")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
SHARED = ("broadcast", "gather", "scatter")  # the root copies a part, the others the rest
COLLECTIVES = (*WHOLE, "reduce_scatter", "all_gather", "gather", "scatter", "all_to_all")
FINEST_CHUNK = 32768  # bytes of a stage, at least
SMALL, LARGE = 61, 20_011  # elements: of all, or of a rank's part


def random_data(rank, dtype, count):
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_complex or dtype.is_floating_point:
        return torch.randn(count, dtype=dtype, generator=generator)
    return torch.randint(-128, 128, (count,), generator=generator).to(dtype)


def fused_names(collective):
    return ("one_shot", "two_shot") if collective == "all_reduce" else ("direct",)


def run(comm, collective, algorithm, dtype, count, memory="plain", op="sum"):
    """The output of the collective on this rank, None where there is none."""
    rank, world = comm.rank, comm.world_size
    root = world - 1
    make = comm.empty if memory == "arena" else torch.empty
    options = {"algorithm": algorithm}
    if collective in REDUCING:
        options.update(op=op, factor=0.7 + rank)
    if collective in ROOTED:
        options["root"] = root
    n_in = count * (world if collective in ("reduce_scatter", "scatter", "all_to_all") else 1)
    n_out = count * (world if collective in ("all_gather", "gather", "all_to_all") else 1)
    source = make(n_in, dtype=dtype).copy_(random_data(rank, dtype, n_in))
    target = make(n_out, dtype=dtype).zero_()
    if collective in WHOLE:
        getattr(comm, collective)(source, **options)
        return source
    if collective == "gather" and rank != root:
        target = None
    if collective == "scatter" and rank != root:
        source = None
    getattr(comm, collective)(target, source, **options)
    return target


NOTHING = {"operations": 0, "bytes": 0, "peer_reads": 0, "peer_writes": 0}


def run_and_measure(comm, collective, algorithm, dtype, count, memory="plain"):
    """The path that ran, bytes read from peers, bytes written to peers."""
    before = comm.stats().get(collective, {})
    run(comm, collective, algorithm, dtype, count, memory)
    after = comm.stats()[collective]
    changed = [path for path in after if after[path] != before.get(path)]
    assert len(changed) == 1
    (path,) = changed
    then, now = before.get(path, NOTHING), after[path]
    assert now["operations"] == then["operations"] + 1
    return path, *(now[key] - then[key] for key in ("peer_reads", "peer_writes"))


# ---- the same bits ---------------------------------------------------------------------------


def compare_bits(comm, collective):
    different = []
    for dtype, count, memory, name in itertools.product(
        DTYPES, (SMALL, LARGE), ("plain", "arena"), fused_names(collective)
    ):
        for op in OPS[dtype] if collective in REDUCING else ("sum",):
            fused = run(comm, collective, name, dtype, count, memory, op)
            literal = run(comm, collective, f"{name}/moves", dtype, count, memory, op)
            if fused is not None and not torch.equal(
                fused.view(torch.uint8), literal.view(torch.uint8)
            ):
                different.append((name, dtype, op, count, memory))
    return different


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("world", (2, 3, 5))
def test_fused_path_gives_the_bits_of_its_list_of_moves(collective, world):
    for different in dpcore.spawn(compare_bits, world, collective, mode="threads"):
        assert not different


# ---- the bytes -------------------------------------------------------------------------------


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("world", (2, 3, 4))
def test_moves_transfer_what_the_schedule_costs(collective, world):
    def body(comm):
        for name in dpcore.algorithms_of(collective):
            for count in (SMALL, LARGE):
                plan = dpcore.schedule(name, collective, world, root_of(collective, world))
                cost = dpcore.schedule_cost(plan, count, 4)
                path, reads, writes = run_and_measure(
                    comm, collective, f"{name}/moves", torch.float32, count
                )
                assert path == "moves"
                assert reads == cost["received_bytes"][comm.rank], name
                assert writes == cost["sent_bytes"][comm.rank], name

    dpcore.spawn(body, world, mode="threads")


def root_of(collective, world):
    return world - 1 if collective in ROOTED else 0


@pytest.mark.parametrize("collective", COLLECTIVES[1:])
@pytest.mark.parametrize("world", (2, 3, 4))
def test_direct_paths_transfer_what_the_direct_schedule_costs(collective, world):
    def body(comm):
        cost = dpcore.schedule_cost(
            dpcore.schedule("direct", collective, world, root_of(collective, world)), LARGE, 4
        )
        received = cost["received_bytes"][comm.rank]
        sent = cost["sent_bytes"][comm.rank]

        path, reads, writes = run_and_measure(
            comm, collective, "direct", torch.float32, LARGE, "arena"
        )
        if collective in SHARED:
            assert path == "direct/shared"
            assert (reads, writes) <= (received, sent)
        else:
            assert (path, reads, writes) == ("direct/pull", received, 0)
        moved = reads + writes

        path, reads, writes = run_and_measure(comm, collective, "direct", torch.float32, LARGE)
        assert path == "direct/stage"
        assert reads == received
        # What all peers read from one place is staged once.
        once = collective in ("broadcast", "all_gather")
        assert writes == (sent // (world - 1) if once else sent)
        return moved, received

    moved, received = zip(*dpcore.spawn(body, world, mode="threads"), strict=True)
    assert sum(moved) == sum(received)
    if collective in SHARED:  # everybody has the same share of it, to a cache line per piece
        assert max(moved) - min(moved) <= 64 * world


@pytest.mark.parametrize("memory", ("arena", "plain"))
@pytest.mark.parametrize("world", (2, 3, 4, 5))
def test_two_shot_does_each_move_once_on_one_side(world, memory):
    """The owner of a slice does both: it reads the inputs and writes the outputs. Ordinary memory
    is copied to the stage and back, and in between it is the same."""

    def body(comm):
        plan = dpcore.schedule("two_shot", "all_reduce", world)
        slices = [stop - start for start, stop in cuts(LARGE, world)]
        to_me = sum(slices[m[3]] for m in plan.moves if m[4] and m[2] == comm.rank) * 4
        from_me = sum(slices[m[3]] for m in plan.moves if not m[4] and m[1] == comm.rank) * 4
        measured = run_and_measure(comm, "all_reduce", None, torch.float32, LARGE, memory)
        if memory == "arena":
            assert measured == ("two_shot/push", to_me, from_me)
        else:  # every chunk of the stage is cut for itself
            path, reads, writes = measured
            chunks = math.ceil(LARGE * 4 / FINEST_CHUNK)
            assert path == "two_shot/stage"
            assert reads == writes == pytest.approx(to_me, abs=4 * chunks * (world - 1))
        return sum(measured[1:])

    total = sum(dpcore.spawn(body, world, mode="threads"))
    cost = dpcore.schedule_cost(dpcore.schedule("two_shot", "all_reduce", world), LARGE, 4)
    assert total == sum(cost["received_bytes"]) == sum(cost["sent_bytes"])


def cuts(count, parts):
    return [dpcore._C.chunk_range(count, parts, i) for i in range(parts)]


@pytest.mark.parametrize("world", (2, 3, 4, 5))
def test_which_all_reduce_runs_on_ordinary_memory(world):
    def body(comm):
        cost = dpcore.schedule_cost(dpcore.schedule("one_shot", "all_reduce", world), LARGE, 4)
        path, reads, _ = run_and_measure(comm, "all_reduce", "one_shot", torch.float32, LARGE)
        assert (path, reads) == ("one_shot/stage", cost["received_bytes"][comm.rank])
        return [
            run_and_measure(comm, "all_reduce", name, torch.float32, count)[0]
            for name, count in (("two_shot", LARGE), (None, LARGE), (None, SMALL))
        ]

    expected = ["two_shot/stage", "two_shot/stage", "one_shot/stage"]
    assert dpcore.spawn(body, world, mode="threads") == [expected] * world


# ---- schedules of one's own ------------------------------------------------------------------


def star(world=3, **changes):
    """Everything to rank 0, which adds, and back."""
    others = range(1, world)
    moves = [(0, r, 0, 0, True) for r in others] + [(1, 0, r, 0, False) for r in others]
    arguments = {"collective": "all_reduce", "world": world, "chunks": 1, "moves": moves}
    return dpcore.Schedule("star", **{**arguments, **changes})


@pytest.mark.parametrize("mode", MODES)
def test_a_schedule_of_ones_own_runs(mode):
    def body(comm):
        data = [random_data(rank, torch.float32, 100_003) for rank in range(3)]
        tensor = data[comm.rank].clone()
        comm.all_reduce(tensor, algorithm=star())
        work = comm.all_reduce(second := data[comm.rank].clone(), algorithm=star(), async_op=True)
        work.wait()
        expected = data[0] + data[1] + data[2]
        plan_cost = dpcore.schedule_cost(star(), 100_003, 4)
        moved = comm.stats()["all_reduce"]["moves"]
        assert moved["peer_reads"] == 2 * plan_cost["received_bytes"][comm.rank]
        return torch.equal(tensor, expected) and torch.equal(second, expected)

    assert all(dpcore.spawn(body, 3, **HOW[mode]))


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"moves": [(0, 1, 0, 0, True), (0, 2, 5, 0, True)]}, dpcore.Error, r"move 1 \(step 0"),
        ({"moves": [(0, 1, 0, 0, True)]}, dpcore.Error, "rank 0 lacks the contribution of rank 2"),
        ({"moves": [(0, 1, 0, 0, True)] * 2}, dpcore.Error, "move 1 .*added twice"),
        ({"world": 4, "moves": star(4).moves}, dpcore.Unsupported, "is for 4 ranks"),
        (
            {"collective": "reduce", "moves": star().moves[:2]},
            dpcore.Unsupported,
            "for reduce, not for all_reduce",
        ),
    ],
    ids=("wrong move", "lacks a move", "move twice", "other world", "other collective"),
)
def test_a_wrong_schedule_is_refused_and_the_communicator_goes_on(changes, kind, message):
    def body(comm):
        tensor = torch.ones(5)
        with pytest.raises(kind, match=message):
            comm.all_reduce(tensor, algorithm=star(**changes))
        assert tensor.tolist() == [1.0] * 5
        comm.all_reduce(tensor, algorithm=star())
        return tensor.tolist()

    assert dpcore.spawn(body, 3, mode="threads") == [[3.0] * 5] * 3


def test_a_schedule_for_another_root_is_refused():
    def body(comm):
        plan = dpcore.schedule("tree", "broadcast", 3, root=0)
        tensor = torch.full((4,), float(comm.rank))
        with pytest.raises(dpcore.Unsupported, match=r"root 0.*root 1"):
            comm.broadcast(tensor, root=1, algorithm=plan)
        comm.broadcast(tensor, root=0, algorithm=plan)
        return tensor.tolist()

    assert dpcore.spawn(body, 3, mode="threads") == [[0.0] * 4] * 3
