"""Checks of the exercise beside this file."""

import random

from dpcore.exercise.judging import Wrong, need

ALLOWED = ()


def cases():
    """(sizes, first cap, cap): small ones first, so that the first mistake is easy to see."""
    chosen = random.Random(1)
    found = [([8], 8, 8), ([8, 8], 8, 8), ([8, 8], 100, 100), ([8, 8, 8], 8, 16), ([8, 40], 8, 16)]
    found.append(([400, 40, 400, 40], 40, 400))
    for length in range(1, 60):
        sizes = [4 * chosen.choice((1, 2, 10, 100, 1000)) for _ in range(length)]
        found.append((sizes, chosen.choice((1, 64, 4096)), chosen.choice((64, 400, 8192, 1 << 20))))
    return found


def plans(on, student):
    made = [student.plan_buckets(list(sizes), first, cap) for sizes, first, cap in cases()]
    places = []
    for (sizes, _, _), plan in zip(cases(), made, strict=True):
        found = [student.offsets(list(sizes), list(bucket)) for bucket in plan]
        places.append([sorted(place.items()) for place in found])
    return {"plans": made, "places": places}


def plan_only(on, student):
    return [student.plan_buckets(list(sizes), first, cap) for sizes, first, cap in cases()]


def each_plan(lab):
    (found,) = lab.ranks("plan_only", 1)
    for (sizes, first, cap), plan in zip(cases(), found, strict=True):
        asked = f"plan_buckets({sizes}, {first}, {cap}) gives {plan}"
        if not (isinstance(plan, list) and all(isinstance(bucket, list) for bucket in plan)):
            raise Wrong(f"{asked}, which is not a list of lists")
        yield sizes, first, cap, plan, asked


def check_each_once(lab):
    """Every parameter is in one bucket, and no bucket is empty."""
    for sizes, _, _, plan, asked in each_plan(lab):
        members = [parameter for bucket in plan for parameter in bucket]
        missing = sorted(set(range(len(sizes))) - set(members))
        need(not missing, f"{asked}: parameter {missing and missing[0]} is missing")
        need(len(members) == len(sizes), f"{asked}: there are {len(members)} members")
        need(all(plan), f"{asked}: a bucket is empty")


def check_order(lab):
    """The plan goes from the last parameter to the first."""
    for _, _, _, plan, asked in each_plan(lab):
        members = [parameter for bucket in plan for parameter in bucket]
        need(members == sorted(members, reverse=True), asked)


def closing(lab, of_the_first):
    for sizes, first, cap, plan, asked in each_plan(lab):
        for number, bucket in enumerate(plan):
            if (number == 0) != of_the_first:
                continue
            limit = first if number == 0 else cap
            held = [sizes[parameter] for parameter in bucket]
            before = sum(held[:-1])
            need(
                before < limit,
                f"{asked}: bucket {number} held {before} bytes before its last member came, and "
                f"its cap is {limit}",
            )
            is_last = number == len(plan) - 1
            need(
                is_last or sum(held) >= limit,
                f"{asked}: bucket {number} was closed at {sum(held)} bytes, below its cap {limit}",
            )


def check_first_cap(lab):
    """The first bucket is closed by its own cap, as soon as that is reached and no sooner."""
    closing(lab, of_the_first=True)


def check_cap(lab):
    """The other buckets are closed as soon as they reach the other cap, and no sooner."""
    closing(lab, of_the_first=False)


def check_offsets(lab):
    """The members of a bucket lie one after the other, in its order and without gaps."""
    (found,) = lab.ranks("plans", 1)
    for (sizes, _, _), plan, places in zip(cases(), found["plans"], found["places"], strict=True):
        for bucket, place in zip(plan, places, strict=True):
            at, expected = 0, []
            for parameter in bucket:
                expected.append([parameter, at])
                at += sizes[parameter]
            need(
                place == sorted(expected),
                f"offsets({sizes}, {bucket}) gives {dict(place)}, and {dict(expected)} is right",
            )
