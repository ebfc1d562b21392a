"""``gradient_noise_scale``: what it cannot measure, which it says while training goes on."""

import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import dpcore as dp
from tests.data_parallel.test_noise_scale import Mean, in_a_world_of_one, one_step


def test_one_gradient_is_not_enough():
    def body(comm):
        model = dp.DataParallel(Mean(10), comm=comm)
        with (
            pytest.warns(
                UserWarning, match=r"world of one.*no_sync\(\), or train on several ranks"
            ),
            dp.gradient_noise_scale(model) as g,
        ):
            one_step(model)
            one_step(model)  # as if nothing had been
        assert math.isnan(g.value) and "in a world of one" in repr(g)

    in_a_world_of_one(body)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"window": 0}, "window=0: it must be a whole number"),
        ({"every": None}, "every=None"),
        ({"batch_size": 2.5}, r"batch_size=2\.5"),
    ],
)
def test_numbers_that_make_no_sense(options, message):
    def body(comm):
        with pytest.raises(dp.Unsupported, match=message):
            dp.gradient_noise_scale(dp.DataParallel(Mean(10), comm=comm), **options)

    in_a_world_of_one(body)


def test_models_that_it_cannot_measure():
    def body(comm):
        with pytest.raises(TypeError, match=r"a dpcore\.DataParallel is needed, not a Linear"):
            dp.gradient_noise_scale(nn.Linear(2, 2))
        with pytest.raises(TypeError, match=r"a dpcore\.DataParallel is needed, not a NoneType"):
            dp.gradient_noise_scale(None)
        words = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))
        for module, schedule, why in (
            (Mean(10), "oracle", "schedule='oracle' averages nothing"),
            (words, "bucketed", r"the gradient of 0\.weight is sparse"),
        ):
            model = dp.DataParallel(module, comm=comm, schedule=schedule)
            with pytest.warns(UserWarning, match=why), dp.gradient_noise_scale(model) as g:
                pass
            assert all(map(math.isnan, (g.value, *g.interval)))

    in_a_world_of_one(body)


def test_uses_that_would_give_wrong_numbers():
    def body(comm):
        model = dp.DataParallel(Mean(10), comm=comm)
        with dp.gradient_noise_scale(model, every=1) as g:
            assert repr(g) == "gradient noise scale: no step was measured yet"
            with pytest.raises(dp.Error, match="no step was measured yet; run forward"):
                _ = g.value
            with (
                pytest.raises(dp.Error, match="is being measured already"),
                dp.gradient_noise_scale(model),
            ):
                pass
            with pytest.raises(dp.Error, match="in use already"), g:
                pass
            one_step(model)
            model.zero_grad(set_to_none=False)
            one_step(model)
            assert g.steps == 2
            one_step(model)
            assert "last step are still there" in repr(g) and g.steps == 2
        model.zero_grad()
        with model.join(), g:
            one_step(model)
        assert "within join()" in repr(g)
        model.zero_grad()
        with dp.gradient_noise_scale(model) as g:
            one_step(model)
        assert g.steps == 1

    dp.spawn(body, 2, mode="threads")


def test_inputs_without_a_batch():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, factor):
            return (factor * self.weight).sum()

    def body(comm):
        model = dp.DataParallel(Constant(), comm=comm)
        with dp.gradient_noise_scale(model) as g:
            model(2.0).backward()
        assert "many samples a forward takes on a rank, batch_size=32" in repr(g)
        model.zero_grad()
        with dp.gradient_noise_scale(model, batch_size=8) as g:
            model(1.0 + comm.rank).backward()
        noise = 3 * 0.25 / (1 / 8 - 1 / 16)
        assert g.value == pytest.approx(noise / (3 * 1.5**2 - noise / 16))

    dp.spawn(body, 2, mode="threads")


def test_a_rank_that_does_not_measure_is_an_error_of_all():
    def body(comm):
        model = dp.DataParallel(Mean(10), comm=comm)
        with dp.gradient_noise_scale(model) if comm.rank == 0 else nullcontext():
            for _ in range(2):
                model.zero_grad()
                one_step(model)

    with pytest.raises(dp.Mismatch, match=r"gradient_noise_scale|all_reduce"):
        dp.spawn(body, 2, mode="threads")
