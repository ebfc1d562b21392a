"""Who may know whom, and how long a file or a folder may be: the shape of the tree as a test.

A new file of csrc goes into the folder whose README says what it is about. To add a folder, write
its README and give it a line in FOLDERS, above the first one that includes it.
"""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"

# The folders of csrc, bottom up, and what each may include besides its own files: folders further
# up in this table. A name without a slash is a neighbour's, in the same folder of csrc. Folders
# within one of these (schedule/algorithms) belong to it.
EVERYTHING = "everything"
UNDER_GROUP = "base reduce schedule memory collective network rendezvous"
UNDER_CUDA = "comm/base comm/reduce comm/schedule comm/memory comm/collective comm/group"
FOLDERS = {
    "comm/base": "",
    "comm/reduce": "base",
    "comm/schedule": "base reduce",
    "comm/memory": "base reduce schedule",
    "comm/collective": "base reduce schedule memory",
    "comm/network": "base reduce schedule memory collective",
    "comm/rendezvous": "base reduce schedule memory collective network",
    "comm/group": UNDER_GROUP,
    "comm/transport": f"{UNDER_GROUP} group",
    "comm/engine": f"{UNDER_GROUP} group",
    "comm/operations": f"{UNDER_GROUP} group transport engine",
    "comm": f"{UNDER_GROUP} group transport engine operations",
    "cuda/kernels": "comm/base comm/reduce",
    "cuda/device": "comm/base comm/reduce comm/group kernels",
    "cuda/stream": f"{UNDER_CUDA} comm kernels device",
    "cuda/nccl": f"{UNDER_CUDA} comm kernels device stream",
    "cuda/mapped": f"{UNDER_CUDA} comm kernels device stream",
    "cuda": f"{UNDER_CUDA} comm kernels device stream nccl mapped",
    "tensors": "comm/base",
    "reducer/plan": "comm/base",
    "reducer/phases": "comm/base",
    "reducer/launch": "comm/base phases",
    "reducer/bucket": "comm/base comm/reduce comm/group comm tensors plan",
    "reducer/backward": "comm/base tensors plan bucket",
    "reducer": "comm/base tensors plan phases launch bucket backward",
    "torch_backend": "comm/base comm/collective comm/group comm cuda/stream cuda tensors",
    "bindings": EVERYTHING,
}  # fmt: skip
TOPS = {name.split("/")[0] for name in FOLDERS}

# Beside the folders of a folder lies what is made of them.
ON_TOP = {"comm": "communicator", "cuda": "device_choice", "reducer": "reducer"}

MAX_FILES = 25

TORCH = re.compile(r"(torch|ATen|c10|caffe2|pybind11)/|Python\.h")
CUDA = re.compile(r"cuda|nccl|nvml|cub/|thrust/|cooperative_groups", re.IGNORECASE)

MAX_LINES = 600  # docs/decisions/0051: a file is a concept, whole
CODE = {".cpp", ".cu", ".cuh", ".h", ".inl", ".py"}

THIS_FILE = Path(__file__).resolve().relative_to(ROOT).as_posix()
PRIVATE = re.compile(
    r"(?<![\w.])/(work|tmp|root|home/\w+)/"  # a path of the machine of whoever wrote it
    r"|\b(pypi\.org|pythonhosted\.org|download\.pytorch\.org|pypi\.nvidia\.com)"  # pip decides
)


def cpp_files(folder="."):
    return sorted(path for path in (CSRC / folder).rglob("*") if path.suffix in CODE)


def cpp_folders():
    return sorted(
        {CSRC} | {path for path in CSRC.rglob("*") if path.is_dir() and any(path.iterdir())}
    )


def folder_of(name):
    """The line of FOLDERS for a file, or a folder, of csrc."""
    while name not in FOLDERS and "/" in name:
        name = name.rpartition("/")[0]
    return name


def allowed(folder):
    """What it may include besides its own files, bottom up."""
    known = list(FOLDERS)
    if FOLDERS[folder] == EVERYTHING:
        return known[: known.index(folder)]
    top = folder.split("/")[0]
    names = FOLDERS[folder].split()
    return [name if name in FOLDERS else f"{top}/{name}" for name in names]


