"""The emulated link: words for it, how long things take on it, and that results stay the same."""

import time
from dataclasses import astuple

import pytest
import torch

import dpcore
from dpcore.base.link import Speed, parse_speed, speeds
from tests.comm.modes import HOW, MODES

TOLERANCE = 0.9  # of the time that the link takes: other programs may need the processor


@pytest.mark.parametrize(
    ("text", "speed"),
    [
        ("1gbit", Speed(125e6)),
        ("50us", Speed(latency=5e-5)),
        ("2.5mbit,1ms", Speed(312_500, 1e-3)),
        ("1gbit,2us,jitter=1us,loss=0.5%,seed=4", Speed(125e6, 2e-6, 1e-6, 0.005, 4)),
    ],
)
def test_words(text, speed):
    assert astuple(parse_speed(text)) == pytest.approx(astuple(speed))


@pytest.mark.parametrize(
    "text",
    ["", "fast", "1gbyte", "10gbit;50us", "jitter=1%", "-1us", "nangbit", "1.2.3gbit", "..bit"],
)
def test_words_that_mean_nothing(text):
    with pytest.raises(dpcore.Unsupported, match="is not understood"):
        parse_speed(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0gbit", "'0gbit' is out of range: from 1 bit/s"),
        ("0.5bit", "out of range"),
        ("1" + "0" * 400 + "gbit", "out of range"),
        ("1gbit,3601s", "'3601s' is out of range: up to an hour"),
        ("loss=100%", "out of range: up to 99.9%"),
        ("seed=99999999999999999999", "out of range"),
        ("1gbit,2gbit", "'2gbit' comes second"),
        ("1us,1ms", "'1ms' comes second"),
    ],
)
def test_words_whose_numbers_are_nonsense(text, why):
    with pytest.raises(dpcore.Unsupported, match=why):
        parse_speed(text)


def test_a_file_for_pairs_that_is_not_text(tmp_path):
    path = tmp_path / "links.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(dpcore.Unsupported, match=r"link: .*decode"):
        speeds(f"file:{path}", 2)
    with pytest.raises(dpcore.Unsupported, match=r"link: .*Is a directory"):
        speeds(f"file:{tmp_path}", 2)


def test_a_file_for_pairs(tmp_path):
    path = tmp_path / "links.txt"
    path.write_text("* -> *: 1gbit\n\n0 -> 1: 10gbit,5us  # one way\n2 -> *: 1ms\n")
    table = speeds(f"file:{path}", 3)
    assert astuple(table[0][1]) == pytest.approx((1.25e9, 5e-6, 0, 0, 0))
    assert table[1][0] == table[0][2] == Speed(125e6)
    assert table[2] == [Speed(latency=1e-3)] * 3
    path.write_text("* -> *: 1gbit\n0 to 1: 1gbit\n")
    with pytest.raises(dpcore.Unsupported, match=r"links\.txt:2: write 'from -> to"):
        speeds(f"file:{path}", 3)


def seconds_of(call, comm, tries=8):
    """The best of a few: what the link takes, and not what else the machine does.

    It begins with the first rank and ends with the last one: a rank that comes late finds messages
    that wait for it, and by its own clock the link would be too fast.
    """
    best = float("inf")
    begins, ends = (torch.empty(comm.world_size, dtype=torch.float64) for _ in range(2))
    for _ in range(tries + 1):  # the first makes what the later ones use
        comm.barrier()
        begin = time.perf_counter()
        call()
        end = time.perf_counter()
        for all_of_them, own in ((begins, begin), (ends, end)):
            comm.all_gather(all_of_them, torch.tensor([own], dtype=torch.float64))
        best = min(best, float(ends.max() - begins.min()))
    return best


