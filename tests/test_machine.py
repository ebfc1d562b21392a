"""The commit that a trace names is git's, however git keeps it."""

import subprocess

import pytest

from dpcore.base.machine import commit_of
from dpcore.tools import records

IDENTITY = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")


def git(folder, *arguments):
    command = ["git", "-C", str(folder), *IDENTITY, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def tree(tmp_path):
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "first")
    (tmp_path / "inside").mkdir()
    return tmp_path


def test_of_a_branch_a_packed_branch_and_none(tree):
    head = git(tree, "rev-parse", "HEAD")
    assert commit_of(tree) == commit_of(tree / "inside") == head
    git(tree, "pack-refs", "--all")
    assert commit_of(tree) == head
    git(tree, "checkout", "-q", "--detach")
    assert commit_of(tree) == head


def test_of_another_working_tree(tree):
    git(tree, "worktree", "add", "-q", "-b", "other", "beside")
    git(tree / "beside", "commit", "-q", "--allow-empty", "-m", "second")
    head = git(tree / "beside", "rev-parse", "HEAD")
    assert commit_of(tree / "beside") == head != commit_of(tree)


def test_where_there_is_none(tmp_path):
    git(tmp_path, "init", "-q")
    assert commit_of(tmp_path) == ""  # nothing was committed


def test_a_record_names_the_commit_though_an_earlier_one_was_written(tree, monkeypatch):
    monkeypatch.setattr(records, "ROOT", tree)
    files = (
        "benchmarks/results/step.jsonl",
        "docs/images/a.png",
        "docs/results/host.md",
        "dpcore/a.py",
    )
    for name in files:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("old")
    git(tree, "add", ".")
    git(tree, "commit", "-q", "-m", "second")
    for name in files[:3]:
        (tree / name).write_text("new")
    assert records.commit() == git(tree, "rev-parse", "--short=12", "HEAD")
    (tree / files[3]).write_text("new")
    assert records.commit().endswith("+")
