"""What programs may use, as a golden file: a change of it shows in a diff.

After a change that is meant: python tests/test_public_surface.py --write
"""

import ast
import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import dpcore as dp
from dpcore import errors
from dpcore.recorder.file import Event
from dpcore.recorder.recording import Trace

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden" / "public_surface.txt"
STUB = ROOT / "dpcore" / "_C.pyi"


class Verbatim(str):
    """An annotation that is shown as it was written, in every version of Python."""

    __slots__ = ()
    __repr__ = str.__str__


def signature_text(function):
    signature = inspect.signature(function)

    def shown(annotation):
        return annotation if annotation is signature.empty else Verbatim(annotation)

    parameters = [
        parameter.replace(annotation=shown(parameter.annotation))
        for parameter in signature.parameters.values()
    ]
    result = shown(signature.return_annotation)
    return str(signature.replace(parameters=parameters, return_annotation=result))


def stub_definitions(node):
    """Functions, properties and classes of a module or class of the stub, by name."""
    return {
        inner.name: inner
        for inner in node.body
        if isinstance(inner, (ast.FunctionDef, ast.ClassDef))
    }


def stub_module():
    return stub_definitions(ast.parse(STUB.read_text()))


def stub_lines(name):
    """Compiled functions have no signature to look at: the stub has."""
    return list(lines_of_stub(stub_module()[name]))


def lines_of_stub(node):
    if isinstance(node, ast.ClassDef):
        yield f"class {node.name}"
        for inner in stub_definitions(node).values():
            yield from (f"    {line}" for line in lines_of_stub(inner))
    elif any(ast.unparse(mark) == "property" for mark in node.decorator_list):
        yield f"{node.name}: {ast.unparse(node.returns)}"
    else:
        yield f"{node.name}({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}"


MADE_BY_PROGRAMS = {"DataParallel"}  # the others come from functions


def members(cls):
    shown = {name: value for name, value in vars(cls).items() if not name.startswith("_")}
    return shown | ({"__init__": cls.__init__} if cls.__name__ in MADE_BY_PROGRAMS else {})


def class_lines(cls):
    bases = ", ".join(base.__name__ for base in cls.__bases__ if base is not object)
    yield f"class {cls.__name__}({bases})" if bases else f"class {cls.__name__}"
    for name, value in sorted(members(cls).items()):
        if isinstance(value, property):
            yield f"    {name}: {inspect.signature(value.fget).return_annotation}"
        else:
            yield f"    {name}{signature_text(value)}"


def surface():
    lines = []
    for name in dp.__all__:
        value = getattr(dp, name)
        if getattr(value, "__module__", None) == "dpcore._C":
            lines += stub_lines(name)
        elif inspect.isclass(value):
            lines += class_lines(value)
        elif callable(value):
            lines.append(name + signature_text(value))
        else:
            lines.append(f"{name}: {type(value).__name__}")
    lines += ["", "# what they return", *class_lines(Trace)]
    lines += [f"class Event{Event._fields}", "    ms: float"]
    return "\n".join(lines) + "\n"


def test_the_surface_is_the_golden_one():
    assert surface() == GOLDEN.read_text(), f"if it is meant: python {Path(__file__).name} --write"


def test_every_name_is_there_and_listed():
    assert dir(dp) == sorted(set(dp.__all__)) == sorted(dp.__all__)
    with pytest.raises(AttributeError, match="all_reduce_everything"):
        _ = dp.all_reduce_everything


def test_every_public_name_says_what_it_is_for():
    public = {name: getattr(dp, name) for name in dp.__all__ if name != "__version__"}
    public |= {name: value for name, value in vars(errors).items() if inspect.isclass(value)}
    for cls in (dp.Communicator, dp.Work, Trace):
        public |= {f"{cls.__name__}.{name}": value for name, value in members(cls).items()}
    assert not [name for name, value in public.items() if not inspect.getdoc(value)]


def test_importing_loads_neither_torch_nor_the_core():
    code = "import sys, dpcore; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(out.stdout.split())
    assert "dpcore" in loaded
    assert not {"torch", "numpy", "dpcore._C"} & loaded


# ---- the stub of the compiled module ---------------------------------------------------------


def our_own(names):
    """Without what Python and pybind11 add."""
    return {name for name in names if not name.startswith(("__", "_pybind11_"))}


def test_the_stub_names_what_the_core_has():
    stub = stub_module()
    assert set(stub) == our_own(vars(dp._C))
    for name, node in stub.items():
        if isinstance(node, ast.ClassDef):
            inside = our_own(stub_definitions(node))
            inherited = {
                known
                for base in node.bases
                if isinstance(base, ast.Name) and base.id in stub
                for known in stub_definitions(stub[base.id])
            }
            in_core = our_own(vars(getattr(dp._C, name)))
            assert inside <= in_core <= inside | inherited, name


def test_everything_in_the_stub_has_a_docstring():
    nodes = list(stub_module().values())
    nodes += [i for node in nodes for i in getattr(node, "body", []) if hasattr(i, "args")]
    assert not [node.name for node in nodes if not ast.get_docstring(node)]


# ---- doctests --------------------------------------------------------------------------------

MODULES = ["dpcore"] + [
    module.name
    for module in pkgutil.walk_packages(dp.__path__, "dpcore.")
    if not module.name.endswith("._C")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    dp.finalize()
    result = doctest.testmod(importlib.import_module(name))
    dp.finalize()
    assert result.failed == 0


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    GOLDEN.write_text(surface())
    print(f"wrote {GOLDEN.relative_to(ROOT)}")
