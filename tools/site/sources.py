"""Pages of the files of code that documents link to, with colours, and of folders, with lists.

So the site is whole without a repository beside it.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx.addnodes import download_reference, pending_xref
from sphinx.util.logging import getLogger

LINK = re.compile(r'(?<=href=")[^":#]+')
PATH = re.compile(r"(?<=<h1>)[\w./-]+(?=</h1>)")  # may break after a slash
INLINE = re.compile(r"(?<!<pre>)<code>")
SIDEBARS: dict[tuple[Any, ...], str] = {}
SHOWN: list[Path] = []  # from the root; grows while pages are written: a folder names its files


def is_document(app: Any, path: Path) -> bool:
    return path.suffix == ".md" and str(path.with_suffix("")) in app.env.found_docs


def address(app: Any, path: Path, page: Path) -> str:
    """Of a file or folder, on `page`; it will have a page."""
    if is_document(app, path):
        path = path.with_suffix("")
    elif not (app.srcdir / path).exists():
        getLogger(__name__).warning("a link to %s, which is not there", path, location=str(page))
    elif path not in SHOWN:
        SHOWN.append(path)
    return os.path.relpath(f"{path}.html", page.parent)


def link_to_code(app: Any, document: nodes.document) -> None:
    """MyST makes downloads of files, and knows neither folders nor READMEs beside the code."""
    here = Path(app.env.docname)
    for node in list(document.findall(lambda n: isinstance(n, (download_reference, pending_xref)))):
        target = node["reftarget"]
        if node.get("refdomain") == "doc":
            target = f"/{target}.md"
        above = Path() if target.startswith("/") else here.parent
        path = Path(os.path.normpath(above / target.lstrip("/")))
        if (app.srcdir / path).exists() and not is_document(app, path):
            link = nodes.reference("", "", *node.children, refuri=address(app, path, here))
            node.replace_self(link)


def pages(app: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    for path in SHOWN:
        body = of_folder(app, path) if (app.srcdir / path).is_dir() else of_file(app, path)
        head = "" if body.startswith("<h1>") else f"<h1>{path}</h1>"
        body = PATH.sub(lambda found: found[0].replace("/", "/<wbr>"), head + body, 1)
        yield str(path), {"title": str(path), "body": body}, "page.html"


def of_folder(app: Any, path: Path) -> str:
    readme = path / "README.md"
    entries = [
        f'<li><a href="{address(app, path / name, path)}">{html.escape(name)}</a></li>'
        for name in sorted(os.listdir(app.srcdir / path))
        if not name.startswith((".", "__pycache__", "README.md"))
    ]
    above = of_file(app, readme) if (app.srcdir / readme).exists() else ""
    return f"{above}<ul>{''.join(entries)}</ul>"


def of_file(app: Any, path: Path) -> str:
    text = (app.srcdir / path).read_text(encoding="utf-8")
    if path.suffix == ".md":

        def there(link: re.Match[str]) -> str:
            return address(app, Path(os.path.normpath(path.parent / link[0])), path)

        body = LINK.sub(there, MarkdownIt().enable("table").render(text))
        return INLINE.sub('<code class="literal">', body)
    try:
        lexer = get_lexer_for_filename(path.name)
    except ClassNotFound:
        lexer = TextLexer()
    return str(highlight(text, lexer, HtmlFormatter()))


def once_for_a_folder(app: Any, page: str, template: str, context: Any, document: Any) -> None:
    """Making the sidebar takes most of the time of a page. It does not list pages of code, so those
    of a folder have the same one."""
    if document is None and page in map(str, SHOWN):
        make, folder = context["toctree"], os.path.dirname(page)

        def toctree(**options: Any) -> str:
            key = (folder, *sorted(options.items()))
            if key not in SIDEBARS:
                SIDEBARS[key] = make(**options)
            return SIDEBARS[key]

        context["toctree"] = toctree


def setup(app: Any) -> None:
    app.connect("html-page-context", once_for_a_folder, priority=400)  # before the theme asks
    app.connect("doctree-read", link_to_code, priority=400)  # before files are noted as downloads
    app.connect("html-collect-pages", pages)
