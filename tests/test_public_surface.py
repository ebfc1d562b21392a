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
from dpcore.comm.communicators.collectives import Collectives
from dpcore.ddp.local_updates.block import LocalUpdates
from dpcore.recorder.file import Event
from dpcore.tools.diagnose.black_box import layout

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


CLOSING = "dpcore.ddp.torch_face.torch_surface"
MADE_BY_PROGRAMS = {"DataParallel", "DiLoCo", "LocalSGD"}  # the others come from functions


def members(cls):
    parts = [base for base in reversed(cls.__mro__) if base in (cls, Collectives, LocalUpdates)]
    shown = {n: v for part in parts for n, v in vars(part).items() if not n.startswith("_")}
    # What only newer versions of torch have, and DataParallel closes, is none of ours.
    shown = {n: v for n, v in shown.items() if getattr(v, "__module__", "") != CLOSING}
    return shown | ({"__init__": cls.__init__} if cls.__name__ in MADE_BY_PROGRAMS else {})


def class_lines(cls):
    bases = ", ".join(base.__name__ for base in cls.__bases__ if base is not object)
    yield f"class {cls.__name__}({bases})" if bases else f"class {cls.__name__}"
    for name, value in sorted(members(cls).items()):
        if isinstance(value, str | bool):
            yield f"    {name} = {value!r}"
        elif isinstance(value, property):
            yield f"    {name}: {inspect.signature(value.fget).return_annotation}"
        else:
            yield f"    {name}{signature_text(value)}"


def surface():
    lines = []
    for name in dp.__all__:
        value = getattr(dp, name)
        if getattr(value, "__module__", None) == "dpcore._C":
            lines += stub_lines(name)
        elif inspect.isclass(value) and value.__name__ != name:
            lines.append(f"{name} = {value.__name__}")
        elif inspect.isclass(value):
            lines += class_lines(value)
        elif callable(value):
            lines.append(name + signature_text(value))
        else:
            lines.append(f"{name}: {type(value).__name__}")
    lines += ["", "# what they return"]
    lines += [f"class Event{Event._fields}", "    ms: float"]
    return "\n".join(lines) + "\n"


def test_every_error_of_the_core_is_a_class_of_the_same_name_here():
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.Error)
    }
    assert set(layout()["errors"]) == classes


def test_the_surface_is_the_golden_one():
    assert surface() == GOLDEN.read_text(), f"if it is meant: python {Path(__file__).name} --write"


def test_every_name_is_there_and_listed():
    assert dir(dp) == sorted(set(dp.__all__)) == sorted(dp.__all__)
    with pytest.raises(AttributeError, match="all_reduce_everything"):
        _ = dp.all_reduce_everything


def test_torchs_name_leads_to_ours_whichever_is_asked_for_first():
    """Not to torch's class, which the module imports as well."""
    code = "from dpcore import DistributedDataParallel as one, DataParallel as other\n"
    code += "assert one is other and one.__module__.startswith('dpcore.')"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr


def test_every_public_name_says_what_it_is_for():
    public = {name: getattr(dp, name) for name in dp.__all__ if name != "__version__"}
    public |= {name: value for name, value in vars(errors).items() if inspect.isclass(value)}
    for cls in (
        dp.Communicator,
        dp.DiLoCo,
        dp.GradientNoiseScale,
        dp.LaunchControl,
        dp.LaunchSchedule,
        dp.LocalSGD,
        dp.Trace,
        dp.Work,
    ):
        public |= {f"{cls.__name__}.{name}": value for name, value in members(cls).items()}
    assert not [name for name, value in public.items() if not inspect.getdoc(value)]


def test_importing_loads_neither_torch_nor_the_core():
    code = "import sys, dpcore; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(out.stdout.split())
    assert "dpcore" in loaded
    assert not {"torch", "numpy", "dpcore._C"} & loaded


