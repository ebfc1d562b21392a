"""``dpcore.check``, as a stranger calls it, names what no step can tell, or not at once."""

import copy
import re

import pytest
import torch
from torch import nn

import dpcore
from tests.mistakes.here import Net, update
from tests.mistakes.judging import of
from tests.mistakes.museum import EXHIBITS
from tests.mistakes.running import over_dpcore


def after_steps(here, *, net=None, change=lambda model, optimizer, step: None, **options):
    model = here.wrap(Net() if net is None else net, **options)
    optimizer = here.optimizer(model, torch.optim.Adam, lr=0.01)
    for step in range(4):
        update(model, optimizer, here.batch(step))
        change(model, optimizer, step)
    return model, optimizer


def a_moving_average(here):
    model, optimizer = after_steps(here)
    average = copy.deepcopy(model.module)
    with torch.no_grad():
        average.features.bias[3] += here.rank
    yield
    dpcore.check(model, optimizer, average).raise_if_different()


def running_means(here):
    model, optimizer = after_steps(here, net=Net(buffers=True), broadcast_buffers=False)
    yield
    result = dpcore.check(model, optimizer)
    assert result.ok, str(result)
    assert any("norm.running_mean differs" in note for note in result.notes), result.notes


def one_number_of_many(here):
    class Wide(Net):
        def __init__(self):
            super().__init__()
            self.wide = nn.Linear(4, 2000, bias=False)

        def forward(self, x):
            return super().forward(x) + self.wide(x).mean(1, keepdim=True)

    def edit(model, optimizer, step):
        if step == 3 and here.rank == 1:
            with torch.no_grad():
                model.module.wide.weight[1234, 2] += 1

    model, optimizer = after_steps(here, net=Wide(), change=edit)
    yield
    dpcore.check(model, optimizer).raise_if_different()


def a_state_of_one_rank(here):
    def forget(model, optimizer, step):
        if step == 3 and here.rank == 1:
            optimizer.state[model.module.head.weight]["exp_avg"].zero_()

    model, optimizer = after_steps(here, change=forget)
    yield
    dpcore.check(model, optimizer).raise_if_different()


def a_rate_of_one_rank(here):
    def lower(model, optimizer, step):
        if step == 3 and here.rank == 1:
            optimizer.param_groups[0]["lr"] = 0.005

    model, optimizer = after_steps(here, change=lower)
    yield
    dpcore.check(model, optimizer).raise_if_different()


FOUND = {
    a_moving_average: (r"features\.bias", r"1 of 8"),
    one_number_of_many: (r"wide\.weight", r"1 of 8000"),
    a_state_of_one_rank: (r"head\.weight", r"exp_avg"),
    a_rate_of_one_rank: (r"\blr\b", r"0\.005"),
}


@pytest.fixture(scope="module")
def told():
    return over_dpcore({program.__name__: program for program in FOUND}, mistakes="ignore")


@pytest.mark.parametrize("program", FOUND, ids=lambda program: program.__name__)
def test_the_first_difference_is_named(told, program):
    errors = of(told[program.__name__], "raise")
    assert [error.kind for error in errors] == ["Mismatch", "Mismatch"]
    for words in (r"rank [01]", *FOUND[program]):
        assert re.search(words, errors[0].text), words


def checked_at_the_end(program):
    def run(here):
        yield from program(here)
        result = dpcore.check(*here.models)
        assert result.ok, str(result)

    return run


def test_running_means_are_a_note():
    """Right programs keep their own, with ``broadcast_buffers=False``."""
    (heard,) = over_dpcore({"running_means": running_means}).values()
    assert not of(heard, "raise", "warn")


def test_ranks_are_equal_after_what_is_only_wasteful():
    """Mistakes that leave the ranks equal leave nothing for a check to find."""
    names = ("set_epoch_forgotten", "clipping_before_averaging", "no_sync_around_backward")
    programs = {name: checked_at_the_end(EXHIBITS[name].program) for name in names}
    for name, heard in over_dpcore(programs).items():
        assert not of(heard, "raise", "warn"), name


def the_same_dropout(here):
    torch.manual_seed(0)
    model, _ = after_steps(here, net=Net(dropout=0.5))
    yield
    assert any(re.search("torch's.* the same", note) for note in dpcore.check(model).notes)


def test_the_same_random_numbers_are_a_note():
    (heard,) = over_dpcore({"the_same_dropout": the_same_dropout}).values()
    assert not of(heard, "raise", "warn")
