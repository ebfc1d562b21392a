"""``file.py:NAME``: loads code that a user names, such as a model or a launch schedule."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from dpcore.errors import Error, Unsupported

_loading = threading.RLock()  # ranks may be threads that load the same file
_DPCORE = str(Path(__file__).parents[1])


def names_code(text: str) -> bool:
    """Whether a text names code in a file or module, rather than something of dpcore's."""
    return ":" in text or text.endswith(".py")


def names_plan(text: str) -> bool:
    """Whether a text names a file with an algorithm of MSCCLang or mscclpp."""
    return text.endswith((".xml", ".json"))


def is_own(algorithm: Any) -> bool:
    """Whether it is code, a plan or a schedule, rather than the name of an algorithm of dpcore's.

    >>> is_own("mine.py:swing"), is_own("plan.xml"), is_own("ring"), is_own("ring/moves")
    (True, True, False, False)
    >>> is_own(None)
    False
    """
    if isinstance(algorithm, str):
        return names_code(algorithm) or names_plan(algorithm)
    return algorithm is not None


def without_folders(name: str) -> str:
    """For tables: code and plans by the name of their file; a name of dpcore's as it is.

    >>> without_folders("examples/swing.py:swing"), without_folders("ring/moves")
    ('swing.py:swing', 'ring/moves')
    """
    return name.rpartition("/")[2] if is_own(name) else name


def place_of(text: str) -> str:
    """The file or module in the text."""
    return text.rpartition(":")[0] if ":" in text else text


def source_of(text: str) -> Path | None:
    """The file of the code, without running it; None if there is none."""
    place = place_of(text)
    if place.endswith(".py"):
        return Path(place)
    _find_beside(Path.cwd())
    try:
        spec = importlib.util.find_spec(place)
    except ImportError:
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None


def check_file(text: str) -> None:
    """Raises if the file is missing, without running it."""
    place = place_of(text)
    if place.endswith(".py") and not Path(place).is_file():
        raise Unsupported(f"there is no file {place}")


def loaded(text: str, usual: str) -> Any:
    """The object named by ``file.py:object`` or ``module:object``; ``usual`` is the default."""
    place = place_of(text)
    wanted = text.rpartition(":")[2] if ":" in text else usual
    with _loading:
        module = _module(place)
    if not hasattr(module, wanted):
        found = [n for n, value in vars(module).items() if callable(value) and n[:1] != "_"]
        raise Unsupported(
            f"{place} has no {wanted!r}"
            + (f"; it has {', '.join(found[-8:])}" if found else "; it defines nothing to call")
        )
    return getattr(module, wanted)


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        _find_beside(Path.cwd())
        if not all(map(str.isidentifier, place.split("."))):
            raise Unsupported(f"{place!r} is neither a module nor a file that ends with .py")
        try:
            with naming_the_line(place):
                return importlib.import_module(place)
        except ModuleNotFoundError as problem:
            if problem.name is None or not place.startswith(problem.name):
                raise
            raise Unsupported(f"there is no module {place!r} and no file {place}.py") from None
    check_file(place)
    path = Path(place).resolve()
    name = f"dpcore_own_{path.stem}"
    if name in sys.modules and sys.modules[name].__file__ == str(path):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look there
    _find_beside(path.parent)
    try:
        with naming_the_line(place):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def naming_the_line(what: str) -> Iterator[None]:
    """Turns an exception of the user's code into one line with file and line number. Errors of
    dpcore and missing modules pass unchanged."""
    try:
        yield
    except (Error, ModuleNotFoundError):
        raise
    except (Exception, SystemExit) as problem:
        raise Unsupported(f"{what}: {_place_of(problem)}{_said_by(problem)}") from problem


def _place_of(problem: BaseException) -> str:
    """File and line of the innermost call outside dpcore."""
    if isinstance(problem, SyntaxError) and problem.filename:
        return f"{Path(problem.filename).name}:{problem.lineno}: "
    frames = traceback.extract_tb(problem.__traceback__)
    own = [f for f in frames if not f.filename.startswith((_DPCORE, "<frozen"))]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}: " if own else ""


def _said_by(problem: BaseException) -> str:
    said = problem.msg if isinstance(problem, SyntaxError) else str(problem)
    return f"{type(problem).__name__}: {said}" if said else type(problem).__name__


def _find_beside(folder: Path) -> None:
    """Lets imports find modules in the folder, as they do for a script there."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
