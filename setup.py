"""Builds ``dpcore._C``: one extension module of C++ sources and, where nvcc is found, CUDA sources.

The metadata is in pyproject.toml; only what needs a program is here. Three things are unusual:

* torch is needed to compile but is not a build requirement. As a requirement, pip would fetch the
  newest torch into its isolated environment, and the module would be compiled against another
  torch than the one that is going to load it. So we look for the torch of the environment that
  pip was called in, and stop with the command to type when there is none.
* .cu files are compiled by our own step. torch's CUDAExtension refuses to work under a CPU build
  of torch, while ours uses no CUDA header of torch and runs under any build.
* The compiler does not take files but units of several, which read the headers of torch once
  (tools/build_units.py). Their objects are kept in ``build/objects`` also for ``pip install -e .``,
  which would use a temporary directory: an edit of one file recompiles one unit.
* A module fits one minor version of torch and one of Python. Its path says both,
  ``dpcore/_cores/torch2_13/_C.cpython-311-x86_64-linux-gnu.so``, so that several can lie side by
  side; ``dpcore/_C.py`` loads the one that fits.

Environment: DPCORE_CUDA=0|1 (never | must), DPCORE_CUDA_ARCHS="90;100", DPCORE_DEBUG=1,
DPCORE_CXXFLAGS="...", MAX_JOBS=N, CXX=...
For wheels (tools/wheels.py): DPCORE_PURE=1 leaves the module out; DPCORE_URL=https://HOST/OWNER/dpcore
is where the repository can be read; DPCORE_TARGET_TORCH=FOLDER (of headers) and
DPCORE_TARGET_PYTHON=INTERPRETER compile for others than those that run this.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import setuptools
from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.append(str(ROOT / "tools"))  # pip does not run this file as a script

from build_target import TORCH_LIBRARIES, find_target, minor_of  # noqa: E402
from build_units import units_of, write_units  # noqa: E402
from index_page import links, readme_elsewhere  # noqa: E402

MINIMUM_TORCH = (2, 11)
MINIMUM_CUDA = (12, 5)  # see csrc/cuda/kernels/driver.cuh
DEFAULT_CUDA_ARCHS = (80, 90, 100)
# pip asks for metadata several times per install; importing torch for each would cost seconds.
COMMANDS_WITHOUT_COMPILER = {"egg_info", "dist_info", "sdist", "clean", "--version", "--help"}


def stop(message: str) -> None:
    raise SystemExit(f"\n\ndpcore: {message}\n")


# ---- torch -----------------------------------------------------------------------------------


def surrounding_sys_path() -> list[str]:
    """The import path of this interpreter outside pip's isolation.

    pip isolates by PYTHONPATH and a sitecustomize found through it; -I ignores both.
    """
    code = "import json, sys; print(json.dumps(sys.path))"
    out = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    return list(json.loads(out.stdout)) if out.returncode == 0 else []


def make_torch_importable() -> None:
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        # At the end: the isolated environment's own setuptools must win.
        sys.path += [entry for entry in surrounding_sys_path() if entry not in sys.path]
        importlib.invalidate_caches()
    if importlib.util.find_spec("torch") is None:
        stop(
            f"torch was not found for {sys.executable}, and it is needed to compile.\n"
            "Install the build of torch that you want to use, then dpcore without isolation:\n\n"
            '    pip install "torch>=2.11" "setuptools>=77" ninja\n'
            "    pip install --no-build-isolation .\n"
        )


def check_torch() -> Any:
    import torch

    if minor_of(torch.__version__) < MINIMUM_TORCH:
        stop(
            f"torch {torch.__version__} is installed, dpcore needs 2.11 or newer. Type:\n\n"
            '    pip install --upgrade "torch>=2.11"\n'
        )
    return torch


# ---- compilers -------------------------------------------------------------------------------


def available_jobs() -> int:
    """Two processes per core, ninja's habit, do not pay; a file with torch headers takes 1.2 GB."""
    if os.environ.get("MAX_JOBS", "").isdigit():
        return max(1, int(os.environ["MAX_JOBS"]))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // (3 << 29)))


def make_ninja_callable() -> None:
    """torch looks for ninja in PATH, where an environment that is not activated is not."""
    scripts = sysconfig.get_path("scripts")
    if shutil.which("ninja") is None and shutil.which("ninja", path=scripts):
        os.environ["PATH"] = scripts + os.pathsep + os.environ.get("PATH", os.defpath)


