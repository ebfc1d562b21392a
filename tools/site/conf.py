"""The documentation as a site, built by Sphinx: `make docs` (docs/decisions/0032).

Sphinx reads every document where it lies and looks at nothing else. NAVIGATION is the sidebar; a
document that it leaves out stops the build, as does a link that leads nowhere.
"""

from __future__ import annotations

import gc
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
gc.disable()  # it takes 30% of the time that the site takes

NAVIGATION = {  # in the groups of docs/README.md
    "dpcore": "docs/README docs/install CHANGELOG",
    "How it works, in 24 pages": "docs/learn/*",
    "Learn": """docs/exercises docs/course docs/teach docs/answers docs/research docs/slow
        docs/tour""",
    "Do: train": """docs/convert docs/frameworks docs/running docs/network docs/gpu docs/mpi
        docs/torch_distributed docs/compile docs/across_steps docs/local_updates docs/parallel
        docs/virtual_ranks docs/failures docs/recovery""",
    "Do: see and measure": """docs/show docs/monitor docs/compare docs/simulator docs/plans
        docs/noise_scale docs/notebooks""",
    "Look up": """docs/data_parallel docs/own_schedule docs/variables docs/compatibility
        docs/mistakes docs/results/* docs/asked docs/related docs/glossary SECURITY""",
    "API reference": """docs/reference/README docs/reference/start docs/reference/communicators
        docs/reference/data_parallel docs/reference/local_updates docs/reference/figures
        docs/reference/parallel docs/reference/algorithms docs/reference/errors""",
    "Understand": """docs/performance docs/architecture docs/concurrency
        docs/interconnects""",
    "Change it": "CONTRIBUTING tests/README docs/releasing",
    "Decisions": "docs/decisions/README docs/decisions/0*",
}

project = "dpcore"
html_title = "dpcore"
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "tests/README.md"]
folders = [path.name for path in HERE.parents[1].iterdir() if path.is_dir()]
exclude_patterns = [name for name in folders if name not in ("docs", "tests")]  # not walked
extensions = ["myst_parser", "api", "sources"]
myst_heading_anchors = 6
highlight_language = "none"
html_theme = "furo"
html_static_path = ["site.css", "site.js"]
html_js_files = [("site.js", {"defer": "defer"})]
html_css_files = ["site.css"]
html_search_scorer = str(HERE / "search.js")
templates_path = ["templates"]
html_copy_source = False
html_show_sphinx = html_show_copyright = html_use_index = False
smartquotes = False  # quotes and dashes as they were written
toc_object_entries_show_parents = "hide"


def with_navigation(app: Any, name: str, source: list[str]) -> None:
    """Repositories show README as it is, so the sidebar is added to it here."""
    if name == root_doc:
        for title, names in NAVIGATION.items():
            entries = [line for pattern in names.split() for line in documents(app, pattern)]
            tree = "\n".join(["```{toctree}", ":hidden:", f":caption: {title}", *entries, "```"])
            source[0] += f"\n{tree}\n"


def documents(app: Any, pattern: str) -> list[str]:
    """The lessons are numbered: 10 comes after 9."""
    found = [name for name in app.env.found_docs if Path(name).match(pattern)]
    return sorted(found, key=lambda name: (len(name.partition("-")[0]), name)) or [pattern]


def begin_with_readme(app: Any, failure: Exception | None) -> None:
    if failure is None and app.builder.format == "html":
        shutil.copyfile(app.outdir / "README.html", app.outdir / "index.html")


def setup(app: Any) -> None:
    app.connect("source-read", with_navigation)
    app.connect("build-finished", begin_with_readme)
