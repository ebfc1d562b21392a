"""The page of the package on an index: its README and its links. For setup.py.

DPCORE_URL says where the repository can be read, such as https://HOST/OWNER/dpcore.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def version() -> str:
    found = re.search(r'__version__ = "(.+)"', (ROOT / "dpcore" / "_version.py").read_text())
    assert found
    return found[1]


def readme_elsewhere() -> str:
    """The README as a package index shows it, which has no files beside it: links and pictures lead
    to the repository, where DPCORE_URL says where that is."""
    text = (ROOT / "README.md").read_text()
    base = os.environ.get("DPCORE_URL", "").rstrip("/")
    if not base:
        return text
    tag = f"v{version()}"

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1] == "!" else "blob"
        return f"{link[1]}[{link[2]}]({base}/{kind}/{tag}/{link[3]})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)", absolute, text)


def links() -> dict[str, str]:
    base = os.environ.get("DPCORE_URL", "").rstrip("/")
    if not base:
        return {}
    pages = {"Documentation": "/tree/main/docs", "Changelog": "/blob/main/CHANGELOG.md"}
    return {"Source": base, **{name: base + path for name, path in pages.items()}}