@cache
def includes(path):
    """(header, quoted) of every include line."""
    found = re.findall(r'^\s*#\s*include\s+([<"])([^">]+)[">]', path.read_text(), re.MULTILINE)
    return [(header, mark == '"') for mark, header in found]


def own_includes(path):
    return [header for header, _ in includes(path) if header.split("/")[0] in TOPS]


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def test_the_table_of_folders_is_in_order():
    above = set()
    for folder in FOLDERS:
        assert set(allowed(folder)) <= above, f"{folder} stands before what it may include"
        above.add(folder)


def test_every_file_of_csrc_has_a_folder():
    known = {folder_of(path.relative_to(CSRC).as_posix()) for path in cpp_files()}
    assert known == set(FOLDERS), f"mend FOLDERS in {THIS_FILE}"
    flat = [
        name_of(path)
        for folder, name in ON_TOP.items()
        for path in (CSRC / folder).iterdir()
        if path.suffix in CODE and not path.name.startswith((f"{name}.", f"{name}_"))
    ]
    assert not flat, "these belong into one of the folders beside them"
    unknown = [
        name_of(path)
        for path in cpp_folders()
        if path.parent.name in ON_TOP and path.relative_to(CSRC).as_posix() not in FOLDERS
    ]
    assert not unknown, f"give these a line in FOLDERS in {THIS_FILE}"


def test_folders_include_downwards_only():
    wrong = []
    for path in cpp_files():
        folder = folder_of(path.relative_to(CSRC).as_posix())
        may = {folder, *allowed(folder)}
        for header in own_includes(path):
            if folder_of(header) not in may:
                wrong.append(f"{name_of(path)} includes {header}")
    assert not wrong


def may_include(folder):
    """What its README says."""
    layer = folder_of(folder)
    names = ", ".join(f"`{name}`" for name in allowed(layer)) or "nothing else of csrc"
    return f"May include: {'every folder of csrc' if FOLDERS[layer] == EVERYTHING else names}."


def test_every_folder_has_a_readme():
    for folder in cpp_folders():
        name = folder.relative_to(CSRC).as_posix()
        lines = (folder / "README.md").read_text().splitlines()
        assert lines[0] == ("# csrc" if folder == CSRC else f"# csrc/{name}")
        assert "](" not in "".join(lines), "the site shows it above the list of the folder"
        assert len(lines) <= 25, "what lives here, what it may include, where to begin, how to test"
        words = " ".join(" ".join(lines).split())
        assert "Begin with " in words, name
        assert "Tests: " in words, name
        assert folder == CSRC or may_include(name) in words, name
        for mentioned in re.findall(r"[\w/]+\.(?:py|cpp|h|inl|cuh|cu|md)\b", words):
            found = [place / mentioned for place in (folder, ROOT) if (place / mentioned).exists()]
            assert found, f"csrc/{name}/README.md names {mentioned}"


def test_the_picture_shows_every_folder():
    text = (ROOT / "docs" / "architecture.md").read_text()
    picture = text.partition("## The folders")[2].split("```")[1]
    shown = set(re.findall(r"^ *(\w+(?:, \w+)*)  ", picture, re.MULTILINE))
    names = {name for line in shown for name in line.split(", ")}
    assert names == {folder.rpartition("/")[2] for folder in FOLDERS}


def test_folders_are_small():
    too_many = {}
    for folder in cpp_folders():
        count = sum(path.suffix in CODE for path in folder.iterdir())
        if count > MAX_FILES:
            too_many[name_of(folder)] = count
    assert not too_many


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
        for folder in ("comm", "tensors", "reducer", "torch_backend", "bindings")
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


@pytest.mark.parametrize(
    "place", ["csrc", "dpcore", "tests", "benchmarks", "examples", "exercises", "tools", "setup.py"]
)
def test_files_are_short(place):
    paths = [ROOT / place, *(ROOT / place).rglob("*")]
    paths = [path for path in paths if path.is_file() and path.suffix in CODE]
    assert paths
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in paths}
    assert not {name: lines for name, lines in lengths.items() if lines > MAX_LINES}


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
