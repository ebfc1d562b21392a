"""Puts gradients into buckets, in plain Python. The twin of csrc/reducer/plan/bucket_plan.

Gradients fill a bucket in the order in which they are expected, until it holds as many bytes as its
cap. One bucket per kind (dtype and device) is open at a time. Buckets are numbered in the order of
their last gradients, since a bucket can be sent when its last gradient is ready.
"""

from __future__ import annotations

from collections.abc import Sequence

ALIGNMENT = 64  # a gradient begins at a multiple of this within its bucket


def plan_buckets(
    sizes: Sequence[int], kinds: Sequence[int], order: Sequence[int], caps: Sequence[int]
) -> list[list[int]]:
    """The gradients of each bucket.

    ``caps``: bytes of the first bucket that is begun, of the second, ...; the last is for all
    further. A bucket that has reached its cap is closed, so the last gradient may exceed it.

    >>> plan_buckets([64, 64, 256, 64], [0, 0, 0, 1], order=[3, 2, 1, 0], caps=[64, 128])
    [[3], [2], [1, 0]]
    """
    open_buckets: dict[int, list[int]] = {}
    room: dict[int, int] = {}
    buckets: list[list[int]] = []
    for gradient in order:
        kind = kinds[gradient]
        if kind not in open_buckets:
            open_buckets[kind] = []
            room[kind] = caps[min(len(buckets), len(caps) - 1)]
            buckets.append(open_buckets[kind])
        open_buckets[kind].append(gradient)
        room[kind] -= sizes[gradient]
        if room[kind] <= 0:
            del open_buckets[kind]
    place = {gradient: at for at, gradient in enumerate(order)}
    return sorted(buckets, key=lambda bucket: place[bucket[-1]])
