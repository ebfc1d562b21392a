"""Environments and building, where torch is another environment's."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_another_clone_that_is_installed_in_part_does_not_stop_it(tmp_path):
    """Whoever borrows the packages of an environment sees the entry points of its editable
    installs, but cannot import them; torch then refuses to be imported."""
    info = tmp_path / "elsewhere-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[torch.backends]\nelsewhere = not_importable:register\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}

    def run(*command):
        return subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
        )

    assert "Failed to load the backend extension" in run("-c", "import torch").stderr
    # Finds torch and names the sources; there is no C library to build.
    out = run("setup.py", "-q", "build_clib")
    assert out.returncode == 0, out.stderr


def test_a_borrowed_torch_has_its_launcher_in_the_environment(tmp_path, monkeypatch):
    """It starts the environment's Python, and not the one that torch belongs to."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import environment

    own = tmp_path / "bin"
    own.mkdir()
    (own / "python").symlink_to(sys.executable)
    environment.make_torchrun(own / "python")
    assert (own / "torchrun").read_text().startswith(f"#!{own}/python\n")
    (own / "torchrun").write_text("somebody's own")
    environment.make_torchrun(own / "python")
    assert (own / "torchrun").read_text() == "somebody's own"