def timed(comm):
    """Seconds per barrier, small all-reduce and all-reduce of 10 MB, and of the processor."""
    small, large = torch.zeros(1), torch.zeros(2_500_000)
    barrier = seconds_of(comm.barrier, comm)
    latency = seconds_of(lambda: comm.all_reduce(small, algorithm="one_shot"), comm)
    processor = time.process_time()
    bandwidth = seconds_of(lambda: comm.all_reduce(large, algorithm="two_shot"), comm)
    return barrier, latency, bandwidth, (time.process_time() - processor) / 9


@pytest.mark.quiet
@pytest.mark.parametrize("mode", MODES)
def test_bandwidth_and_latency(mode):
    for barrier, latency, bandwidth, processor in dpcore.spawn(
        timed, 2, link="1gbit,5ms", **HOW[mode]
    ):
        assert 0.005 <= barrier < 0.005 * (1 + TOLERANCE)
        assert 0.010 <= latency < 0.010 * (1 + TOLERANCE)  # all have entered, and then the data
        expected = 0.005 + 2 * 0.005 + 0.080  # the same, and 10 MB each way in two steps
        assert expected * 0.95 < bandwidth < expected * (1 + TOLERANCE)
        if mode != "threads":  # which share a clock
            assert processor < 0.6 * bandwidth  # it is free while data is on its way


@pytest.mark.quiet
def test_several_senders_share_the_way_into_a_rank():
    def body(comm):
        part = torch.ones(250_000)
        whole = torch.empty(4 * 250_000) if comm.rank == 0 else None
        return seconds_of(lambda: comm.gather(whole, part), comm)

    of_root = dpcore.spawn(body, 4, mode="threads", link="1gbit")[0]
    assert 0.024 * 0.9 < of_root < 0.024 * (1 + TOLERANCE)  # three times 1 MB


@pytest.mark.quiet
def test_one_way_may_be_slower_than_the_other(tmp_path):
    path = tmp_path / "links.txt"
    path.write_text("* -> *: 1gbit\n1 -> 0: 100mbit\n")

    def body(comm):
        tensor = torch.ones(250_000)
        return [seconds_of(lambda r=root: comm.broadcast(tensor, r), comm) for root in (0, 1)]

    results = dpcore.spawn(body, 2, mode="threads", link=f"file:{path}")
    there, back = (max(times) for times in zip(*results, strict=True))
    assert 0.008 * 0.9 < there < 0.008 * (1 + TOLERANCE) + 0.002
    assert 0.080 * 0.9 < back < 0.080 * (1 + TOLERANCE)


@pytest.mark.quiet
def test_jitter_and_loss_are_the_same_in_every_run():
    def body(comm):
        tensor = torch.zeros(1)
        return [seconds_of(lambda: comm.broadcast(tensor), comm, tries=0) for _ in range(12)]

    def run(seed):
        link = f"2ms,jitter=1.5ms,loss=20%,seed={seed}"
        return torch.tensor(dpcore.spawn(body, 2, mode="threads", link=link)[1])

    first, again, other = run(1), run(1), run(2)
    for _ in range(4):  # a busy machine only adds to a time: the best are those of the link
        if (first - again).abs().median() < 0.0005:
            break
        first, again, other = first.min(run(1)), again.min(run(1)), other.min(run(2))
    assert first.max() - first.min() > 0.001
    assert (first - again).abs().median() < 0.0005
    assert (first - other).abs().max() > 0.001


@pytest.mark.quiet
def test_groups_share_the_card_of_a_rank():
    def body(comm):
        pairs = [comm.split(0, comm.rank), comm.split(0, -comm.rank)]
        tensors = [torch.ones(250_000) for _ in pairs]

        def both():
            works = [
                pair.all_reduce(t, async_op=True) for pair, t in zip(pairs, tensors, strict=True)
            ]
            for work in works:
                work.wait()

        return seconds_of(both, comm)

    for seconds in dpcore.spawn(body, 2, mode="threads", link="1gbit"):
        assert 0.016 * 0.9 < seconds < 0.016 * (1 + TOLERANCE)
