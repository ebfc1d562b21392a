"""Checks of the exercise beside this file."""

import random

from dpcore.school.exercise.judging import Wrong, need

ALLOWED = ()


def cases():
    """(sizes, first cap, cap): small ones first, so that the first mistake is easy to see."""
    chosen = random.Random(1)
    found = [([], 8, 8)]
    found += [([8], 8, 8), ([8, 8], 8, 8), ([8, 8], 100, 100), ([8, 8, 8], 8, 16), ([8, 40], 8, 16)]
    found.append(([400, 40, 400, 40], 40, 400))
    for length in range(1, 60):
        sizes = [4 * chosen.choice((1, 2, 10, 100, 1000)) for _ in range(length)]
        found.append((sizes, chosen.choice((1, 64, 4096)), chosen.choice((64, 400, 8192, 1 << 20))))
    return found


def buckets():
    """(sizes, bucket): of a right plan for the first, and then some more."""
    found = [([8, 40, 16], [2, 1]), ([8, 40, 16], [0]), ([400, 40, 4, 8], [3, 2, 1, 0])]
    chosen = random.Random(2)
    for length in range(2, 30):
        sizes = [4 * chosen.choice((1, 2, 10, 100, 1000)) for _ in range(length)]
        begin = chosen.randrange(1, length)
        found.append((sizes, list(range(begin, chosen.randrange(-1, begin), -1))))
    return found


def places(on, student):
    """What ``offsets`` gives for each of the buckets, and what is left of its arguments."""
    found = []
    for sizes, bucket in buckets():
        given = list(sizes), list(bucket)
        place = student.offsets(*given)
        is_one = isinstance(place, dict)
        found.append([sorted(place.items()) if is_one else f"{place}", *given])
    return found


def plans(on, student):
    """The plan of each case, and what is left of the sizes."""
    found = []
    for sizes, first, cap in cases():
        given = list(sizes)
        found.append([student.plan_buckets(given, first, cap), given])
    return found


def each_plan(lab):
    (found,) = lab.ranks("plans", 1)
    for (sizes, first, cap), (plan, _) in zip(cases(), found, strict=True):
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
    (found,) = lab.ranks("places", 1)
    for (sizes, bucket), (place, *_) in zip(buckets(), found, strict=True):
        at, expected = 0, {}
        for parameter in bucket:
            expected[parameter] = at
            at += sizes[parameter]
        asked = f"offsets({sizes}, {bucket}) gives"
        need(isinstance(place, list), f"{asked} {place}, which is not a dictionary")
        found = dict(map(tuple, place))
        need(found == expected, f"{asked} {found}, and {expected} is right")


def check_untouched(lab):
    """The lists that are handed over stay as they are."""
    (planned,), (placed,) = lab.ranks("plans", 1), lab.ranks("places", 1)
    for (sizes, *_), (_, left) in zip(cases(), planned, strict=True):
        need(left == sizes, f"plan_buckets() has made {left} of the sizes {sizes}")
    for given, (_, *left) in zip(buckets(), placed, strict=True):
        need(left == list(given), f"offsets() has made {left} of {list(given)}")
