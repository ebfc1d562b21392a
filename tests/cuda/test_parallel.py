"""torch's own ways to share a model that is on GPUs: the CPU's body, with tensors made there."""

from functools import partial

import pytest
import torch

from benchmarks.harness.torch_strategies import STRATEGIES
from tests.cuda.test_torch_backend import made_there, on_gpus
from tests.torch_backend.test_parallel import assert_each_has_compared_everything, check_each

# Up to torch 2.12 the rank that holds both stages of a V sends itself a message, which dpcore, like
# Gloo, refuses.
SENDS_TO_ITSELF = {"ZBVZeroBubble", "DualPipeV"} if torch.__version__ < "2.13" else set()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("world", [2, 4])
def test_each_is_one_process(world, tmp_path):
    names = [name for name in STRATEGIES if name not in SENDS_TO_ITSELF]
    body = made_there(partial(check_each, names))
    assert_each_has_compared_everything(on_gpus(body, world, tmp_path))
