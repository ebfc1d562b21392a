"""Who may import whom in dpcore, and how large a folder may be: test_tree.py for Python.

A new file goes into the folder whose README says what it is about. To add a folder, write its
README and give it a line in DPCORE, below everything that it imports.
"""

import ast
import re
import subprocess
import sys

from tests.test_tree import CODE, MAX_FILES, ROOT, name_of, tracked_files

# The layers of dpcore, bottom up: folders, and single files beside them. A file belongs to the
# longest entry that begins its path. It may import its own layer and those above it in this list,
# also inside of functions and under TYPE_CHECKING.
DPCORE = (
    "reference",
    "_version",
    "errors",
    "checked_json",
    "_core_choice",
    "_C",
    "files",
    "own_code",
    "machine",
    "markup",
    "costs",
    "communicators",
    "launch",
    "functions",
    "torch_backend",
    "_autoload",
    "parallel",
    "recorder/file",
    "recorder/trace_schema",
    "recorder/intervals",
    "recorder/torch_profile",
    "show",
    "recorder",
    "simulate",
    "ddp",
    "ddp/torch_face",
    "ddp/data_parallel",
    "ddp/overlap",
    "optimizer",
    "local_updates",
    "noise_scale",
    "step_figures",
    "compare/hosts",
    "commands",
    # The package itself, and paths that documents and pickles name.
    "__init__",
    "_ddp",
    "data_parallel",
    "mpi_communicator",
    "nccl",
    "torch_communicator",
    # Uses the package as any program does.
    "lightning",
    "notebook",
    "compare",
    "exercise",
    "help_texts",
    "__main__",
)
PYTHON = sorted((ROOT / "dpcore").rglob("*.py"))
SOURCE = CODE | {".js", ".css", ".html", ".pyi"}


def layer_of(module):
    """The place in DPCORE of a module such as dpcore.ddp.parameters, or of a name in it."""
    parts = module.split(".")[1:]
    known = ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return DPCORE.index(next((name for name in known if name in DPCORE), "__init__"))


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path, nodes_of=ast.walk):
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in nodes_of(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_every_file_of_dpcore_has_a_layer():
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


def at_import(node):
    """The nodes that run when a module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from at_import(child)


def test_no_import_cycles():
    modules = {module_name(path): path for path in PYTHON}
    graph = {}
    for name, path in modules.items():
        found = set(imported_modules(path, at_import))
        # A name of a module is no module: then it is the module that is imported.
        graph[name] = {m if m in modules else m.rpartition(".")[0] for m in found} & set(modules)
    done = set()

    def visit(name, trail):
        assert name not in trail, " imports ".join([*trail, name])
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, [*trail, name])
            done.add(name)

    for name in graph:
        visit(name, [])


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
