"""The plan of buckets: the C++ one is its twin in plain Python, and both keep what they promise."""

import pytest
import torch
import torch.distributed
from hypothesis import given, settings
from hypothesis import strategies as st

import dpcore
from dpcore.reference.buckets import plan_buckets

MIB = 1 << 20
untimed = settings(deadline=None)  # the machine may be busy with something else


@st.composite
def models(draw):
    sizes = draw(st.lists(st.integers(0, 5000), min_size=1, max_size=40))
    kinds = [draw(st.integers(0, 2)) for _ in sizes]
    order = draw(st.permutations(range(len(sizes))))
    order = order[: draw(st.integers(0, len(order)))]
    caps = draw(st.lists(st.integers(0, 20000), min_size=1, max_size=4))
    return sizes, kinds, list(order), caps


@untimed
@given(models())
def test_twins_are_equal(model):
    assert dpcore._C.plan_buckets(*model) == plan_buckets(*model)


@untimed
@given(models())
def test_every_gradient_of_the_order_is_in_one_bucket(model):
    _, _, order, _ = model
    plan = plan_buckets(*model)
    assert sorted(gradient for bucket in plan for gradient in bucket) == sorted(order)
    assert all(plan)


@untimed
@given(models())
def test_buckets_keep_kinds_apart_and_follow_the_order(model):
    sizes, kinds, order, caps = model
    place = {gradient: at for at, gradient in enumerate(order)}
    plan = plan_buckets(*model)
    for bucket in plan:
        assert len({kinds[gradient] for gradient in bucket}) == 1
        assert bucket == sorted(bucket, key=place.get)
        if len(bucket) > 1:  # it was still open when its last gradient came
            assert sum(sizes[gradient] for gradient in bucket[:-1]) < max(caps)
    ends = [place[bucket[-1]] for bucket in plan]
    assert ends == sorted(ends)


def test_a_bucket_closes_once_it_has_reached_its_cap():
    sizes = [4 * MIB] * 10
    plan = plan_buckets(sizes, [0] * 10, list(range(10)), [4 * MIB, 25 * MIB])
    assert [len(bucket) for bucket in plan] == [1, 7, 2]


def test_a_bias_travels_with_its_weight():
    sizes = [2048, MIB] * 12
    plan = plan_buckets(sizes, [0] * 24, list(range(24)), [MIB])
    assert plan == [[layer, layer + 1] for layer in range(0, 24, 2)]


@untimed
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40), st.integers(1, 20000))
def test_torch_cuts_at_the_same_places(elements, cap):
    tensors = [torch.empty(count) for count in elements]
    plan, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, [cap])
    sizes = [tensor.nbytes for tensor in tensors]
    assert plan == plan_buckets(sizes, [0] * len(sizes), range(len(sizes)), [cap])


def test_a_cap_of_zero_gives_every_gradient_its_bucket():
    assert plan_buckets([8, 8, 64], [0, 0, 0], [2, 1, 0], [0]) == [[2], [1], [0]]


def test_wrong_arguments_are_refused():
    with pytest.raises(IndexError, match="gradient 5"):
        dpcore._C.plan_buckets([1], [0], [5], [1])
    with pytest.raises(ValueError, match="at least one cap"):
        dpcore._C.plan_buckets([1], [0], [0], [])
