"""Where arenas are mapped: the same offset of two must not look alike to a cache (decision 47)."""

import pytest

import dpcore

ALIKE = 256 << 20


def places():
    """Of all arenas in this process, the part of their addresses that the cache looks at."""
    with open("/proc/self/maps") as maps:
        arenas = [line for line in maps if "dpcore-arena" in line]
    return [int(line.split("-")[0], 16) % ALIKE for line in arenas]


def own_places(comm):
    comm.barrier()  # all are mapped
    found = places()
    comm.barrier()  # and still are
    return found


@pytest.mark.parametrize("mode", ["processes", "threads"])
def test_arenas_of_a_process_do_not_look_alike(mode):
    for found in dpcore.spawn(own_places, 4, mode=mode):
        assert len(found) >= 4
        assert len(set(found)) == len(found)


def test_nothing_is_left_of_the_addresses_around_them():
    with open("/proc/self/maps") as maps:
        before = sum(1 for _ in maps)
    for _ in range(3):
        dpcore.init()
        dpcore.finalize()
    with open("/proc/self/maps") as maps:
        assert sum(1 for _ in maps) <= before + 8  # what libraries have loaded meanwhile
