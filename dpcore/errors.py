"""What can go wrong. Plain Python: importing this loads nothing.

Every message names the rank that raises, the rank at fault, the operation and its number, and
what to do. After any of these (but ``Unsupported``, which is raised before anything happens) the
communicator is broken: later calls raise the same error again. ``dpcore.finalize()`` and
``dpcore.init()`` make a new one.
"""

from __future__ import annotations

import sys


class Error(RuntimeError):
    """Base class of everything that dpcore raises on its own."""


class PeerLost(Error, ConnectionError):
    """A rank died, left, was interrupted, or gave up with an error of its own."""


class Timeout(Error, TimeoutError):
    """A rank is alive, as far as can be seen, but did not come before the deadline."""


class Mismatch(Error):
    """Ranks called different operations, or one operation with different arguments."""


class RendezvousError(Error):
    """The ranks did not find each other."""


class Unsupported(Error, ValueError):
    """The request has no meaning, or no implementation here. Nothing was sent."""


class MistakeWarning(UserWarning):
    """A mistake with data parallel training that no error would show, such as gradients that were
    never averaged. ``DataParallel(mistakes=...)`` says how mistakes are told."""


def on_its_way() -> str:
    """The exception because of which a ``finally`` runs, such as "ValueError: bad batch", or ""."""
    problem = sys.exc_info()[1]
    ends_well = isinstance(problem, SystemExit) and not problem.code
    if problem is None or ends_well or isinstance(problem, (StopIteration, GeneratorExit)):
        return ""
    return f"{type(problem).__name__}: {problem}"


def error_of(failure: tuple[str, str]) -> Error:
    """The exception of a failure: (name of the class, message)."""
    error: Error = globals()[failure[0]](failure[1])
    return error


def raise_unheard(failure: tuple[str, str] | None) -> None:
    """Raises a failure that ends with its communicator: (name of the class, message).

    An exception that is being handled is the more important one: it gets a note instead.
    """
    if failure is None:
        return
    first = sys.exc_info()[1]
    if first is None:
        raise error_of(failure)
    if hasattr(first, "add_note"):  # Python 3.11
        first.add_note(f"(closing the communicator: {failure[0]}: {failure[1]})")
