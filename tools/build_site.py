"""Builds the documentation as a site: python tools/build_site.py [folder]

Every Markdown file of docs/, README, CHANGELOG, CONTRIBUTING and SECURITY becomes a page. A link to
a file of the code becomes a page of that file with its colours, one to a folder its README and a
list of what is in it, so the site is whole without a repository beside it. A link that leads
nowhere stops the build, as does a document that is no page.
"""

from __future__ import annotations

import html
import os
import re
import shutil
import sys
from pathlib import Path

from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_by_name, get_lexer_for_filename
from pygments.util import ClassNotFound

ROOT = Path(__file__).resolve().parent.parent
USED = (
    "convert",
    "data_parallel",
    "across_steps",
    "local_updates",
    "noise_scale",
    "monitor",
    "notebooks",
    "parallel",
    "torch_distributed",
    "backends",
    "frameworks",
    "running",
    "compatibility",
    "network",
    "interconnects",
    "gpu",
    "mpi",
    "variables",
    "failures",
    "performance",
    "compare",
    "show",
)
CONTENTS = (
    ("dpcore", ("README.md", "docs/why.md", "docs/tour.md", "docs/glossary.md", "CHANGELOG.md")),
    ("How data parallel training works", "docs/learn/*.md"),
    ("Learn by doing, and teach", ("docs/course.md", "docs/exercises.md", "docs/teach.md")),
    ("Use it", (*(f"docs/{name}.md" for name in USED), "SECURITY.md")),
    (
        "How it is made",
        ("docs/architecture.md", "docs/concurrency.md", "CONTRIBUTING.md", "docs/releasing.md"),
    ),
    ("Decisions", "docs/decisions/*.md"),
)
LINK = re.compile(r'(href|src)="([^"]+)"')
HEADING = re.compile(r"<h([1-6])>(.*?)</h\1>", re.DOTALL)
IMAGES = (".png", ".svg")
STYLE = Path(__file__).with_name("site.css")


class Broken(SystemExit):
    """A link that leads nowhere, or a document that nothing leads to."""


def pages() -> list[tuple[str, list[Path]]]:
    def first_the_list(path: Path) -> tuple[bool, int, str]:
        number = re.match(r"\d+", path.name)  # 10 comes after 9
        return path.name != "README.md", int(number[0]) if number else 0, path.name

    return [
        (title, sorted(ROOT.glob(names), key=first_the_list))
        if isinstance(names, str)
        else (title, [ROOT / name for name in names])
        for title, names in CONTENTS
    ]


def colours(code: str, language: str, _attributes: str = "") -> str:
    try:
        lexer = get_lexer_by_name(language)
    except ClassNotFound:
        lexer = TextLexer()
    return str(highlight(code, lexer, HtmlFormatter(nowrap=True)))


def _colours_of_code() -> str:
    light, dark = (
        str(HtmlFormatter(style=name).get_style_defs(["pre code", ".highlight"]))
        for name in ("default", "github-dark")
    )
    return f"{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n"


def with_places(body: str) -> str:
    """Headings can be linked to: by their words, as on the usual sites for repositories."""
    return HEADING.sub(lambda m: f'<h{m[1]} id="{anchor_of(m[2])}">{m[2]}</h{m[1]}>', body)


