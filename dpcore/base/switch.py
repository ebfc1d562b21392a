"""Variables of the environment that turn something on or off.

Anything but 0 and 1 is an error, so that a word such as "no" does not quietly leave on what it was
meant to turn off.
"""

import os

from dpcore.errors import Unsupported


def is_on(name: str) -> bool:
    """Whether the variable is 1. Not set, empty and 0 mean that it is off."""
    said = os.environ.get(name, "")
    if said not in ("", "0", "1"):
        raise Unsupported(f"{name}={said}: use 0 or 1")
    return said == "1"
