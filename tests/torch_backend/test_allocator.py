"""The allocator that a backend hands to torch: only compiled code can ask for it on the CPU."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.ranks.groups import in_group

pytestmark = pytest.mark.skipif(
    os.environ.get("DPCORE_TEST_FULL") != "1", reason="compiles for a minute: make test-full"
)

SOURCE = """
#include <torch/csrc/distributed/c10d/Backend.hpp>

at::Tensor floats(const c10::intrusive_ptr<c10d::Backend>& backend, int64_t count) {
  const auto allocator = backend->getMemAllocator();
  const size_t bytes = count * sizeof(float);
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, allocator->allocate(bytes), nullptr,
                       /*resizable=*/false);
  return at::empty({0}).set_(storage, 0, {count}, {1});
}
"""


def test_its_memory_lies_in_the_arena_and_outlives_it(tmp_path):
    def body(folder):
        from torch.utils.cpp_extension import load_inline

        from dpcore.comm.launch.torch_backend import communicator_of

        if dist.get_rank() > 0:
            dist.barrier()  # rank 0 compiles
        compiled = load_inline("floats", SOURCE, functions=["floats"], build_directory=folder)
        if dist.get_rank() == 0:
            dist.barrier()
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        tensor = compiled.floats(backend, 1 << 18)  # the allocator is gone already
        tensor.fill_(dist.get_rank() + 1)
        dist.all_reduce(tensor)
        assert tensor.unique().tolist() == [3.0]
        return communicator_of(dist.group.WORLD).stats()["all_reduce"]

    for stats in in_group(body, 2, str(tmp_path), timeout=300.0):
        assert stats["two_shot/push"]["operations"] == 1
