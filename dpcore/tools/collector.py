"""Python's garbage collector, where many objects are made and nearly all of them stay or are freed
as soon as nobody refers to them: a trace that is read, a simulation that runs. The collector would
look through all of them again and again, and take longer than the work."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
