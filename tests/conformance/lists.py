"""Which tests pass with Gloo and torch's DDP, and where dpcore is known to differ.

``expected/world<N>.txt`` and ``expected/world<N>_shim.txt`` are written by a control run
(``--backend gloo --all --write``). The latter holds what passes only with the shim.
``expected/differences.txt`` has a line "part test reason" for each known difference; the part is
"backend" or "ddp": whether dpcore's backend differs, or dpcore's class of DDP.
"""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent / "expected"


def list_file(world: int, shim: bool) -> Path:
    return _FOLDER / f"world{world}{'_shim' if shim else ''}.txt"


def expected(world: int, shim: bool) -> set[str]:
    """Empty for a world that no control run was made for."""
    file = list_file(world, shim)
    return set(file.read_text().split()) if file.exists() else set()


def differences(backend: str, ddp: str) -> dict[str, str]:
    """Test and reason, for the parts of dpcore that take part."""
    parts = {"backend": backend, "ddp": ddp}
    rows = (line.split(maxsplit=2) for line in _lines(_FOLDER / "differences.txt"))
    return {test: reason for part, test, reason in rows if parts[part] == "dpcore"}


def _lines(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
