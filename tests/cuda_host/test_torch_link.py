"""DPCORE_LINK, and tensors of a device over the backend "dpcore" of torch.distributed."""

import pytest
import torch
import torch.distributed as dist

import dpcore
from tests.ranks.groups import in_group


def test_a_link_is_refused_that_devices_would_not_obey(monkeypatch):
    monkeypatch.setenv("DPCORE_LINK", "1gbit,50us")

    def body():
        with pytest.raises(dpcore.Unsupported, match=r"^DPCORE_LINK=1gbit,50us: .* on GPUs; unset"):
            dist.all_reduce(torch.ones(4))
        with pytest.raises(dpcore.Unsupported, match=r"^DPCORE_LINK=1gbit,50us: .* on GPUs; unset"):
            dpcore.DataParallel(torch.nn.Linear(2, 1))
        assert not dist.group.WORLD._get_backend(torch.device("cpu")).device_libraries()

    in_group(body, 2, device="cuda")
