"""What communication costs processors, and how threads share cores."""

from functools import partial

import pytest

from dpcore.base.link import Speed
from dpcore.tools.simulate import Links, Network, NetworkOperation, Processors

GBIT = Speed(1.25e8, 50e-6)
MB = 1_000_000
COSTS = Processors(
    operation=20e-6, memory_operation=1e-6, message=2e-6, wake=10e-6,
    copied_byte=1e-10, reduced_byte=2e-10, fused_byte=3e-10,
)  # fmt: skip


def computed(processors, jobs, ranks_per_host=2, world=2):
    """When each (rank, moment, seconds, busy) of computation ends."""
    network = Network(world, Links(GBIT, ranks_per_host=ranks_per_host), processors=processors)
    ends = {}
    for number, (rank, moment, seconds, busy) in enumerate(jobs):
        network.at(
            moment,
            lambda now, rank=rank, seconds=seconds, busy=busy, number=number: network.compute(
                rank, seconds, now, lambda end: ends.update({number: end}), busy
            ),
        )
    network.go_on()
    return [ends[number] for number in range(len(jobs))]


def test_threads_share_the_cores_of_their_host_evenly():
    both = [(0, 0.0, 1.0, 1.0), (1, 0.0, 1.0, 1.0)]
    assert computed(Processors(cores=2), both) == pytest.approx([1.0, 1.0])
    assert computed(Processors(cores=1), both) == pytest.approx([2.0, 2.0])
    assert computed(Processors(cores=1), both, ranks_per_host=1) == pytest.approx([1.0, 1.0])
    assert computed(Processors(cores=1, ranks=2), both, ranks_per_host=1) == [2.0, 2.0]
    # The second comes when the first is half through, and has half of the core until it ends.
    late = [(0, 0.0, 1.0, 1.0), (1, 0.5, 1.0, 1.0)]
    assert computed(Processors(cores=1), late) == pytest.approx([1.5, 2.0])


def test_layers_that_sleep_need_no_core():
    sleeping = [(0, 0.0, 1.0, 0.0), (1, 0.0, 1.0, 1.0)]
    assert computed(Processors(cores=1), sleeping) == pytest.approx([1.0, 1.0])
    half = [(0, 0.0, 1.0, 0.5), (1, 0.0, 1.0, 1.0)]
    assert computed(Processors(cores=1), half) == pytest.approx([1.5, 1.5])


def seconds_of(links, nbytes, processors, world=2, algorithm="auto", priority=(0,), at=(0.0,)):
    operations = [
        NetworkOperation(nbytes, [moment] * world, one)
        for one, moment in zip(priority, at, strict=True)
    ]
    Network(world, links, algorithm, processors).run(operations)
    return [max(operation.finished) for operation in operations]


def test_operations_in_memory_cost_processors_only():
    """Each of N ranks adds and writes (N-1)/N of the bytes."""
    memory = Links.memory()
    for world in (2, 4):
        (seconds,) = seconds_of(memory, 8 * MB, COSTS, world)
        share = (world - 1) / world * 8 * MB
        assert seconds == pytest.approx(share * 3e-10 + 1e-6 + 2 * 10e-6)
        assert seconds_of(memory, 8 * MB, Processors.free(), world) == [0.0]
    (small,) = seconds_of(memory, 1000, COSTS)
    assert small == pytest.approx(1e-6 + 2 * 10e-6, rel=0.1)  # entering, and waking twice
    waited = NetworkOperation(1000, [0.0] * 2, background=False)
    Network(2, memory, "auto", COSTS).run([waited])
    assert waited.finished == pytest.approx([1.3e-6] * 2)  # threads that wait poll
    (crowded,) = seconds_of(memory, 8 * MB, Processors(**{**vars(COSTS), "cores": 1}), 2)
    assert crowded == pytest.approx(2 * 4 * MB * 3e-10, rel=0.05)


def test_typical_processors_are_those_of_one_machine_and_leave_links_their_time():
    typical = Processors.typical()
    assert not typical.is_free
    (free,), (costly,) = (
        seconds_of(Links.of(GBIT), 8 * MB, each) for each in (Processors.free(), typical)
    )
    assert free < costly < 1.02 * free
    (memory,) = seconds_of(Links.memory(), 8 * MB, typical)
    assert 1e-4 < memory < 1e-2


def test_a_ring_in_memory_sends_messages():
    (ring,) = seconds_of(Links.memory(), 8 * MB, COSTS, 4, "ring")
    (fused,) = seconds_of(Links.memory(), 8 * MB, COSTS, 4, "two_shot")
    assert ring > 1.2 * fused


def test_links_hide_what_is_cheaper_than_they_are():
    """Over a slow link, processors work while the card sends; over a fast one they are what takes
    time."""
    for world in (2, 4):
        (free,) = seconds_of(Links.of(GBIT), 8 * MB, Processors.free(), world)
        (costly,) = seconds_of(Links.of(GBIT), 8 * MB, COSTS, world)
        assert free < costly < 1.02 * free
    fast = Links.of(Speed(1e11, 1e-6))
    # Each rank copies 8 MB, adds half of them and copies the other half to their place: 8 MB of
    # messages that leave, and 8 MB that come.
    (seconds,) = seconds_of(fast, 8 * MB, COSTS)
    messages = 2 * 8 * MB / (64 << 10) * 2e-6
    assert seconds == pytest.approx(8 * MB * 1e-10 + 4 * MB * 3e-10 + messages, rel=0.03)


