"""Results of a GPU are read when its stream is done, and not after a failure."""

from types import SimpleNamespace

import pytest
import torch

from dpcore import Timeout
from dpcore.comm.communicators.read_back import numbers_in


class OfAGpu:
    is_cuda, device = True, "cuda:0"

    def __init__(self, notes):
        self.notes = notes

    def tolist(self):
        self.notes.append("read")
        return [1, 2]


class Group:
    def __init__(self, failed):
        self._native = SimpleNamespace(failed=failed)

    def barrier(self):
        raise Timeout("operation 3 was not complete")


@pytest.fixture
def notes(monkeypatch):
    found = []

    def stream_of(device):
        return SimpleNamespace(synchronize=lambda: found.append(f"{device} is done"))

    monkeypatch.setattr(torch.cuda, "current_stream", stream_of)
    return found


def test_the_stream_comes_first(notes):
    for group in (Group(failed=False), object()):
        assert numbers_in(OfAGpu(notes), group) == [1, 2]
    assert notes == ["cuda:0 is done", "read"] * 2


def test_what_a_failed_operation_left_is_not_read(notes):
    with pytest.raises(Timeout, match="operation 3"):
        numbers_in(OfAGpu(notes), Group(failed=True))
    assert notes == ["cuda:0 is done"]


def test_of_the_host_it_is_a_list_at_once(notes):
    assert numbers_in(torch.tensor([3, 4]), object()) == [3, 4]
    assert notes == []
