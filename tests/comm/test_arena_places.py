"""Where arenas are mapped: the same offset of two must not look alike to a cache (decision 47)."""

import gc

import pytest

import dpcore

ALIKE = 256 << 20


def arenas():
    """Where those of this process begin."""
    with open("/proc/self/maps") as maps:
        return {int(line.split("-")[0], 16) for line in maps if "dpcore-arena" in line}


def while_all_are_mapped(comm):
    comm.barrier()
    found = arenas()
    comm.barrier()
    return found


@pytest.mark.parametrize("mode", ["processes", "threads"])
def test_arenas_of_a_communicator_do_not_look_alike(mode):
    gc.collect()
    of_others = arenas() if mode == "threads" else set()  # what tests before have left open
    for found in dpcore.spawn(while_all_are_mapped, 4, mode=mode):
        own = found - of_others
        assert len(own) >= 4
        assert len({begin % ALIKE for begin in own}) == len(own)


def test_nothing_is_left_of_the_addresses_around_them():
    with open("/proc/self/maps") as maps:
        before = sum(1 for _ in maps)
    for _ in range(3):
        dpcore.init()
        dpcore.finalize()
    with open("/proc/self/maps") as maps:
        assert sum(1 for _ in maps) <= before + 8  # what libraries have loaded meanwhile
