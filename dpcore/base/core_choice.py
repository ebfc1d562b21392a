"""Finds the compiled core for the installed torch, or says what to do if there is none.

A core is compiled against one minor version of torch and one of Python, which its path names:
``_cores/torch2_13/_C.cpython-311-x86_64-linux-gnu.so``. A wheel has one per version of torch, a
checkout has those that were built in it, and the platform-independent wheel has none.
"""

from __future__ import annotations

import importlib.machinery
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "_cores"
_WITHOUT = "dpcore show, dpcore simulate and dpcore.reference work without it"
_BUILD = (
    "build a core for the torch that is installed, in a clone of the repository and with a C++20 "
    "compiler: pip install --force-reinstall --no-deps . (or make build, which has an environment "
    "of its own)"
)


class NoCore(ImportError):
    """There is no compiled core that can be loaded here. The message says what to do."""


def hidden_by(package: Path = FOLDER.parent) -> Path | None:
    """An installed dpcore with a core, hidden by this one, which has none and comes first on the
    path. This happens if ``python -m dpcore`` runs in a clone of the repository."""
    for entry in sys.path:
        other = Path(entry or ".").resolve() / package.name
        if other != package.resolve() and cores(other / "_cores"):
            return other
    return None


def cores(folder: Path = FOLDER) -> dict[tuple[int, int], Path]:
    """The cores for this Python, by the version of torch that they were compiled against."""
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    found = {}
    for path in folder.glob(f"torch*/_C{suffix}"):
        match = re.fullmatch(r"torch(\d+)_(\d+)", path.parent.name)
        if match:
            found[int(match[1]), int(match[2])] = path
    return dict(sorted(found.items()))


def fitting(torch_version: str, folder: Path = FOLDER) -> Path:
    """The core for a version of torch such as "2.13.0+cpu"."""
    known = cores(folder)
    match = re.match(r"(\d+)\.(\d+)", torch_version)
    path = known.get((int(match[1]), int(match[2]))) if match else None
    if path is None:
        raise NoCore(why_none_fits(torch_version, list(known)))
    return path


def why_none_fits(torch_version: str, known: list[tuple[int, int]]) -> str:
    """The message if no core fits: the installed versions, the cores, and the commands to type."""
    found = f"torch {torch_version} is installed for {_python()}"
    if not known and (hidden := hidden_by()):
        return (
            f"{FOLDER.parent} was imported, which has no compiled core, and hides {hidden}, which "
            "has one: type `dpcore` instead of `python -m dpcore` (and `pytest` instead of "
            "`python -m pytest`), or do it in another folder"
        )
    if not known:
        return f"{found}, but {_has_none()}. To get one, {_BUILD}. {_WITHOUT}."
    return (
        f"{found}, but dpcore's compiled core is there for torch {_listed(known)} only. Install "
        f"one of these ({how_to_install_torch(known)}), or {_BUILD}. {_WITHOUT}."
    )


def without_torch(folder: Path = FOLDER) -> str:
    """The message if torch is not installed."""
    known = list(cores(folder))
    if not known:
        return (
            f"dpcore's compiled core needs torch, which is not installed for {_python()}, and "
            f"{_has_none()}. With torch 2.11 or newer there, {_BUILD}. {_WITHOUT}."
        )
    return (
        f"dpcore's compiled core needs torch {_listed(known)}, which is not installed for "
        f"{_python()}: {how_to_install_torch(known)} (without a GPU, torch's CPU build is a tenth "
        f"of the size: torch's installation page says how to get it). {_WITHOUT}."
    )


def how_to_install_torch(known: list[tuple[int, int]] | None = None) -> str:
    """The command that installs the newest version of torch for which there is a core."""
    known = list(cores()) if known is None else known
    return "pip install torch" + ("~={}.{}.0".format(*known[-1]) if known else "")


def _listed(known: list[tuple[int, int]]) -> str:
    names = [f"{major}.{minor}" for major, minor in known]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _python() -> str:
    return f"Python {sys.version_info[0]}.{sys.version_info[1]} ({sys.executable})"


def _has_none() -> str:
    return "this installation of dpcore has no core for this system and version of Python"