def use_ccache(directory: Path) -> None:
    """Compiles through ccache where it is installed.

    torch reads one word from CXX, asks it for its version and refuses names that it does not
    know, so "ccache g++" would fail its check: a script that is called g++ passes. Paths below
    this folder are hashed as relative ones, so that every clone finds what another one compiled.
    """
    ccache = shutil.which("ccache")
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if ccache is None or compiler is None or Path(compiler).resolve().name == "ccache":
        return
    directory.mkdir(parents=True, exist_ok=True)
    wrapper = directory / Path(compiler).name
    settings = f"CCACHE_BASEDIR={shlex.quote(str(ROOT))} CCACHE_NOHASHDIR=1"
    text = f'#!/bin/sh\nexec env {settings} {shlex.quote(ccache)} {shlex.quote(compiler)} "$@"\n'
    # Rewriting it unchanged would make its date newer for nothing.
    if not wrapper.exists() or wrapper.read_text() != text:
        wrapper.write_text(text)
        wrapper.chmod(0o755)
    os.environ["CXX"] = str(wrapper)
    # torch 2.13 puts ccache in front of the compiler itself: once is enough.
    os.environ["TORCH_NO_COMPILER_WRAPPER"] = "1"


def cxx_flags(torch_includes: list[str], with_cuda: bool) -> list[str]:
    flags = ["-std=c++20", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra"]
    flags += ["-O1", "-g"] if os.environ.get("DPCORE_DEBUG") == "1" else ["-O3", "-g0"]
    # As system headers torch's own raise no warnings under our flags.
    for include in torch_includes:
        flags += ["-isystem", include]
    if with_cuda:
        flags.append("-DDPCORE_WITH_CUDA=1")
    return flags + shlex.split(os.environ.get("DPCORE_CXXFLAGS", ""))


# ---- CUDA ------------------------------------------------------------------------------------


def find_nvcc() -> str | None:
    wish = os.environ.get("DPCORE_CUDA", "")
    if wish == "0":
        return None
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [str(Path(home) / "bin") for home in homes if home]
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=os.pathsep.join(places))
    if nvcc is None and wish == "1":
        stop(
            "DPCORE_CUDA=1, but nvcc is neither in PATH nor in $CUDA_HOME/bin. Type:\n\n"
            "    CUDA_HOME=<where the CUDA toolkit is> pip install --no-build-isolation .\n"
        )
    return nvcc


def run_nvcc(command: list[str]) -> str:
    out = subprocess.run(command, capture_output=True, text=True)
    if out.returncode != 0:
        stop(
            f"nvcc failed:\n\n{shlex.join(command)}\n{out.stdout}{out.stderr}\n"
            "To build without CUDA, set DPCORE_CUDA=0."
        )
    return out.stdout + out.stderr


def check_nvcc(nvcc: str) -> None:
    found = re.search(r"release (\d+)\.(\d+)", run_nvcc([nvcc, "--version"]))
    if found and (int(found[1]), int(found[2])) < MINIMUM_CUDA:
        stop(
            f"{nvcc} is of CUDA {found[1]}.{found[2]}, dpcore needs 12.5 or newer. Put a newer one "
            "first in PATH, or leave the part for GPUs out:\n\n"
            "    DPCORE_CUDA=0 pip install --no-build-isolation .\n"
        )


def cuda_library_dir(nvcc: str) -> str:
    """Where libcudart_static.a is, as nvcc itself would find it: it may be a wrapper script."""
    plan = run_nvcc([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull])
    home = re.search(r"TOP=(.*)", plan)
    places = re.findall(r"-L([^\"\s]+)", plan)
    if home:
        places += [f"{home[1].strip()}/{name}" for name in ("lib64", "lib")]
    for place in places:
        if (Path(place) / "libcudart_static.a").exists():
            return os.path.realpath(place)
    stop(f"{nvcc} has no libcudart_static.a beside it. Install it, or set DPCORE_CUDA=0.")
    raise AssertionError  # not reached


