"""The digests of the handshake against Python's own."""

import hashlib
import hmac
import random

import pytest

import dpcore

SIZES = (0, 1, 31, 32, 55, 56, 63, 64, 65, 119, 120, 127, 128, 129, 1000)


@pytest.mark.parametrize("key_size", SIZES)
def test_hmac_is_that_of_the_standard_library(key_size):
    dice = random.Random(key_size)
    for size in SIZES:
        key, message = dice.randbytes(key_size), dice.randbytes(size)
        expected = hmac.new(key, message, hashlib.sha256).digest()
        assert dpcore._C.hmac_sha256(key, message) == expected
