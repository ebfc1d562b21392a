"""tools/gpu_machine.py: what is missing for a check on a GPU, and where things are."""

import importlib.util
import json
import subprocess
import sys

import pytest

from tools import gpu_machine

ROOT = gpu_machine.ROOT
OPTIONAL = (
    "cloudpickle",
    "rich",
    "hypothesis",
    "matplotlib",
    "mpi4py",
    "expecttest",
    "pytest_timeout",
    "ninja",
)


def test_what_is_missing_is_one_line_to_type(monkeypatch):
    found = {"torch", "setuptools", "pytest"}
    monkeypatch.setattr(gpu_machine, "is_there", lambda module: module in found)
    monkeypatch.setattr(gpu_machine.shutil, "which", lambda name: None)
    needed, helpful = gpu_machine.lacking()
    assert (needed, helpful) == (["numpy", "cloudpickle"], ["pytest-timeout>=2.3", "ninja"])
    line = 'python -m pip install numpy cloudpickle "pytest-timeout>=2.3" ninja'
    assert gpu_machine.install_line(needed + helpful) == line
    monkeypatch.setattr(gpu_machine.shutil, "which", lambda name: "/usr/bin/ninja")
    assert gpu_machine.lacking()[1] == ["pytest-timeout>=2.3"]
    assert gpu_machine.install_line([]) == ""


def test_nothing_else_is_needed():
    """What gpu-check runs can be imported without anything that it does not ask for; without
    cloudpickle ranks can still be threads."""
    files = sorted((ROOT / "tests" / "cuda").glob("test_*.py"))
    names = [f"tests.cuda.{path.stem}" for path in files]
    names += ["benchmarks.gpu.__main__", "tests.cuda.every_kernel", "tools.gpu_check"]
    code = "import importlib, sys, torch\n"
    code += f"sys.modules.update(dict.fromkeys({OPTIONAL}))\n"  # cannot be imported from here on
    code += f"for name in {names}: importlib.import_module(name)\n"
    code += (
        "import dpcore\nassert dpcore.spawn(lambda comm: comm.rank, 2, mode='threads') == [0, 1]\n"
    )
    code += "try: dpcore.spawn(len, 1)\nexcept ModuleNotFoundError as why: print(why)"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert len(names) > 8 and "cloudpickle" in out.stdout


def test_a_tool_lies_in_path_or_with_the_toolkit(tmp_path, monkeypatch):
    for folder in ("path", "home/bin"):
        (tmp_path / folder).mkdir(parents=True)
        tool = tmp_path / folder / "some-sanitizer"
        tool.write_text("#!/bin/sh\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    assert gpu_machine.find_tool("some-sanitizer") is None
    for name in ("CUDA_PATH", "CUDA_HOME"):
        with monkeypatch.context() as set_here:
            set_here.setenv(name, str(tmp_path / "home"))
            found = gpu_machine.find_tool("some-sanitizer")
            assert found == str(tmp_path / "home" / "bin" / "some-sanitizer")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert gpu_machine.find_tool("some-sanitizer") == str(tmp_path / "path" / "some-sanitizer")


KERNEL_MODULES = {
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20  Sun Mar 30 2025\n"
    "GCC version:  gcc version 12.2.0\n": "570.133.20",
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
    "GCC version:  gcc version 13.3.0\n": "580.95.05",
}


@pytest.mark.parametrize("text", KERNEL_MODULES)
def test_the_release_of_the_driver(text, tmp_path, monkeypatch):
    (tmp_path / "version").write_text(text)
    monkeypatch.setenv("PATH", "")
    assert gpu_machine.driver_release(tmp_path / "version") == KERNEL_MODULES[text]


def test_the_release_of_the_driver_as_nvidia_smi_says_it(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 580.95.05\necho 580.95.05\n")  # of each GPU
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_machine.driver_release(tmp_path / "nowhere") == "580.95.05"
    smi.write_text("#!/bin/sh\necho it failed\nexit 9\n")
    assert gpu_machine.driver_release(tmp_path / "nowhere") is None


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_which_gpu_there_is_or_why_none(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    arch, problem = gpu_machine.architecture()
    assert arch == "" and problem.startswith("torch sees no GPU: ")
    assert len(json.dumps(problem)) > 30, "with torch's reason"
