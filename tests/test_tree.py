"""Who may know whom, and how long a file may be: the shape of the tree as a test.

To add a file to csrc/comm, give it the prefix of what it belongs to, or add its name to LEVELS.
"""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"

# A file of csrc/comm may include files of its own level and of lower ones. The longest name that
# begins the file's name decides: schedule_program belongs to the executor, schedule_ring does not.
LEVELS = {
    0: ["types", "error"],
    1: [
        "algorithm_names",
        "clock",
        "cost_model",
        "fault",
        "fork_guard",
        "prefetch",
        "reduce",
        "schedule",
        "fnv",
        "sha256",
        "thread",
        "trace",
    ],
    2: [
        "arena",
        "callback_threads",
        "control",
        "descriptor",
        "doorbell",
        "link",
        "rendezvous",
        "spin_lock",
        "tcp_address",
        "tcp_frame",
        "tcp_handshake",
        "tcp_socket",
        "unix_socket",
        "wait",
    ],
    3: ["endpoint", "group", "mailbox", "network", "remote_members", "tcp_line", "transport"],
    4: [
        "algorithm_choice",
        "collective",
        "executor",
        "mapped",
        "message",
        "operation",
        "schedule_program",
        "shared_state",
        "work",
    ],
    5: ["engine"],
    6: ["communicator"],
}
LEVEL_OF = {name: level for level, names in LEVELS.items() for name in names}

# What a folder of csrc may include, besides the standard library and the system.
FOLDERS = {
    "comm": {"comm"},
    "cuda": {"comm", "cuda"},
    "reducer": {"comm", "reducer"},
    "torch_backend": {"comm", "cuda", "reducer", "torch_backend"},
    "bindings": {"comm", "cuda", "reducer", "torch_backend", "bindings"},
}
TORCH = re.compile(r"(torch|ATen|c10|caffe2|pybind11)/|Python\.h")
CUDA = re.compile(r"cuda|nccl|nvml|cub/|thrust/|cooperative_groups", re.IGNORECASE)

MAX_LINES = 400
CODE = {".cpp", ".cu", ".cuh", ".h", ".inl", ".py"}

THIS_FILE = Path(__file__).resolve().relative_to(ROOT).as_posix()
PRIVATE = re.compile(
    r"(?<![\w.])/(work|tmp|root|home/\w+)/"  # a path of the machine of whoever wrote it
    r"|\b(pypi\.org|pythonhosted\.org|download\.pytorch\.org|pypi\.nvidia\.com)"  # pip decides
)


def cpp_files(folder="*"):
    return sorted(path for path in CSRC.glob(f"{folder}/*") if path.suffix in CODE)


@cache
def includes(path):
    """(header, quoted) of every include line."""
    found = re.findall(r'^\s*#\s*include\s+([<"])([^">]+)[">]', path.read_text(), re.MULTILINE)
    return [(header, mark == '"') for mark, header in found]


def own_includes(path):
    return [header for header, _ in includes(path) if header.split("/")[0] in FOLDERS]


def level(name):
    stem = Path(name).stem
    names = [prefix for prefix in LEVEL_OF if stem == prefix or stem.startswith(prefix + "_")]
    return LEVEL_OF[max(names, key=len)] if names else None


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def test_every_file_of_comm_has_a_level():
    unknown = [name_of(path) for path in cpp_files("comm") if level(path.name) is None]
    assert not unknown, f"add these to LEVELS in {THIS_FILE}"


def test_comm_includes_downwards_only():
    upwards = [
        f"{name_of(path)} (level {level(path.name)}) includes {header} (level {level(header)})"
        for path in cpp_files("comm")
        for header in own_includes(path)
        if header.startswith("comm/") and (level(header) or 0) > (level(path.name) or 0)
    ]
    assert not upwards


def test_folders_include_downwards_only():
    assert {path.parent.name for path in cpp_files()} <= set(FOLDERS)
    wrong = [
        f"{name_of(path)} includes {header}"
        for path in cpp_files()
        for header in own_includes(path)
        if header.split("/")[0] not in FOLDERS[path.parent.name]
    ]
    assert not wrong


def test_includes_are_relative_to_csrc_and_exist():
    wrong = [
        f'{name_of(path)} includes "{header}"'
        for path in cpp_files()
        for header, quoted in includes(path)
        if quoted and not (CSRC / header).is_file()
    ]
    assert not wrong


def test_no_include_cycles():
    graph = {path.relative_to(CSRC).as_posix(): own_includes(path) for path in cpp_files()}
    done = set()

    def visit(name, trail):
        assert name not in trail, " includes ".join([*trail, name])
        if name not in done:
            for header in graph.get(name, []):
                visit(header, [*trail, name])
            done.add(name)

    for name in graph:
        visit(name, [])


def test_the_core_knows_no_torch():
    wrong = [
        f"{name_of(path)} includes {header}"
        for folder in ("comm", "cuda")
        for path in cpp_files(folder)
        for header, _ in includes(path)
        if TORCH.match(header)
    ]
    assert not wrong


def test_only_cuda_knows_cuda():
    """The rest must compile, and mean the same, on a machine without a toolkit."""
    wrong = [
        f"{name_of(path)} includes {header}"
        for folder in ("comm", "reducer", "torch_backend", "bindings")
        for path in cpp_files(folder)
        for header, quoted in includes(path)
        if CUDA.search(header) and not quoted
    ]
    assert not wrong


def test_narrow_torch_headers():
    """torch/extension.h costs twenty seconds per file."""
    wide = {"torch/extension.h", "torch/torch.h", "torch/all.h", "ATen/ATen.h"}
    wrong = [
        f"{name_of(path)} includes {header}"
        for path in cpp_files()
        for header, _ in includes(path)
        if header in wide
    ]
    assert not wrong


def test_files_begin_with_what_they_are_for():
    silent = [
        name_of(path) for path in cpp_files() if not path.read_text().startswith(("//", "/*"))
    ]
    assert not silent


@pytest.mark.parametrize("folder", ["csrc", "dpcore", "tests", "benchmarks"])
def test_files_are_short(folder):
    paths = [path for path in (ROOT / folder).rglob("*") if path.suffix in CODE]
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in paths}
    assert not {name: lines for name, lines in lengths.items() if lines > MAX_LINES}


# ---- dpcore ----------------------------------------------------------------------------------

# The layers of dpcore, bottom up: folders, and single files beside them. A file belongs to the
# longest entry that begins its path. It may import its own layer and those above it in this list,
# also inside of functions and under TYPE_CHECKING.
DPCORE = (
    "reference",
    "_version",
    "errors",
    "_C",
    "files",
    "machine",
    "costs",
    "communicators",
    "launch",
    "functions",
    "torch_backend",
    "_autoload",
    "recorder",
    "show",
    "simulate",
    "ddp",
    "ddp/torch_face",
    "ddp/data_parallel",
    "ddp/overlap",
    "commands",
    # The package itself, and paths that documents and pickles name.
    "__init__",
    "_ddp",
    "data_parallel",
    "nccl",
    "torch_communicator",
    "__main__",
)
PYTHON = sorted((ROOT / "dpcore").rglob("*.py"))
MAX_FILES = 25
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


def tracked_files():
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("needs git")
    if out.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in out.stdout.split("\0") if name]


def test_no_path_of_one_machine_and_no_registry():
    found = []
    for path in tracked_files():
        if not path.is_file() or name_of(path) == THIS_FILE:
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            match = PRIVATE.search(line)
            if match:
                found.append(f"{name_of(path)}:{number}: {match[0]}")
    assert not found
