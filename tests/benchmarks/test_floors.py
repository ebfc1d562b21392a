"""The floor of an all-reduce is one: it ends with the sum, in as many parts as it is told."""

from pathlib import Path

import numpy as np

import dpcore as dp
from benchmarks.harness import host_floor


def sums(comm, folder, count, parts):
    """On a rank: what the calls leave in its own tensors."""
    floor = host_floor.Floor(comm, Path(folder), 4 * count)
    data = np.arange(count, dtype=np.float32) * (comm.rank + 1)
    in_parts = floor.ordinary(data, parts)
    in_parts()
    first = data.copy()
    in_parts()
    floor.buffers[comm.rank][:count] = comm.rank + 1
    floor.mapped(4 * count)()
    floor.meet()()
    return first, data, floor.buffers[comm.rank][:count].copy()


def test_both_ranks_end_with_the_sum(tmp_path):
    host_floor.compiled(tmp_path)
    count = 8192
    for parts in (1, 4, 16):
        for path in tmp_path.glob("[!h]*"):
            path.unlink()
        for first, second, mapped in dp.spawn(sums, 2, str(tmp_path), count, parts):
            assert np.array_equal(first, np.arange(count) * 3)
            assert np.array_equal(second, np.arange(count) * 6)
            assert (mapped == 3).all()


def test_every_size_has_a_line_for_each_kind_of_memory():
    sizes, kinds = (1 << 16, 1 << 18), ("arena", "ordinary")
    lines = host_floor.run(sizes, rounds=1)
    expected = [(size, f"all_reduce, {kind}") for size in sizes for kind in kinds]
    assert [(line["bytes"], line["what"]) for line in lines] == expected
    measured = ("floor", "dpcore", "apart", "of_floor")
    assert all(line[name] > 0 for line in lines for name in measured)
