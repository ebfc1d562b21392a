"""``dp.warm_memory()``: tensors get memory that was used before, and what is kept is bounded."""

import gc
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

import dpcore as dp
from dpcore import _C
from tests.cpp import programs

MIB = 2**20


def figures():
    return _C.warm_memory_figures()


def gained(before, name):
    return figures()[name] - before[name]


@pytest.fixture(autouse=True)
def from_the_beginning():
    gc.collect()
    yield
    gc.collect()
    assert not figures()["is_on"] and figures()["kept"] == 0


def large(mib=64):
    return torch.empty(int(mib * MIB), dtype=torch.uint8)


def test_the_next_tensor_of_a_size_gets_the_memory_of_the_last():
    with dp.warm_memory():
        first = large()
        address = first.data_ptr()
        del first
        before = figures()
        assert large().data_ptr() == address
        assert gained(before, "warm") == 1 and gained(before, "mapped") == 0


def test_a_block_is_one_tensors_at_a_time():
    with dp.warm_memory():
        for _ in range(3):
            tensors = [torch.full((MIB,), float(i)) for i in range(20)]
            assert all((t == i).all() for i, t in enumerate(tensors))
            assert len({t.data_ptr() for t in tensors}) == 20


@pytest.mark.parametrize("mib", (1, 1.4, 2, 3.9, 17))
def test_alignment_and_room(mib):
    with dp.warm_memory():
        tensors = [large(mib) for _ in range(3)]
        for tensor in tensors:
            assert tensor.data_ptr() % 64 == 0
            tensor.fill_(7)
        assert all((tensor == 7).all() for tensor in tensors)


def test_small_tensors_and_all_outside_of_it_are_not_in_the_pool():
    before = figures()
    large()
    with dp.warm_memory():
        torch.empty(MIB - 1, dtype=torch.uint8)
    assert gained(before, "warm") == gained(before, "mapped") == 0


def test_tensors_may_outlive_it_and_come_from_before_it():
    early = torch.full((4 * MIB,), 1.0)
    with dp.warm_memory():
        late = torch.full((4 * MIB,), 2.0)
        del early
    assert (late == 2).all() and figures()["used"] == late.nbytes
    del late
    assert figures()["used"] == 0


def test_it_nests_and_is_a_decorator():
    @dp.warm_memory()
    def inner():
        assert figures()["is_on"]

    with dp.warm_memory():
        inner()
        assert figures()["is_on"]


def test_what_is_not_needed_goes_back():
    with dp.warm_memory():
        a, b = large(), large()
        del a, b
        _C.end_warm_window()  # both were kept only at its end
        a = large()
        del a
        assert figures()["kept"] == 128 * MIB
        _C.end_warm_window()  # one of them was not needed in it
        assert figures()["kept"] == 64 * MIB
        _C.end_warm_window()
        assert figures()["kept"] == 0


def test_all_sizes_together_are_bounded_by_what_was_in_use_at_once():
    with dp.warm_memory():
        for size in range(40, 80):
            large(size)
        held = figures()["kept"]
        assert 0 < held <= 1.5 * 80 * MIB


def test_a_resized_storage_keeps_its_values():
    with dp.warm_memory():
        tensor = torch.arange(MIB)
        tensor.resize_(8 * MIB)
        assert (tensor[:MIB] == torch.arange(MIB)).all()
        tensor.untyped_storage().resize_(0)


def test_threads_share_it():
    errors = []

    def work(number):
        try:
            for step in range(20):
                tensor = torch.full((MIB // 2,), number * 1000 + step)
                assert (tensor == number * 1000 + step).all()
        except AssertionError as problem:
            errors.append(problem)

    with dp.warm_memory():
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors


@pytest.mark.parametrize("sanitizer", ("asan", "tsan"))
def test_threads_under_sanitizers(sanitizer):
    programs.run(programs.built(f"{sanitizer}/blocks"), says="blocks: fine")


def test_training_has_the_same_bits():
    """With convolutions of oneDNN, which takes scratch memory by torch's raw interface."""

    def run():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(16, 64, 3), nn.ReLU(), nn.Conv2d(64, 16, 3))
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 16, 64, 64)).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    alone = run()
    with dp.warm_memory():
        before = figures()
        warm = run()
        assert gained(before, "warm") > 0
    assert all(torch.equal(a, b) for a, b in zip(alone, warm, strict=True))


def test_torchs_memory_profiler_sees_its_blocks():
    with (
        dp.warm_memory(),
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile,
    ):
        for _ in range(2):
            large(32)
    sizes = [e.cpu_memory_usage for e in profile.events() if e.name == "[memory]"]
    assert sizes.count(-32 * MIB) == 2


FORKS = """
import os, torch, dpcore as dp
torch.set_num_threads(1)  # a child has none of OpenMP's threads
with dp.warm_memory():
    kept = torch.full((2**22,), 3.0)
    child = os.fork()
    if child == 0:
        fine = bool((kept == 3).all())
        kept.fill_(4.0)
        del kept
        fine &= bool((torch.full((2**22,), 5.0) == 5).all())
        os._exit(0 if fine else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (kept == 3).all()
"""


def test_a_forked_child_has_its_values_and_frees_them():
    """In a program of its own: here, tests before may have left torch more threads than one, and
    a child waits for ever for OpenMP's, which it does not have."""
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=120)


PROGRAM = """
import sys, torch, dpcore as dp
block = dp.warm_memory()
block.__enter__()
sys.kept = torch.ones(2**22)  # until the interpreter has gone
sys.freed = [torch.ones(2**22) for _ in range(3)]
"""


def test_a_process_may_exit_with_tensors_of_it():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def test_without_addresses_malloc_goes_on():
    code = """
import resource, torch, dpcore as dp
from dpcore import _C
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, used + 2**30))
with dp.warm_memory():
    torch.ones(2**22)
assert _C.warm_memory_figures()["mapped"] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True)
