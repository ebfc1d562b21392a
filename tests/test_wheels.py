"""What a package index gets: which core is loaded, what is said where none fits, what is inside."""

import base64
import functools
import hashlib
import importlib.machinery
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from dpcore.base import core_choice as choice

ROOT = Path(__file__).resolve().parent.parent
SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]
HERE = f"Python {sys.version_info[0]}.{sys.version_info[1]} ({sys.executable})"


@pytest.fixture
def folder(tmp_path):
    """As in a wheel for this Python, with cores for two versions of torch."""
    for name in ("torch2_9", "torch2_13"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"_C{SUFFIX}").touch()
    (tmp_path / "torch2_13" / "_C.cpython-27-x86_64-linux-gnu.so").touch()
    (tmp_path / "torch2_14").mkdir()
    (tmp_path / "torch2_14" / "_C.cpython-27-x86_64-linux-gnu.so").touch()  # for another Python
    return tmp_path


@pytest.mark.parametrize("version", ["2.13.0", "2.13.1+cpu", "2.13.0a0+git12", "2.13"])
def test_the_minor_version_of_torch_chooses(folder, version):
    assert choice.fitting(version, folder) == folder / "torch2_13" / f"_C{SUFFIX}"


@pytest.mark.parametrize("version", ["2.14.0", "2.1.3", "3.13.0", "unknown"])
def test_where_none_fits_it_says_what_was_found_and_what_there_is(folder, version):
    with pytest.raises(choice.NoCore) as refusal:
        choice.fitting(version, folder)
    said = str(refusal.value)
    assert f"torch {version} is installed for {HERE}" in said
    assert "for torch 2.9 or 2.13 only" in said
    assert "pip install torch~=2.13.0" in said  # the newest of those, by number
    assert "pip install --force-reinstall --no-deps ." in said
    assert "make build" in said


def test_without_torch_it_says_which_one_to_install(folder, tmp_path_factory):
    assert "pip install torch~=2.13.0" in choice.without_torch(folder)
    none = choice.without_torch(tmp_path_factory.mktemp("none"))
    assert "no core for this system and version of Python" in none
    assert "torch~=" not in none  # it alone would not help


# ---- files -----------------------------------------------------------------------------------


