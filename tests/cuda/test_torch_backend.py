"""torch.distributed with our backend for CPU tensors and NCCL for those on GPUs."""

import torch
import torch.distributed as dist

from dpcore._autoload import register


def test_beside_nccl_in_one_group(tmp_path):
    register()
    dist.init_process_group(
        "cpu:dpcore,cuda:nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        for device in ("cpu", "cuda:0"):
            tensor = torch.full((1000,), 3.0, device=device)
            dist.all_reduce(tensor)
            dist.broadcast(tensor, 0)
            assert tensor.unique().tolist() == [3.0]
        assert dist.group.WORLD._get_backend(torch.device("cpu")).name() == "dpcore"
        assert dist.group.WORLD._get_backend(torch.device("cuda")).name() == "nccl"
    finally:
        dist.destroy_process_group()