# What imports `dpcore.comm.launch.session` sets `dpcore.comm.launch`: a folder or a module with the
# name of a function would take its place, in some programs and in others not.
CALLS = """
import importlib, inspect, pkgutil
import torch
import dpcore as dp

for module in pkgutil.walk_packages(dp.__path__, "dpcore."):
    importlib.import_module(module.name)

def spawned(comm):
    return comm.world_size

dp.init()
one = torch.ones(2)
four = lambda: torch.ones(4)
ring = dp.schedule("ring", "all_reduce", 2)
with dp.trace() as trace:
    dp.all_reduce(four())
model = dp.DataParallel(torch.nn.Linear(2, 2))
calls = {
    "all_gather": lambda: dp.all_gather(four(), four()),
    "all_reduce": lambda: dp.all_reduce(four()),
    "all_to_all": lambda: dp.all_to_all(four(), four()),
    "barrier": lambda: dp.barrier(),
    "broadcast": lambda: dp.broadcast(four()),
    "gather": lambda: dp.gather(four(), four()),
    "reduce": lambda: dp.reduce(four()),
    "reduce_scatter": lambda: dp.reduce_scatter(four(), four()),
    "scatter": lambda: dp.scatter(four(), four()),
    "algorithms_of": lambda: dp.algorithms_of("all_reduce"),
    "check": lambda: dp.check(model),
    "check_schedule": lambda: dp.check_schedule(ring),
    "schedule_cost": lambda: dp.schedule_cost(ring, 8, 4),
    "compose_comm_hooks": lambda: dp.compose_comm_hooks((None, lambda state, bucket: None)),
    "current": lambda: dp.current(),
    "elastic": lambda: dp.elastic(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        torch.utils.data.DistributedSampler([1], 1, 0),
    ),
    "gradient_noise_scale": lambda: dp.gradient_noise_scale(model),
    "measure_overlap": lambda: dp.measure_overlap(model, lambda: None),
    "mesh": lambda: dp.mesh(dp.current(), data=1),
    "monitor": lambda: dp.monitor(model, to=None),
    "pipeline_plan": lambda: dp.pipeline_plan("1F1B", stages=2, microbatches=4),
    "finalize": lambda: dp.finalize(),
    "spawn": lambda: dp.spawn(spawned, 1, mode="threads"),
    "warm_memory": lambda: dp.warm_memory().__enter__(),
}
kinds = (dp.Communicator, dp.DataParallel, dp.LaunchControl, dp.LaunchSchedule, dp.Overlap)
kinds += (dp.BackendOptions, dp.MpiCommunicator, dp.TorchCommunicator)
kinds += (dp.CheckResult, dp.DistributedOptimizer, dp.GradientNoiseScale, dp.Monitor)
kinds += (dp.DiLoCo, dp.ElasticRun, dp.LocalSGD, dp.Schedule, dp.Trace, dp.Work, dp.Error)
kinds += (dp.Mismatch, dp.MistakeWarning, dp.PeerLost, dp.RendezvousError, dp.Timeout)
kinds += (dp.Unsupported,)
assert all(inspect.isclass(kind) for kind in kinds)
functions = {"communicator_of", "flight_record", "nccl_library", "write_flight_record"}
assert all(inspect.isfunction(getattr(dp, name)) for name in functions)
assert not inspect.ismodule(dp.send) and not inspect.ismodule(dp.recv)  # a rank alone has no peer
for name, call in calls.items():
    try:
        call()
    except dp.Unsupported as refusal:
        assert name == "measure_overlap" and "one rank" in str(refusal)
names = {kind.__name__ for kind in kinds} | set(calls) | functions
names |= {"DistributedDataParallel"}  # DataParallel once more
assert names | {"__version__", "init", "recv", "schedule", "send", "trace"} == set(dp.__all__)
"""


def test_public_names_can_be_called_after_every_module_was_imported():
    out = subprocess.run([sys.executable, "-c", CALLS], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr


DOCUMENTED = [
    ("dpcore.parallel.attention", "ring_attention"),
    ("dpcore.parallel.functional", "reduce_from"),
    ("dpcore.parallel.pipeline_plans", "PipelinePlan"),
    ("dpcore.reference", "algorithms_of"),
    ("dpcore.tools.show", "read_run"),
    ("dpcore.tools.simulate", "gradients_of"),
]


# torch takes most of the time of a process that begins: here it is imported once.
EACH_IN_A_PROCESS_OF_ITS_OWN = """
import os, pickle, sys
import torch

for path in sys.argv[1:]:
    module, _, name = path.rpartition(".")
    if not (child := os.fork()):
        found = pickle.loads(f"c{module}\\n{name}\\n.".encode())
        assert found.__name__ == name, found
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, path
"""


def test_documented_paths_lead_to_the_object():
    """As pickle does, in a process that has imported nothing of ours yet."""
    paths = [f"{module}.{name}" for module, name in DOCUMENTED]
    command = [sys.executable, "-c", EACH_IN_A_PROCESS_OF_ITS_OWN, *paths]
    out = subprocess.run(command, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr


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
            if any(isinstance(base, ast.Attribute) for base in node.bases):
                inherited |= our_own(vars(getattr(dp, name)))  # a protocol says what is in it
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
