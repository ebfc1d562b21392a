"""Ranks as threads on devices of the host, over a stand-in for NCCL that the tests steer."""

import ctypes
import os

import pytest

from tests.cpp.programs import STAND_IN, built


@pytest.fixture(scope="session")
def stand_in():
    """The library, steered through ctypes. This process uses it from here on."""
    built(STAND_IN.name)
    before = os.environ.get("DPCORE_NCCL_LIBRARY")
    os.environ["DPCORE_NCCL_LIBRARY"] = str(STAND_IN)
    from dpcore.comm.communicators.nccl import nccl_library

    assert nccl_library()["path"] == str(STAND_IN)
    if before is None:
        del os.environ["DPCORE_NCCL_LIBRARY"]
    library = ctypes.CDLL(str(STAND_IN))
    library.fake_nccl_log.restype = ctypes.c_char_p
    return library


@pytest.fixture
def fake(stand_in):
    """The same, with everything as it was."""
    stand_in.fake_nccl_reset()
    yield stand_in
    stand_in.fake_nccl_reset()
