"""Tests share the machine: never more than it has, and nobody waits for ever."""

import threading
import time

import pytest

from tests import sharing


@pytest.fixture
def files(tmp_path):
    """Each as of a process of its own, beside the shares that this run has."""
    place = tmp_path / "shares"
    place.touch()
    made = [place.open("r+b") for _ in range(8)]
    yield made
    for file in made:
        file.close()


def test_never_more_than_there_are(files):
    held, most, guard = [0], [0], threading.Lock()

    def work(file, counts):
        for count in counts:
            with sharing.taken(file, count):
                with guard:
                    held[0] += count
                    most[0] = max(most[0], held[0])
                time.sleep(0.002)
                with guard:
                    held[0] -= count

    all_ = sharing.SHARES
    counts = [[1, 2, all_], [2, 1, 2], [all_, 1, 1], [1, 1, 2]] * 2
    threads = [threading.Thread(target=work, args=pair) for pair in zip(files, counts, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert held == [0] and most == [all_]


def test_two_who_are_hurried_go_together_and_one_who_is_alone_does_not(files):
    in_it = threading.Event()

    def last():
        with sharing.taken(files[2], sharing.SHARES):
            in_it.set()

    thread = threading.Thread(target=last)
    with sharing.taken(files[0], 2), sharing.taken(files[1], 2):
        thread.start()
        assert not in_it.wait(0.1)
    assert in_it.wait(60)
    thread.join()


def test_those_who_are_quiet_go_together_and_with_nobody_else(files):
    in_it = threading.Event()

    def last():
        with sharing.taken(files[2], 1):
            in_it.set()

    thread = threading.Thread(target=last)
    with (
        sharing.taken(files[0], sharing.SHARES, together=True),
        sharing.taken(files[1], sharing.SHARES, together=True),
    ):
        thread.start()
        assert not in_it.wait(0.1)
    assert in_it.wait(60)
    thread.join()


def test_an_error_gives_the_shares_back(files):
    with pytest.raises(KeyError), sharing.taken(files[0], sharing.SHARES):
        raise KeyError
    with sharing.taken(files[1], sharing.SHARES):
        pass
