"""Which source files the compiler reads together, as one unit.

The compiler reads the headers of torch and of pybind11 for 5 to 20 seconds, and most of our files
for far less. So it takes the files of a folder as one: a unit is a generated file of ``#include``
lines in ``build/units``. This asks one thing of the sources: a name in an anonymous namespace
occurs only once in a unit (docs/decisions/0052-files-compiled-together.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

# Units, and what they are made of: files, or folders with all that is below them. The first that
# fits wins. A source that is not in the table is compiled with its folder.
UNITS: dict[str, tuple[str, ...]] = {
    # torch's Python headers, which take the longest to read, are in this unit alone.
    "bindings_torch": (
        "bindings/buckets",
        "bindings/buffer.cpp",
        "bindings/callbacks/python_bucket_communicator.cpp",
        "bindings/module.cpp",
        "bindings/reducer.cpp",
        "bindings/torch_backend.cpp",
        "tensors/tensor_memory.cpp",
    ),
    "bindings_calls": (
        "bindings/collectives.cpp",
        "bindings/communicator.cpp",
        "bindings/stream_communicator.cpp",
        "bindings/work.cpp",
    ),
    # The quickest way of a call: how it is inlined does not depend on its neighbours.
    "quick_method": ("bindings/quick_method.cpp",),
    "bindings": ("bindings",),
    "torch_backend": ("torch_backend",),
    "reducer": ("reducer",),
    # Thousands of small functions, for one instruction set each: long as they are.
    "reduce_portable": ("comm/reduce/reduce_portable.cpp",),
    "reduce_avx2": ("comm/reduce/reduce_avx2.cpp",),
    "reduce_avx512": ("comm/reduce/reduce_avx512.cpp",),
}

# A warning about what headers contain; in a unit every source looks like a header.
QUIET = '#pragma GCC diagnostic ignored "-Wsubobject-linkage"\n'


def unit_of(source: str) -> str:
    """The unit of a source, which is a path below csrc."""
    for unit, parts in UNITS.items():
        if any(source == part or source.startswith(part + "/") for part in parts):
            return unit
    return source.rpartition("/")[0].replace("/", "_")


def units_of(csrc: Path) -> dict[str, list[str]]:
    """All units with their sources."""
    units: dict[str, list[str]] = {}
    for path in sorted(csrc.rglob("*.cpp")):
        source = path.relative_to(csrc).as_posix()
        units.setdefault(unit_of(source), []).append(source)
    return units


def write_units(units: dict[str, list[str]], folder: Path) -> None:
    """A file for each unit. One that says the same already keeps its date."""
    folder.mkdir(parents=True, exist_ok=True)
    for unit, sources in units.items():
        _write(folder / f"{unit}.cpp", sources)


def _write(file: Path, sources: Iterable[str]) -> None:
    text = QUIET + "".join(f'#include "{source}"\n' for source in sources)
    if not file.exists() or file.read_text() != text:
        file.write_text(text)