def gencode_flags(nvcc: str) -> list[str]:
    """Code for each architecture, and PTX of the newest for the ones that come later."""
    archs = re.findall(r"\d+[af]?", os.environ.get("DPCORE_CUDA_ARCHS", ""))
    if not archs:
        known = set(re.findall(r"sm_(\d+)", run_nvcc([nvcc, "--list-gpu-code"])))
        archs = [str(arch) for arch in DEFAULT_CUDA_ARCHS if str(arch) in known]
    if not archs:
        stop(
            f"{nvcc} knows none of sm_{DEFAULT_CUDA_ARCHS}: set DPCORE_CUDA_ARCHS or DPCORE_CUDA=0"
        )
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs[:-1]]
    return [*flags, f"-gencode=arch=compute_{archs[-1]},code=[sm_{archs[-1]},compute_{archs[-1]}]"]


def dependencies(depfile: Path) -> list[Path]:
    if not depfile.exists():
        return []
    text = depfile.read_text().replace("\\\n", " ").partition(":")[2]
    return [Path(name.replace("\\ ", " ")) for name in re.findall(r"(?:\\ |\S)+", text)]


def compile_cuda(nvcc: str, host: str | None, sources: list[Path], directory: Path) -> list[str]:
    """Compiles what changed. An object is up to date when it was made by the same command, after
    the last change of every file that its dependency list names."""
    directory.mkdir(parents=True, exist_ok=True)
    optimise = ["-O1", "-g"] if os.environ.get("DPCORE_DEBUG") == "1" else ["-O3"]
    common = [nvcc, "-std=c++20", *optimise, "-cudart", "static", "-DDPCORE_WITH_CUDA=1"]
    common += ["-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall", "-I", str(ROOT / "csrc")]
    # As -ffp-contract=off for the host: the same bits as on CPUs.
    common += ["-fmad=false", *gencode_flags(nvcc)]
    if host:
        common += ["-ccbin", host]

    def compile_one(source: Path) -> str:
        target = directory / (source.stem + ".o")
        depfile, record = target.with_suffix(".d"), target.with_suffix(".command")
        command = [*common, "-MD", "-MF", str(depfile), "-c", str(source), "-o", str(target)]
        line = shlex.join(command)
        inputs = dependencies(depfile)
        if target.exists() and inputs and record.exists() and record.read_text() == line:
            built = target.stat().st_mtime
            if all(path.exists() and path.stat().st_mtime <= built for path in inputs):
                return str(target)
        print(line, flush=True)
        target.unlink(missing_ok=True)
        print(run_nvcc(command), end="", flush=True)
        record.write_text(line)
        return str(target)

    with ThreadPoolExecutor(max_workers=available_jobs()) as pool:
        return list(pool.map(compile_one, sources))


# ---- the extension ---------------------------------------------------------------------------


