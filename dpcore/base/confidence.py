"""Confidence intervals: of a median, and of a ratio of two sums over steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

# Student's t at 97.5% for 1 to 19 degrees of freedom.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093),
)
_BLOCKS = len(_T) + 1


def median_interval(values: Sequence[float], doubt: float) -> tuple[float, float]:
    """An interval outside which the median of the values' distribution lies with at most the
    probability ``doubt``: the median is below the k-th smallest value only if fewer than k values
    fell below it. For fewer than ``least_values(doubt)`` values the interval is their whole range,
    which may be wrong with a greater probability.

    >>> median_interval(range(1, 11), 0.05)
    (2, 9)
    """
    ordered = sorted(values)
    count = len(ordered)
    # In integers: of the 2^count ways in which values fall below or above the median, the number
    # of those with at most ``outside`` values below.
    at_most = Fraction(doubt) * 2**count
    outside, ways = 0, 1
    of_these = ways
    while 2 * of_these <= at_most:
        ways = ways * (count - outside) // (outside + 1)
        outside += 1
        of_these += ways
    at = max(outside - 1, 0)
    return ordered[at], ordered[-1 - at]


def least_values(doubt: float) -> int:
    """The fewest values whose range misses the median with at most this probability. The range of
    n values misses it with a probability of 2 / 2^n.

    >>> least_values(0.05)
    6
    """
    return math.ceil(1 - math.log2(doubt))


def ratio_interval(above: Sequence[float], below: Sequence[float]) -> tuple[float, float]:
    """The 95% confidence interval of the ratio of two expected values that cannot be negative
    (Fieller's theorem). It has no upper end if ``below`` may be zero.

    Neighbouring steps are not independent, so the values are first averaged into at most twenty
    blocks.

    >>> [round(end, 2) for end in ratio_interval([9.0, 11.0, 10.0], [1.0, 1.0, 1.0])]
    [7.52, 12.48]
    """
    count = min(len(above), _BLOCKS)
    if count < 2:
        return 0.0, math.inf
    cuts = [len(above) * block // count for block in range(count + 1)]
    a, b = ([statistics.fmean(values[i:j]) for i, j in pairwise(cuts)] for values in (above, below))
    mean_a, mean_b = statistics.fmean(a), statistics.fmean(b)
    factor = _T[count - 2] ** 2 / count
    spread_a, spread_b = factor * statistics.variance(a), factor * statistics.variance(b)
    shared = factor * statistics.covariance(a, b)
    # The ratios r for which mean_a - r * mean_b is less than t standard errors from zero:
    # square * r^2 - 2 * linear * r + constant <= 0.
    square = mean_b**2 - spread_b
    linear = mean_a * mean_b - shared
    constant = mean_a**2 - spread_a
    root = math.sqrt(max(linear**2 - square * constant, 0.0))
    if square > 0 and mean_b > 0:
        return max(0.0, (linear - root) / square), max(0.0, (linear + root) / square)
    if square < 0 < constant:
        return (linear - root) / square, math.inf
    return 0.0, math.inf
