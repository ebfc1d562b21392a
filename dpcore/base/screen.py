"""Shows a page to the user, in a notebook or in a browser."""

from __future__ import annotations

import sys
import tempfile
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Replaces show() on ranks of a notebook that are separate processes.
other: Callable[[Any], None] | None = None


def show(page: str, shown_in_notebooks: Any) -> None:
    """Shows the object below a notebook's cell, else the page in a browser, or prints its path."""
    if other is not None:
        other(shown_in_notebooks)
        return
    if _in_notebook():
        sys.modules["IPython.display"].display(shown_in_notebooks)
        return
    # The file is kept: the browser reads it later, and earlier pages may still be open.
    with tempfile.NamedTemporaryFile(
        "w", prefix="dpcore-", suffix=".html", delete=False, encoding="utf-8"
    ) as file:
        file.write(page)
    path = Path(file.name)
    if not webbrowser.open(path.as_uri()):
        print(f"no browser here; the page is {path}")


def _in_notebook() -> bool:
    """Whether IPython runs with something that can show HTML, as Jupyter's kernels do."""
    if "IPython.display" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and hasattr(shell, "kernel")
