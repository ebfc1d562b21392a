"""Makes a release ready to be published: what is in dist/ is tried, summed and described.

    make release                       # the wheels of this checkout's core, then this program
    python tools/release.py            # with what lies in dist/, such as the wheels of a matrix
    python tools/release.py --no-sdist # does not compile the sdist, which takes minutes

Each wheel that fits this Python, and the sdist, is installed into an environment of its own,
outside of the clone, and used there. Then dist/ gets SHA256SUMS and NOTES.md, the part of
CHANGELOG.md about this version. Nothing is published.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools")]

from environment import BUILD_TOOLS, create_venv, install_torch, stop  # noqa: E402
from index_page import version  # noqa: E402

RANKS = "import dpcore, torch; dpcore.spawn(lambda c: c.all_reduce(torch.ones(4)), 2)"
SUMS = "SHA256SUMS"
NOTES = "NOTES.md"


def notes(changelog: str, wanted: str) -> str:
    """The part about a version; a release has a date."""
    heading = re.search(rf"^## {re.escape(wanted)} \((.+)\)$", changelog, re.M)
    if heading is None:
        stop(f"CHANGELOG.md has no part about {wanted}, such as: ## {wanted} (2026-11-28)")
        raise AssertionError
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", heading[1]):
        stop(f"CHANGELOG.md says of {wanted}: {heading[1]}. A release has a date: (2026-11-28)")
    after = changelog[heading.end() :]
    return after.partition("\n## ")[0].strip() + "\n"


def check_citation(text: str, wanted: str) -> None:
    if re.search(rf"^version: [\"']?{re.escape(wanted)}[\"']?$", text, re.M) is None:
        stop(f"CITATION.cff does not name version {wanted}")


def sums(folder: Path) -> str:
    """As sha256sum writes them: `sha256sum --check SHA256SUMS` reads them."""
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.name not in (SUMS, NOTES))
    return "".join(f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in files)


def files_of(folder: Path, wanted: str) -> list[Path]:
    """The sdist and those wheels of a version that this Python can install."""
    tag = "cp{}{}".format(*sys.version_info[:2])
    found = sorted(folder.glob(f"dpcore-{wanted}*"))
    if others := [p.name for p in folder.glob("dpcore-*") if p not in found]:
        stop(f"{folder} has files of another version: {', '.join(others)}. Remove them first")
    fitting = [p for p in found if f"-{tag}-" in p.name or "-none-any" in p.name]
    fitting += [p for p in found if p.name.endswith(".tar.gz")]
    if len(fitting) < 2:
        stop(f"{folder} has no wheel and sdist of {wanted}: make release")
    return fitting


def run(command: list[str | Path], folder: Path) -> str:
    """In a folder outside of the clone, with as little of this environment as pip can do with."""
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    kept |= {"HOME": str(folder), "PATH": f"{Path(command[0]).parent}:/usr/bin:/bin"}
    out = subprocess.run(
        [str(part) for part in command], cwd=folder, env=kept, capture_output=True, text=True
    )
    if out.returncode != 0:
        stop(f"{' '.join(map(str, command))} failed:\n{out.stdout[-3000:]}{out.stderr[-3000:]}")
    return out.stdout


def try_out(path: Path, torch: str) -> None:
    """Installs it where nothing else is, and uses what it has."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        python = create_venv(folder / "env")
        commands = python.parent
        if "-none-any" not in path.name:
            install_torch(python, torch)
        isolation = ["--no-build-isolation"] if path.name.endswith(".tar.gz") else []
        if isolation:
            run([python, "-m", "pip", "install", "-q", *BUILD_TOOLS], folder)
        run([python, "-m", "pip", "install", "-q", *isolation, path.absolute()], folder)
        said = run([commands / "dpcore", "--version"], folder).strip()
        run([commands / "dpcore", "show", "ring", "--html", "ring.html"], folder)
        assert (folder / "ring.html").stat().st_size > 10_000
        if "-none-any" not in path.name:
            run([python, "-c", RANKS], folder)
            run([commands / "dpcore", "doctor"], folder)
        print(f"  {path.name}: {said} works in an environment of its own", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", metavar="FOLDER")
    parser.add_argument("--no-sdist", action="store_true", help="do not compile the sdist")
    options = parser.parse_args()
    wanted = version()
    described = notes((ROOT / "CHANGELOG.md").read_text(), wanted)
    check_citation((ROOT / "CITATION.cff").read_text(), wanted)
    query = "import torch; print(torch.__version__.split('+')[0])"
    torch = subprocess.check_output([sys.executable, "-c", query], text=True).strip()
    for path in files_of(options.dist, wanted):
        if not (options.no_sdist and path.name.endswith(".tar.gz")):
            try_out(path, torch)
    (options.dist / NOTES).write_text(described)
    (options.dist / SUMS).write_text(sums(options.dist))
    print(f"dpcore {wanted} is ready: {options.dist} has the files, {SUMS} and {NOTES}")


if __name__ == "__main__":
    main()
