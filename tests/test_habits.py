"""The public CI tries what the package claims to run with, and commits are checked as by CI."""

import re
from pathlib import Path

import yaml

from tools import compile_matrix

ROOT = Path(__file__).resolve().parent.parent
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
MAKEFILE = (ROOT / "Makefile").read_text()


def test_the_matrix_has_every_python_and_every_torch():
    matrix = WORKFLOW["jobs"]["matrix"]["strategy"]["matrix"]
    declared = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert matrix["python"] == declared
    torches = {*matrix["torch"], *(leg["torch"] for leg in matrix["include"])}
    assert {version.rpartition(".")[0] for version in torches} == set(compile_matrix.VERSIONS)
    assert all(leg["python"] in declared for leg in matrix["include"])


def test_the_workflow_runs_what_there_is():
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    lines = [
        step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step
    ]
    assert lines
    for line in lines:
        program, *words = line.split()
        if program == "make":
            assert words[-1] in targets, line
        else:
            assert (ROOT / words[-1]).is_file(), line


def test_a_commit_is_checked_by_the_tools_of_make_lint():
    lint = MAKEFILE[MAKEFILE.index("\nlint:") : MAKEFILE.index("\nformat:")]
    tools = set(re.findall(r"\$\(VENV\)/bin/([\w-]+)|-m (mypy)", lint))
    named = {name or other for name, other in tools}
    assert named == {"ruff", "clang-format", "mypy"}
    hooked = " ".join(f"{hook['entry']} {hook['name']}" for hook in HOOKS)
    assert all(name in hooked for name in named)