def run(*command, **environment):
    """Outside of the checkout."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd="/", env={**os.environ, **environment}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """What `make wheels` writes, with the core that these tests run with, before auditwheel."""
    target = tmp_path_factory.mktemp("dist")
    out = run(
        ROOT / "tools" / "wheels.py", "--dist", target, "--auditwheel", "none",
        DPCORE_URL="https://host.example/owner/dpcore",
    )  # fmt: skip
    assert out.returncode == 0, out.stdout + out.stderr
    return target


def only(folder, pattern):
    (found,) = folder.glob(pattern)
    return found


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_for_any_system_has_no_compiled_module(dist):
    files = contents(only(dist, "*-py3-none-any.whl"))
    assert not [name for name in files if name.endswith((".so", ".cpp"))]
    # All that git knows, and nothing that lies about in the checkout.
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "dpcore", "exercises"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    tracked = {name for name in listed.stdout.split() if not name.endswith(".md")}
    packed = {name for name in files if name.startswith("dpcore/") and not name.endswith(".md")}
    there = {name for name in tracked if (ROOT / name).exists()}
    made = {"dpcore/tools/diagnose/control_layout.json"}
    assert packed == made | {
        re.sub(r"^exercises/", "dpcore/school/exercise/tasks/", name) for name in there
    }


def test_a_wheel_with_cores_is_the_other_one_and_the_cores(dist):
    pure = contents(only(dist, "*-py3-none-any.whl"))
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    files = contents(only(dist, f"*-{tag}-{tag}-*.whl"))
    cores = {name for name in files if name.startswith("dpcore/_cores/")}
    assert cores and files.keys() - cores == pure.keys()
    about = {name.rpartition("/")[2]: data.decode() for name, data in files.items() if "/" in name
             and ".dist-info/" in name}  # fmt: skip
    assert f"Tag: {tag}-{tag}-" in about["WHEEL"]
    assert "Root-Is-Purelib: false" in about["WHEEL"]
    rows = dict(re.findall(r"(?m)^(.+),sha256=(.+),\d+$", about["RECORD"]))
    assert len(rows) == len(files) - 1
    for name, digest in rows.items():
        made = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=")
        assert made.decode() == digest, name


def test_the_package_asks_for_no_torch_and_its_readme_finds_its_pictures(dist):
    files = contents(only(dist, "*-py3-none-any.whl"))
    (metadata,) = (data.decode() for name, data in files.items() if name.endswith("/METADATA"))
    wanted = re.findall(r"(?m)^Requires-Dist: (\S+)(?!.*extra)", metadata.partition("\n\n")[0])
    needed = [
        name for name in re.findall(r"(?m)^Requires-Dist: (.*)$", metadata) if ";" not in name
    ]
    assert wanted and sorted(needed) == ["cloudpickle", "numpy", "rich"]
    links = re.findall(r"\]\(([^)]+)\)", metadata)
    assert links and not [link for link in links if not link.startswith(("https://", "#"))]
    assert not [link for link in links if '"' in link or " " in link]
    base = re.escape("https://host.example/owner/dpcore")
    assert re.search(rf"!\[[^\]]+\]\({base}/raw/v[\d.]+/docs/images/first_screen.svg\)", metadata)
    assert re.search(rf"Project-URL: Source, {base}\n", metadata)


def test_the_sdist_has_what_its_readme_names(dist):
    with tarfile.open(only(dist, "*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"SECURITY.md", "CITATION.cff", "LICENSE", "Makefile", "docs/images/first_screen.svg"}
    wanted |= {"docs/releasing.md", "csrc/comm/communicator.cpp", "tests/test_wheels.py"}
    wanted |= {"tools/control_layout.cpp"}
    assert not wanted - names
    text = (ROOT / "README.md").read_text()
    linked = {link.partition("#")[0] for link in re.findall(r"\]\(([^):]+)\)", text)}
    assert linked and not sorted(name for name in linked if name and name not in names)
    assert not [name for name in names if name.endswith(".so") or ".venv" in name]


@pytest.fixture(scope="module")
def installed(dist, tmp_path_factory):
    """Both wheels, as pip unpacks them."""

    @functools.cache
    def install(pattern):
        target = tmp_path_factory.mktemp("installed")
        pip = ["-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", target]
        out = run(*pip, only(dist, pattern))
        assert out.returncode == 0, out.stderr
        return {"PYTHONPATH": str(target), "PATH": "/nowhere"}  # no compiler

    return install


BARE = "import sys; sys.modules['torch'] = None\n"  # as where it is not installed
COMMAND = "from dpcore.__main__ import main; sys.exit(main(sys.argv[1:]))"


def test_the_wheel_for_any_system_reads_and_predicts_and_says_what_it_lacks(installed):
    where = installed("*-py3-none-any.whl")
    code = f"{BARE}import dpcore.reference, dpcore.tools.show, dpcore.tools.simulate\n{COMMAND}"
    trace = ROOT / "docs" / "learn" / "transformer.json"
    out = run("-c", code, "simulate", trace, "--link", "1gbit,50us", "--json", **where)
    assert out.returncode == 0 and json.loads(out.stdout), out.stderr
    for command in ("bench", "doctor"):
        out = run("-c", BARE + COMMAND, command, **where)
        assert out.returncode == 1
        assert "no core for this system" in " ".join((out.stdout + out.stderr).split())
        assert "Traceback" not in out.stderr
    inspecting = f"{BARE}from dpcore.tools.diagnose.black_box import layout; print(layout())"
    assert "'header'" in run("-c", inspecting, **where).stdout
    out = run("-c", "import dpcore; dpcore.init()", **where)  # with torch
    assert "NoCore: torch 2." in out.stderr and "has no core for this system" in out.stderr


@pytest.mark.parametrize(
    "use", ["dpcore.init()", "dpcore.DataParallel", "dpcore.schedule", "dpcore.spawn(print, 2)",
            "from dpcore import DistributedDataParallel", "import dpcore._C"]
)  # fmt: skip
def test_the_first_use_of_the_core_without_torch_says_what_to_install(installed, use):
    out = run("-c", f"{BARE}import dpcore\n{use}", **installed(f"*{SUFFIX.split('-')[1]}-*.whl"))
    last = out.stderr.strip().splitlines()[-1]
    assert last.startswith("dpcore.base.core_choice.NoCore: dpcore's compiled core needs torch 2.")
    assert re.search(r"pip install torch~=2\.\d+\.0 ", last)


def test_the_wheel_with_the_core_runs_ranks(installed):
    code = "import dpcore, sys\ndef main(comm):\n    import torch\n    t = torch.ones(4)\n"
    code += "    comm.all_reduce(t)\n    return dpcore._C.__file__, t.tolist()\n"
    code += "if __name__ == '__main__':\n    print(*dpcore.spawn(main, 2)[1])"
    where = installed(f"*cp{SUFFIX.split('-')[1]}-*.whl")
    out = run("-c", code, **where)
    assert out.returncode == 0, out.stderr
    assert out.stdout.startswith(where["PYTHONPATH"])
    assert out.stdout.endswith("[2.0, 2.0, 2.0, 2.0]\n")


def test_a_wheel_has_the_exercises(installed, tmp_path):
    where = installed("*-py3-none-any.whl")
    out = run("-c", BARE + COMMAND, "exercise", "start", "ring", "--folder", tmp_path, **where)
    assert out.returncode == 0, out.stderr
    assert (tmp_path / "02_ring" / "ring.py").is_file()
    out = run("-c", BARE + COMMAND, "exercise", "check", "ring", "--folder", tmp_path, **where)
    assert (out.returncode, out.stdout) == (1, "")
    assert "no core for this system" in " ".join(out.stderr.split())


def test_a_list_of_the_matrix_says_how_long_it_takes():
    out = run(ROOT / "tools" / "wheels.py", "--matrix", "--list", "--torch", "2.11,2.12")
    assert out.returncode == 0, out.stderr
    assert re.search(r"\d+ cores to compile, about \d+ minutes on \d+ processors", out.stdout)
    out = run(ROOT / "tools" / "wheels.py", "--matrix", "--list", "--torch", "newest")
    assert out.returncode == 2 and "write major.minor" in out.stderr


def test_the_matrix_has_what_the_index_has_and_not_what_is_installed(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import wheels

    said = "torch (2.14.1)\nAvailable versions: 2.14.1, 2.14.0, 2.11.0, 2.10.0\n"
    said += "  INSTALLED: 2.15.0\n  LATEST:    2.14.1\n"
    assert wheels.listed(said) == ["2.11", "2.14"]
    assert wheels.listed("") == []
    monkeypatch.setattr(wheels, "interpreter", Path)
    monkeypatch.setattr(wheels, "torch_versions", {"3.10": ["2.14"], "3.11": []}.get)
    assert wheels.plan(["3.10"], ["2.14", "2.15"]) == [("3.10", "2.14")]
    assert wheels.plan(["3.11"], ["2.15"]) == [("3.11", "2.15")]  # the index did not answer


@pytest.fixture
def release(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import release

    return release


def test_a_release_has_a_date_and_the_notes_of_its_version(release):
    text = "# Changelog\n\n## 0.2.0 (2027-01-02)\n\nFaster.\n\n## 0.1.0 (unreleased)\n\nOld.\n"
    assert release.notes(text, "0.2.0") == "Faster.\n"
    with pytest.raises(SystemExit, match=r"unreleased\. A release has a date"):
        release.notes(text, "0.1.0")
    with pytest.raises(SystemExit, match=r"no part about 0\.3\.0"):
        release.notes(text, "0.3.0")


def test_this_version_is_ready_to_be_tagged(release):
    assert release.notes((ROOT / "CHANGELOG.md").read_text(), release.version())
    release.check_citation((ROOT / "CITATION.cff").read_text(), release.version())
    with pytest.raises(SystemExit, match=r"does not name version 9\.9"):
        release.check_citation((ROOT / "CITATION.cff").read_text(), "9.9")


def test_checksums_are_those_that_sha256sum_reads(release, dist, tmp_path):
    files = release.files_of(dist, release.version())
    assert {path.suffix for path in files} == {".whl", ".gz"}
    (tmp_path / "SHA256SUMS").write_text(release.sums(dist))
    check = ["sha256sum", "--check", "--strict", "--quiet", str(tmp_path / "SHA256SUMS")]
    assert subprocess.run(check, cwd=dist).returncode == 0
    other = tmp_path / "dist"
    other.mkdir()
    (other / "dpcore-0.0.1-py3-none-any.whl").touch()
    with pytest.raises(SystemExit, match=r"another version: dpcore-0\.0\.1"):
        release.files_of(other, release.version())