def test_computing_beside_an_operation_takes_longer():
    """On one core; the operation takes it for as long as it works."""
    work = COSTS.fused_byte
    processors = Processors(**{**vars(COSTS), "cores": 1, "ranks": 1})
    network = Network(2, Links.memory(), "auto", processors)
    ends = []
    for rank in range(2):
        network.at(0.0, lambda now, rank=rank: network.compute(rank, 0.1, now, ends.append))
    operation = NetworkOperation(80 * MB, [0.01, 0.01])
    network.run([operation])
    assert ends == pytest.approx([0.1 + 40 * MB * work] * 2, rel=1e-3)
    assert operation.finished[0] == pytest.approx(0.01 + 2 * 40 * MB * work, rel=0.01)


def test_a_driver_that_wakes_waits_for_a_core_that_computes():
    """Until the computation is over, or Linux takes a core away from it; and not for one that is
    free."""

    def ends(cores, computes, busy_wake=5e-3):
        found = {"cores": cores, "busy_wake": busy_wake, "ranks": 2}
        processors = Processors(**vars(COSTS) | found)
        network = Network(2, Links.memory(), "auto", processors)
        for rank in range(2):
            begin = partial(network.compute, rank, computes, act=lambda _: None)
            network.at(0.0, begin)
        operation = NetworkOperation(1000, [1e-6, 1e-6])
        network.run([operation])
        return max(operation.finished)

    alone = ends(4, 0.1)
    assert alone == pytest.approx(2 * 10e-6, rel=0.2)  # it wakes up to enter, and to begin
    assert ends(2, 0.1) == pytest.approx(2 * 5e-3, rel=0.02)
    assert ends(2, 0.1, busy_wake=0.0) == pytest.approx(alone, rel=0.2)
    assert ends(2, 2e-3) == pytest.approx(alone + 2e-3, rel=0.02)


def test_a_driver_that_sleeps_beside_computation_takes_a_price_from_it():
    """For each message, or for as long as there is one after another without a pause."""

    def ends(gbit, woken, cores=2):
        found = {"cores": cores, "woken": woken, "ranks": 2}
        network = Network(2, Links.of(Speed(gbit * 1.25e8, 50e-6)), processors=Processors(**found))
        computed = []
        for rank in range(2):
            begin = partial(network.compute, rank, 0.1, act=computed.append)
            network.at(0.0, begin)
        network.run([NetworkOperation(4 * MB, [0.0] * 2)])
        return max(computed)

    messages = 4 * MB / (64 << 10)
    assert ends(1, woken=1e-5) == pytest.approx(0.1 + messages * 1e-5, abs=4e-5)
    assert ends(1, woken=1e-5, cores=4) == 0.1
    transfer = 4 * MB / 1.25e10
    assert 0 < ends(100, woken=5e-5) - 0.1 - transfer < 2 * 5e-5


def test_an_urgent_operation_overtakes_between_two_segments():
    first, urgent = seconds_of(Links.memory(), 80 * MB, COSTS, priority=(0, 1), at=(0.0, 1e-3))
    assert urgent < first
    assert first == pytest.approx(2 * 40 * MB * 3e-10, rel=0.02)


def test_over_tcp_an_urgent_operation_waits_for_what_the_kernel_has():
    """On its way to the other rank; over an emulated link for the rest of a fragment alone. Short
    messages take no turns, so all of them wait at once."""
    links = Links.tcp(Speed(1.25e8, 20e-6))
    ranks_share_cores = Processors(cores=2, ranks=4)

    def waits(nbytes, links, processors=Processors.free()):  # noqa: B008
        operations = [NetworkOperation(12 * MB, [0.0] * 4), NetworkOperation(nbytes, [0.02] * 4, 1)]
        Network(4, links, "auto", processors).run(operations)
        alone = NetworkOperation(nbytes, [0.0] * 4, 1)
        Network(4, links, "auto", processors).run([alone])
        return max(operations[1].finished) - 0.02 - max(alone.finished)

    queue = 3 * 32768 / (1.25e8 * links.goodput)
    assert queue < waits(64000, links) < 2 * queue
    assert 2 * queue < waits(MB, links) < 9 * queue
    for nbytes in (64000, MB):
        assert 1.2 * waits(nbytes, links) < waits(nbytes, links, ranks_share_cores)
        assert waits(nbytes, Links(Speed(1.25e8, 20e-6))) < 2 * queue


def test_a_rank_wakes_up_for_each_frame_once_priorities_have_met():
    """Between two ranks a message of 128 KiB is one frame."""
    links = Links.tcp(Speed(1.25e8, 20e-6))
    woken = 2e-3  # longer than the frame takes

    def end(priority, seconds):
        operations = [NetworkOperation(4 << 20, [0.0] * 2), NetworkOperation(1000, [0.0] * 2)]
        operations[1].priority = priority
        processors = Processors(tcp_message=1e-6, woken=seconds)
        Network(2, links, "auto", processors).run(operations)
        return max(operations[0].finished)

    assert end(0, woken) == end(0, 0.0) == pytest.approx(end(1, 0.0), rel=1e-3)
    frames = 32  # of each rank, half of them sums of parts, half of them results
    assert end(1, woken) == pytest.approx(frames * woken, rel=0.05)


def test_64_operations_are_in_flight_and_the_next_one_waits():
    link = Speed(1.25e8, 10e-3)
    ends = seconds_of(link, 1000, Processors.free(), priority=(0,) * 66, at=(0.0,) * 66)
    assert max(ends[:64]) < 1.1 * ends[0]
    assert min(ends[64:]) == pytest.approx(2 * ends[0], rel=0.1)


def test_small_data_travels_with_the_word_of_entry_over_tcp():
    tcp = Links(GBIT, is_tcp=True)
    assert seconds_of(tcp, 10_000, Processors.free()) == pytest.approx([50e-6 + 80e-6])
    (large,) = seconds_of(tcp, 40_000, Processors.free())
    assert large > 2 * 50e-6 + 20_000 / 1.25e8
