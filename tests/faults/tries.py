"""Times are judged anew when the machine was busy; what was said and done is judged at once.

@three_tries
def test():
    assert outcome.error == "PeerLost"  # fails at once
    in_time(seconds < 1)  # fails when it was too late three times: what is truly late always is
"""

import functools

import pytest


class OutOfTime(AssertionError):
    """Something came late, or not in the order that the test is about."""


def in_time(well, text="too late"):
    if not well:
        raise OutOfTime(text)


def three_tries(test):
    @functools.wraps(test)
    def tried(*args, **kwargs):
        for _ in range(2):
            try:
                return test(*args, **kwargs)
            except OutOfTime as problem:
                print(f"once more: {problem}")
        return test(*args, **kwargs)

    return tried


def timed(test):
    """For a bound on a time that is measured: three tries, with nothing beside them."""
    return pytest.mark.alone(three_tries(test))
