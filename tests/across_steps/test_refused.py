"""What schedules across steps refuse when a model is wrapped, by name."""

import pytest
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

import dpcore
from tests.across_steps.own_schedules import Priority
from tests.across_steps.test_page import in_ranks


def test_whole_buckets_are_of_phases_that_gather_parameters():
    class Wrong(dpcore.LaunchSchedule):
        def whole_buckets(self):
            return 2

        def backward_end(self, control):
            control.wait_for_all()

    def body(comm):
        with pytest.raises(dpcore.Unsupported, match=r"whole_buckets\(\) is for the phases"):
            dpcore.DataParallel(nn.Linear(2, 2), comm=comm, schedule=Wrong())

    in_ranks(body)


@pytest.mark.parametrize("schedule", ["zero1", Priority()], ids=["named", "own"])
@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"gradient_as_bucket_view": False}, "gradient_as_bucket_view=False"),
        ({"mixed_precision": _MixedPrecision()}, "mixed_precision="),
        ({"sparse": True}, "sparse gradients"),
    ],
    ids=["views", "precision", "sparse"],
)
def test_what_these_schedules_lack_is_named_by_the_constructor(schedule, options, what):
    options = dict(options)
    module = nn.Embedding(3, 2, sparse=options.pop("sparse", False))
    name = schedule if isinstance(schedule, str) else "Priority"

    def body(comm):
        with pytest.raises(dpcore.Unsupported, match=f"'{name}' does not work with {what}"):
            dpcore.DataParallel(module, comm=comm, schedule=schedule, **options)

    in_ranks(body)


@pytest.mark.parametrize("name", ["sharded", "fsdp", "zero3"])
def test_names_of_what_is_not_there_name_what_is(name):
    with pytest.raises(dpcore.Unsupported, match=r"'zero1'.*fully_shard"):
        dpcore.DataParallel(nn.Linear(2, 2), schedule=name)
