"""Who may import whom in dpcore, and how large a folder may be: test_tree.py for Python.

A new file goes into the folder whose README says what it is about. To add a folder, write its
README and give it a line in DPCORE, below everything that it imports.
"""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.test_tree import CODE, MAX_FILES, ROOT, name_of, tracked_files

# The rooms of dpcore, bottom up, and the single files beside them. A file belongs to the longest
# entry that begins its path. It may import its own room and those above it in this list, also
# inside of functions and under TYPE_CHECKING. The folders of a room are its own affair, except that
# none of them may import each other in a circle.
DPCORE = (
    "reference",
    "_version",
    "errors",
    "base",
    "_C",
    "comm",
    "functions",
    "_autoload",
    "parallel",
    "recorder",
    "ddp",
    # The package itself plugs the rooms above into those below (base/plugged_in.py).
    "__init__",
    "tools",
    "school",
    # Uses the package as any program does.
    "lightning",
    "__main__",
)
# Without these, dpcore trains as before.
DISPENSABLE = ("tools", "school")
PYTHON = sorted((ROOT / "dpcore").rglob("*.py"))
SOURCE = CODE | {".js", ".css", ".html", ".pyi"}


def layer_of(module):
    """The place in DPCORE of a module such as dpcore.ddp.wrapper.parameters, or of a name in it."""
    parts = module.split(".")[1:]
    known = ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return DPCORE.index(next((name for name in known if name in DPCORE), "__init__"))


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path):
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_every_file_of_dpcore_has_a_room():
    names = {path.relative_to(ROOT / "dpcore").with_suffix("").parts for path in PYTHON}
    tops = {parts[0] for parts in names} | {"_C"}
    assert tops == {entry.split("/")[0] for entry in DPCORE}
    missing = [
        entry
        for entry in DPCORE
        if not any((ROOT / "dpcore").glob(f"{entry}{ending}") for ending in ("", ".py", ".pyi"))
    ]
    assert not missing


def test_dpcore_imports_downwards_only():
    wrong = [
        f"{name_of(path)} ({DPCORE[layer_of(module_name(path))]}) imports {module}"
        for path in PYTHON
        for module in imported_modules(path)
        if module.split(".")[0] == "dpcore" and layer_of(module) > layer_of(module_name(path))
    ]
    assert not wrong


def imports_of_each():
    """The modules that each module imports, wherever in it."""
    modules = {module_name(path): path for path in PYTHON}

    def module_of(name):
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name

    graph = {}
    for name, path in modules.items():
        found = {module_of(imported) for imported in imported_modules(path)}
        # A path of the package itself stands for nothing that is imported from it.
        graph[name] = found - {"", "dpcore", name}
    return graph, modules


def assert_no_circle(graph):
    done = set()

    def visit(name, trail):
        assert name not in trail, " imports ".join([*trail, name])
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, [*trail, name])
            done.add(name)

    for name in graph:
        visit(name, [])


def test_no_file_imports_itself_by_way_of_others():
    graph, _ = imports_of_each()
    assert_no_circle(graph)


def test_no_folder_imports_itself_by_way_of_others():
    """Beside the folders lie single files, the first and the last of the layers."""
    graph, modules = imports_of_each()
    folders = {name: name_of(path.parent) for name, path in modules.items()}
    of_folders = {folder: set() for folder in folders.values() if folder != "dpcore"}
    for name, imported in graph.items():
        if folders[name] != "dpcore":
            of_folders[folders[name]] |= {folders[other] for other in imported}
    assert_no_circle({at: others - {at, "dpcore"} for at, others in of_folders.items()})


TRAINS = """
import torch, dpcore

comm = dpcore.init(rank=0, world_size=1)
model = dpcore.DataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with dpcore.trace() as trace:
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
assert trace.by_operation() is not None
try:
    trace.show()
except dpcore.Unsupported as refusal:
    print(refusal)
assert dpcore.schedule("ring", "all_reduce", 2)._repr_html_() is None
dpcore.finalize()
"""


def test_the_core_trains_without_tools_and_school(tmp_path):
    def left_out(folder, names):
        is_top = Path(folder) == ROOT / "dpcore"
        return {name for name in names if name == "__pycache__" or (is_top and name in DISPENSABLE)}

    shutil.copytree(ROOT / "dpcore", tmp_path / "dpcore", ignore=left_out)
    # An editable installation would find what is missing.
    begin = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
sys.meta_path = [one for one in sys.meta_path if "editable" not in repr(one)]
"""
    code = begin + TRAINS
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert "dpcore/tools, which is missing" in out.stdout


def folders_of_dpcore():
    files = [path for path in tracked_files() if path.is_relative_to(ROOT / "dpcore")]
    return sorted({path.parent for path in files if path.suffix in SOURCE})


def test_folders_of_dpcore_are_small():
    counts = {
        name_of(folder): sum(path.suffix in SOURCE for path in folder.iterdir())
        for folder in folders_of_dpcore()
    }
    assert not {name: count for name, count in counts.items() if count > MAX_FILES}


def test_every_folder_of_dpcore_says_what_lives_there():
    for folder in folders_of_dpcore():
        text = (folder / "README.md").read_text()
        assert text.startswith("# "), folder
        assert 5 <= len(text.splitlines()) <= 25, folder
        named = re.findall(r"[\w./]+\.(?:py|pyi|js|html|css|md|txt)\b", text)
        named += re.findall(r"\b(?:tests|docs|csrc|dpcore)/[\w./]*\w", text)
        gone = [name for name in named if not any((at / name).exists() for at in (folder, ROOT))]
        assert not gone, folder


def test_reference_imports_no_compiled_code():
    """It has to run where the module cannot be built: for teaching, and to compare against."""
    allowed = re.compile(r"dpcore\.reference(\.|$)")
    wrong = [
        f"{name_of(path)} imports {module}"
        for path in (ROOT / "dpcore" / "reference").rglob("*.py")
        for module in imported_modules(path)
        if module.split(".")[0] in {"torch", "dpcore"} and not allowed.match(module)
    ]
    assert not wrong


def test_importing_reference_loads_no_compiled_code():
    code = "import sys, dpcore.reference; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "dpcore._C"} & set(out.stdout.split())