def anchor_of(heading: str) -> str:
    words = html.unescape(re.sub(r"<[^>]+>", "", heading)).strip().lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def title_of(path: Path) -> str:
    first = re.search(r"^# (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return first[1].replace("`", "") if first else path.stem


class Site:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.contents = pages()
        self.known = {path for _, paths in self.contents for path in paths}
        self.sources: list[Path] = []  # grows while they are written: a folder names its files
        options = {"html": True, "highlight": colours}
        self.markdown = MarkdownIt("commonmark", options).enable("table")
        self.bodies = {path: self.rendered(path) for path in self.known}

    def rendered(self, path: Path) -> str:
        return with_places(self.markdown.render(path.read_text(encoding="utf-8")))

    def build(self) -> int:
        shutil.rmtree(self.folder, ignore_errors=True)
        for path in (ROOT / "docs").rglob("*.md"):
            if path not in self.known:
                raise Broken(f"{path.relative_to(ROOT)} is on no page: name it in CONTENTS")
        for path, body in self.bodies.items():
            self.write(path, title_of(path), LINK.sub(lambda m, p=path: self.link(m, p), body))
        for path in self.sources:
            self.write(path, path.relative_to(ROOT).as_posix(), self.source(path))
        shutil.copyfile(self.page_of(ROOT / "README.md"), self.folder / "index.html")
        return len(self.known) + len(self.sources)

    def page_of(self, path: Path) -> Path:
        name = path.relative_to(ROOT)
        return self.folder / name.with_name(name.name.removesuffix(".md") + ".html")

    def link(self, match: re.Match[str], page: Path) -> str:
        """A link of a page, to where its target is in the site."""
        kind, target = match.groups()
        address, _, anchor = target.partition("#")
        if "://" in target:
            return match[0]
        path = (page.parent / address).resolve() if address else page
        if (path / "README.md") in self.known and path != ROOT:
            path /= "README.md"
        there = path.exists() and ROOT in path.parents
        if there and anchor and path in self.known:
            there = f'id="{anchor}"' in self.bodies[path]
        if not there:
            raise Broken(f"{page.relative_to(ROOT)}: the link {target} leads nowhere")
        if not address:
            return match[0]
        if kind == "src" or path.suffix in IMAGES:
            copy = self.folder / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        else:
            copy = self.page_for(path)
        relative = os.path.relpath(copy, self.page_of(page).parent)
        return f'{kind}="{relative}{"#" + anchor if anchor else ""}"'

    def page_for(self, path: Path) -> Path:
        """Its page, which there will be."""
        if path not in self.known and path not in self.sources:
            self.sources.append(path)
        return self.page_of(path)

    def listed(self, folder: Path) -> str:
        """What is in a folder, each with its page; of a document its title. The folder's README,
        which has no links, stands above."""
        lines = []
        for path in sorted(folder.iterdir()):
            if path.name.startswith((".", "__pycache__")) or path.suffix in IMAGES:
                continue
            if path.name == "README.md" and path not in self.known:  # it stands above the list
                continue
            name = html.escape(title_of(path) if path in self.known else path.name)
            target = os.path.relpath(self.page_for(path), self.page_of(folder).parent)
            lines.append(f'<li><a href="{target}">{name}</a></li>')
        return f"<ul>{''.join(lines)}</ul>"

    def source(self, path: Path) -> str:
        if path.is_dir():
            readme = path / "README.md"
            return (self.rendered(readme) if readme.exists() else "") + self.listed(path)
        try:
            lexer = get_lexer_for_filename(path.name)
        except ClassNotFound:
            lexer = TextLexer()
        return str(highlight(path.read_text(encoding="utf-8"), lexer, HtmlFormatter()))

    def write(self, path: Path, title: str, body: str) -> None:
        target = self.page_of(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        style = _colours_of_code() + STYLE.read_text()
        head = "" if "<h1" in body else f"<h1>{html.escape(title)}</h1>"
        target.write_text(
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{html.escape(title)} · dpcore</title><style>{style}</style></head><body>"
            f"<nav>{self.navigation(path)}</nav><main>{head}{body}</main></body></html>",
            encoding="utf-8",
        )

    def navigation(self, here: Path) -> str:
        parts = []
        for heading, paths in self.contents:
            parts.append(f"<h2>{heading}</h2>")
            for path in paths:
                target = os.path.relpath(self.page_of(path), self.page_of(here).parent)
                mark = ' class="here"' if path == here else ""
                parts.append(f'<a href="{target}"{mark}>{html.escape(title_of(path))}</a>')
        return "".join(parts)


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "build/site").resolve()
    print(f"{Site(target).build()} pages, begin with {target / 'index.html'}")
