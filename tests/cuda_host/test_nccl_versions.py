"""What depends on the version of NCCL, over a stand-in that says it has another one. Each case in
processes of its own, since a process keeps the library that it found first."""

import os
import shutil

import pytest
import torch.distributed as dist

import dpcore
from dpcore import _C
from tests.cpp.programs import STAND_IN
from tests.cuda_host.test_nccl_library import answer, started

pytestmark = pytest.mark.usefixtures("stand_in")

LOADED_WITH_TORCH = pytest.mark.skipif(
    dist.is_nccl_available(), reason="this torch has loaded an NCCL of its own"
)

# Ranks that are threads; what they raise, or what the library was called with.
RANKS = """
import ctypes, json, os
import torch, dpcore
from tests.ranks.devices import calls, on_devices
def body(comm):
    x = torch.full((4,), comm.rank + 1.0)
    comm.all_reduce(x)
    model = dpcore.DataParallel(torch.nn.Linear(4, 2), comm=comm)
    model(torch.ones(1, 4)).sum().backward()
    return x[0].item()
fake = ctypes.CDLL(os.environ["DPCORE_NCCL_LIBRARY"])
fake.fake_nccl_log.restype = ctypes.c_char_p
try:
    found = {"results": on_devices(body, 2, timeout=10.0, **SETTINGS)}
except dpcore.Error as error:
    found = {"error": type(error).__name__ + ": " + str(error)}
print(json.dumps(found | {"calls": calls(fake)}))
"""


def of_ranks(version, library=STAND_IN, environment=None, **settings):
    code = f"SETTINGS = {settings!r}\n{RANKS}"
    told = {"DPCORE_NCCL_LIBRARY": str(library), "FAKE_NCCL_VERSION": str(version)}
    told |= {"NCCL_MULTI_RANK_GPU_ENABLE": "", **(environment or {})}
    return answer(code, **told)


# ---- which are taken -------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "version"), [(2804, "2.8.4"), (21399, "2.13.99")])
def test_one_that_is_too_old_is_refused(number, version):
    found = answer(DPCORE_NCCL_LIBRARY=str(STAND_IN), FAKE_NCCL_VERSION=str(number))
    assert found["path"] is None
    assert f"{STAND_IN} (DPCORE_NCCL_LIBRARY): it is NCCL {version}," in found["problem"]
    assert "and 2.14.0 or newer is needed" in found["problem"]


@pytest.mark.parametrize(("number", "version"), [(21400, "2.14.0"), (23003, "2.30.3")])
def test_the_oldest_and_a_newer_one_are_taken(number, version):
    found = answer(DPCORE_NCCL_LIBRARY=str(STAND_IN), FAKE_NCCL_VERSION=str(number))
    assert (found["version"], found["problem"]) == (version, "")


@LOADED_WITH_TORCH
def test_the_systems_is_found_last(tmp_path):
    """Where there is no wheel, and one before it that is too old is passed by."""
    for name in ("system", "wheel"):
        (tmp_path / name).mkdir()
        shutil.copy(STAND_IN, tmp_path / name / "libnccl.so.2")
    code = "import json, torch; from dpcore import _C; print(json.dumps(_C.nccl_library(WHEELS)))"
    place = {"LD_LIBRARY_PATH": str(tmp_path / "system")}
    found = answer(code.replace("WHEELS", "[]"), run=started, **place)
    assert found["found_by"] == "the system"
    assert found["path"] == str(tmp_path / "system" / "libnccl.so.2")
    with_wheel = code.replace("WHEELS", repr([str(tmp_path / "wheel" / "libnccl.so.2")]))
    assert answer(with_wheel, run=started, **place)["found_by"] == "a wheel of NCCL"
    missing = code.replace("WHEELS", repr([str(tmp_path / "nowhere" / "libnccl.so.2")]))
    assert answer(missing, run=started, **place)["found_by"] == "the system"


# ---- what ranks say to each other ------------------------------------------------------------


def with_versions(control, versions):
    os.environ["DPCORE_NCCL_LIBRARY"] = str(STAND_IN)
    os.environ["FAKE_NCCL_VERSION"] = versions[control.rank]
    try:
        uuid = f"gpu {control.rank}"
        _C.start_on_device(control._native, "host", 10.0, "auto", False, [], "nccl", uuid)
    except dpcore.Error as error:
        return type(error), str(error)
    return None


def test_ranks_with_different_versions_are_named():
    results = dpcore.spawn(with_versions, 3, ["22703", "22703", "23003"], timeout=30.0)
    for rank, (kind, text) in enumerate(results):
        assert kind is dpcore.RendezvousError
        assert "rank 0 found NCCL 2.27.3, rank 2 found 2.30.3" in text
        assert "set DPCORE_NCCL_LIBRARY to the same on all ranks" in text
        version = "2.30.3" if rank == 2 else "2.27.3"
        assert f"this is rank {rank} with NCCL {version} ({STAND_IN})" in text


ALLOWED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}


@pytest.mark.parametrize(
    ("version", "environment"), [(23003, {}), (23002, ALLOWED), (22703, ALLOWED)]
)
def test_two_ranks_on_one_gpu_are_refused(version, environment):
    error = of_ranks(version, environment=environment, uuids=["a", "a"])["error"]
    number = f"{version // 10000}.{version % 10000 // 100}.{version % 100}"
    assert error.startswith("Unsupported: ranks 0 and 1 are on one GPU")
    assert f"which NCCL {number} ({STAND_IN}) refuses" in error
    assert "use NCCL 2.30.3 or newer with NCCL_MULTI_RANK_GPU_ENABLE=1" in error


def test_two_ranks_on_one_gpu_are_taken_from_2_30_3_on():
    found = of_ranks(23003, environment=ALLOWED, uuids=["a", "a"])
    assert found["results"] == [3.0, 3.0]


# ---- what they are asked for -----------------------------------------------------------------


@pytest.mark.parametrize(("version", "told"), [(22305, "Tree"), (22400, "Ring;allreduce:Tree")])
def test_how_a_tree_is_asked_for(version, told):
    found = of_ranks(version, algorithm="tree")
    assert found["results"] == [3.0, 3.0]
    assert f"CommInitRankConfig 2 {told}" in found["calls"]


def without(name, tmp_path):
    """The stand-in with another name in the place of one of its functions."""
    old, new = f"\0{name}\0".encode(), f"\0{name[:-1]}_\0".encode()
    code = STAND_IN.read_bytes()
    assert old in code
    path = tmp_path / "libnccl.so.2"
    path.write_bytes(code.replace(old, new))
    return path


def test_a_library_that_registers_no_memory(tmp_path):
    """Before 2.19: memory is used as it is."""
    found = of_ranks(21805, library=without("ncclCommRegister", tmp_path))
    assert found["results"] == [3.0, 3.0]
    assert not [call for call in found["calls"] if "Register" in call]
    assert [call for call in of_ranks(22703)["calls"] if call.startswith("CommRegister")]


def test_a_library_that_lacks_what_is_needed(tmp_path):
    library = without("ncclCommFinalize", tmp_path)
    found = answer(DPCORE_NCCL_LIBRARY=str(library))
    assert found["problem"].startswith("NCCL was not found")
    assert f"{library} (DPCORE_NCCL_LIBRARY): it lacks ncclCommFinalize" in found["problem"]