@contextlib.contextmanager
def exclusive(directory: Path) -> Any:
    """Two builds in one tree at once (two terminals, make -j) would write the same objects."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def extension_arguments() -> dict[str, Any]:
    """What setup() needs to compile; imports torch."""
    if platform.system() != "Linux":
        stop(
            "the compiled core is for Linux. What works without it (dpcore show, simulate, "
            "dpcore.reference) can be installed on any system:\n\n"
            "    DPCORE_PURE=1 pip install .\n"
        )
    make_torch_importable()
    # Of a dpcore that is visible but not importable, such as another clone's, torch would not load.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    make_ninja_callable()
    torch = check_torch()
    from torch.utils import cpp_extension

    target = find_target(torch)
    is_native = not {"DPCORE_TARGET_TORCH", "DPCORE_TARGET_PYTHON"} & os.environ.keys()
    # One directory per combination that makes objects incompatible.
    nvcc = find_nvcc()
    flavour = "debug" if os.environ.get("DPCORE_DEBUG") == "1" else "release"
    flavour += "-cuda" if nvcc else ""
    objects = ROOT / "build" / "objects"
    tag = f"{target.cache_tag}-{platform.machine()}-torch{target.torch}-{flavour}"
    units = units_of(ROOT / "csrc")
    # The kernels take the longest: first, so that the processors end together.
    kernels = sorted((ROOT / "csrc" / "cuda").rglob("*.cu"))
    kernels.sort(key=lambda path: path.parent.name != "kernels")
    # Keeps the static CUDA runtime's symbols to ourselves; and torch's libraries are named, however
    # little the linker finds in them.
    link_flags = ["-Wl,--exclude-libs,ALL", "-Wl,--no-as-needed", f"-L{target.torch_libraries}"]
    link_flags += [f"-l{name}" for name in TORCH_LIBRARIES]
    if nvcc:
        check_nvcc(nvcc)
        link_flags += [f"-L{cuda_library_dir(nvcc)}", "-lcudart_static"]
        link_flags += ["-lrt", "-ldl", "-lpthread"]
    extension = setuptools.Extension(
        target.module,
        # Relative: setuptools puts objects where the source's path leads from the build directory.
        [f"build/units/{unit}.cpp" for unit in units],
        include_dirs=[str(ROOT / "csrc")],
        extra_compile_args=cxx_flags(target.torch_includes, with_cuda=nvcc is not None),
        extra_link_args=link_flags,
        language="c++",
    )

    class Build(cpp_extension.BuildExtension):  # type: ignore[misc, name-defined]
        def finalize_options(self) -> None:
            super().finalize_options()
            self.build_temp = str(objects / tag)
            self.include_dirs = [target.python_include]

        def get_ext_filename(self, name: str) -> str:
            return os.path.join(*name.split(".")) + target.suffix

        def run(self) -> None:
            if self.inplace:
                write_control_layout(ROOT / "dpcore")
                (ROOT / "dpcore" / "_cores" / target.module.split(".")[2]).mkdir(
                    parents=True, exist_ok=True
                )
                for outdated in ROOT.glob("dpcore/_C.*.so"):  # Python would take it for _C.py
                    outdated.unlink()
            super().run()

        def build_extensions(self) -> None:
            os.environ.setdefault("MAX_JOBS", str(available_jobs()))
            with exclusive(objects):
                write_units(units, ROOT / "build" / "units")
                if nvcc:
                    # Before CXX becomes the ccache wrapper: nvcc calls it in ways ccache rejects.
                    host = shutil.which(os.environ.get("CXX", ""))
                    # For wheels, once for all versions of torch and Python, which they do not know.
                    folder = Path(self.build_temp) if is_native else objects / f"kernels-{flavour}"
                    cuda = compile_cuda(nvcc, host, kernels, folder / "cuda")
                    self.extensions[0].extra_objects = cuda
                use_ccache(objects / "ccache")
                super().build_extensions()

    return {"ext_modules": [extension], "cmdclass": {"build_ext": Build}}


# ---- what the package has beside its sources -------------------------------------------------


def write_control_layout(package: Path) -> None:
    """Where the fields of a black box lie, as the compiler has it. The wheel for any system is made
    without a compiler where there is none; `dpcore inspect` then says so."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return
    program = ROOT / "build" / "control_layout"
    program.parent.mkdir(exist_ok=True)
    source = str(ROOT / "tools" / "control_layout.cpp")
    command = [compiler, "-std=c++20", "-I", str(ROOT / "csrc"), source, "-o", str(program)]
    subprocess.run(command, check=True)
    layout = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    (package / "tools" / "diagnose" / "control_layout.json").write_text(layout)


class BuildPython(build_py):
    """A wheel has the folder exercises/ as dpcore/school/exercise/tasks. In a checkout they are
    used where they are."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        write_control_layout(Path(self.build_lib) / "dpcore")
        target = Path(self.build_lib) / "dpcore" / "school" / "exercise" / "tasks"
        shutil.rmtree(target, ignore_errors=True)  # files that are gone stay there
        for name in ("source.py", "check.py"):
            for path in sorted((ROOT / "exercises").glob(f"[0-9][0-9]_*/{name}")):
                (target / path.parent.name).mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target / path.parent.name / name)


def main() -> None:
    os.chdir(ROOT)
    if int(setuptools.__version__.split(".")[0]) < 77:
        stop(
            f"setuptools {setuptools.__version__} is too old to read pyproject.toml. Type:\n\n"
            '    pip install --upgrade "setuptools>=77"\n'
        )
    arguments: dict[str, Any] = {
        "long_description": readme_elsewhere(),
        "long_description_content_type": "text/markdown",
        "project_urls": links(),
        "cmdclass": {"build_py": BuildPython},
    }
    if os.environ.get("DPCORE_PURE") == "1":
        pass
    elif not COMMANDS_WITHOUT_COMPILER & set(sys.argv[1:]):
        extension = extension_arguments()
        arguments["cmdclass"] |= extension["cmdclass"]
        arguments["ext_modules"] = extension["ext_modules"]
    elif "dist_info" in sys.argv:
        # The first thing pip asks for: stop before it fetches anything for a wheel that cannot be
        # compiled.
        make_torch_importable()
    setup(**arguments)


main()
