"""torch's own tests of torch.distributed, taken out of the installed wheel and run on this machine.

``distributed_test.py`` decides at its import, by the name of the backend, which of its tests make
sense, and holds names of torch in its own. So everything is put in place before that import: the
class of DDP, the name ``gloo`` for the decisions; the backend's own name comes after it.

Ranks are forked: a test then takes a fraction of a second instead of the five that it takes a
process to import torch. That asks for a parent without threads.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
import unittest
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

SECONDS_PER_TEST = 120


@dataclass(frozen=True)
class Verdict:
    test: str
    outcome: str  # passed, skipped, failed
    seconds: float
    detail: str


def load(backend: str, ddp: str, world: int, shim: bool) -> type[unittest.TestCase]:
    """The test case with all tests of the suite. Once per process: the suite is one module."""
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(world),
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",  # with fewer GPUs than ranks the suite skips everything
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(SECONDS_PER_TEST),
        GLOO_SOCKET_IFNAME=os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    )
    import torch
    import torch.distributed as dist
    import torch.nn.parallel.distributed as ddp_module
    from torch.testing._internal import common_distributed

    torch.set_num_threads(1)
    wrapper: Any = ddp_module.DistributedDataParallel
    if ddp == "dpcore":
        from dpcore import DataParallel

        wrapper = DataParallel
    cpu_only = None
    if shim:
        from tests.conformance import cpu_only

        cpu_only.open_gpu_tests(common_distributed)
        wrapper = cpu_only.without_devices(wrapper)
    # Every module that the suite takes the class from. torch's own isinstance checks keep theirs.
    for module in (torch.nn.parallel, ddp_module):
        module.DistributedDataParallel = wrapper

    from torch.testing._internal.distributed import distributed_test

    if backend != "gloo":
        import dpcore.comm.launch.torch_backend  # here once, instead of in every rank of every test
        from dpcore import _autoload

        _autoload.register()
        assert dpcore._C
        distributed_test.BACKEND = _InThePlaceOfGloo(backend)
        for supported in ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS"):
            getattr(distributed_test, supported).append(backend)
        dist.monitored_barrier = _monitored_barrier

    class Conformance(
        distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase
    ):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def run_test(self, test_name: str, parent_pipe: Any) -> None:
            with cpu_only.cuda_is_cpu() if cpu_only else contextlib.nullcontext():
                super().run_test(test_name, parent_pipe)

    return Conformance


class _InThePlaceOfGloo(str):
    """The name of a backend for which the suite takes the branches that it has for Gloo."""

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def names_of(case: type[unittest.TestCase]) -> list[str]:
    return unittest.defaultTestLoader.getTestCaseNames(case)  # type: ignore[return-value]


def run(case: type[unittest.TestCase], names: Sequence[str]) -> Iterator[Verdict]:
    for name in names:
        begin = time.monotonic()
        result = unittest.TestResult()
        with contextlib.redirect_stdout(io.StringIO()):
            case(name).run(result)
        problems = [text for _, text in result.failures + result.errors]
        skips = [reason for _, reason in result.skipped]
        outcome = "failed" if problems else "skipped" if skips else "passed"
        yield Verdict(name, outcome, time.monotonic() - begin, "\n".join(problems or skips))


def _monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
    """torch's function refuses every backend that is not called gloo; the method behind it asks
    the backend."""
    from datetime import timedelta

    import torch.distributed as dist

    if dist.distributed_c10d._rank_not_in_group(group):
        return None
    if timeout is None:
        timeout = dist.distributed_c10d.default_pg_timeout
    elif isinstance(timeout, float):
        timeout = timedelta(seconds=timeout)
    return (group or dist.group.WORLD).monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)
