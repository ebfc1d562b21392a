"""Programs of tests/cpp, built for the thread sanitizer and run under it."""

import os
import subprocess

from tests.cuda_host.conftest import ROOT


def build(name):
    """The program, which takes minutes the first time."""
    program = f"build/cpp/tsan/{name}"
    subprocess.run(["make", "-s", "-j2", program], cwd=ROOT, check=True, timeout=1500)
    return ROOT / program


def run(program, *arguments, says):
    """Ends well, without a report, and has said so."""
    options = {"TSAN_OPTIONS": "halt_on_error=1 second_deadlock_stack=1"}
    command = [program, *map(str, arguments)]
    out = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, **options}
    )
    assert out.returncode == 0, f"{out.stdout}\n{out.stderr[-6000:]}"
    assert says in out.stdout
