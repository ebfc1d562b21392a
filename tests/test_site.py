"""The site: a page for every document, no dead link, every public name in the reference."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dpcore as dp

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
NAMED = re.compile(r"^(dpcore\.[\w.]+)(?:\(.*)?$", re.MULTILINE)  # in blocks {api}
PAGES = (ROOT / "docs" / "reference").glob("*.md")
REFERENCE = [name for path in PAGES for name in NAMED.findall(path.read_text())]
needs_sphinx = pytest.mark.skipif(sys.version_info < (3, 11), reason="Sphinx needs Python 3.11")


def build(source, target, *options):
    command = [sys.executable, "-m", "sphinx", "-qEW", "--keep-going", "-c", ROOT / "tools/site"]
    return subprocess.run(
        [*command, *options, "-d", target.parent / "doctrees", source, target],
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    target = tmp_path_factory.mktemp("site") / "site"
    out = build(ROOT, target)
    assert out.returncode == 0, out.stderr
    return target


def test_every_public_name_is_in_the_reference_once():
    assert len(REFERENCE) == len(set(REFERENCE))
    assert set(dp.__all__) - {name.removeprefix("dpcore.") for name in REFERENCE} == {
        "__version__",
        "DistributedDataParallel",  # another name, as its page says
    }


@needs_sphinx
def test_the_reference_in_the_clone_has_the_codes_signatures_and_first_sentences():
    pytest.importorskip("griffe")
    command = [sys.executable, ROOT / "tools" / "reference.py"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert out.returncode == 0, out.stdout + out.stderr + "type: python tools/reference.py --write"
    text = (ROOT / "docs" / "reference" / "communicators.md").read_text()
    assert ".all_reduce(tensor, op='sum', *, async_op=False, algorithm=None" in text
    assert "Combines `tensor` over all ranks; afterwards every rank holds the same result." in text


@needs_sphinx
def test_every_document_has_a_page_and_no_link_is_dead(site):
    for path in DOCS:
        assert "<h1>" in (site / path.relative_to(ROOT).with_suffix(".html")).read_text(), path
    for page in site.rglob("*.html"):
        for target, place in re.findall(r'(?:href|src)="([^"#]*)(#[^"]*)?"', page.read_text()):
            if ":" not in target:
                there = (page.parent / target.partition("?")[0]) if target else page
                assert there.is_file(), (page, target)
                if place and place != "#":
                    assert f'id="{place[1:]}"' in there.read_text(), (page, target, place)


@needs_sphinx
def test_nothing_is_loaded_from_elsewhere(site):
    for page in site.rglob("*.html"):
        assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="https?://', page.read_text())


@needs_sphinx
def test_the_reference_has_signatures_and_docstrings(site):
    assert not [name for name in REFERENCE if f'id="{name}"' not in pages(site, "reference")]
    page = (site / "docs/reference/communicators.html").read_text()
    shown = re.sub(r"<[^>]+>", "", page)
    assert "all_reduce(tensor: Any, op: Operator = 'sum', *, async_op: bool = False" in shown
    assert "Combines tensor over all ranks" in shown
    assert "dpcore.all_reduce(tensor: Any, op: Operator = 'sum'" in shown  # the function
    assert "dpcore.communicator.all_reduce" in (site / "searchindex.js").read_text().lower()


@needs_sphinx
def test_a_search_finds_the_page_with_the_word_in_a_heading_and_knows_where_pages_lie(site):
    text = (site / "searchindex.js").read_text()
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    for word, page in {
        "torchrun": "running", "docker": "running", "fsdp": "torch_distributed",
        "compress": "data_parallel", "benchmark": "performance", "hang": "failures",
    }.items():  # fmt: skip
        found = index["titleterms"][word]
        numbers = found if isinstance(found, list) else [found]
        assert f"docs/{page}" in [index["docnames"][number] for number in numbers], word
    scorer = (ROOT / "tools/site/search.js").read_text()
    assert scorer in (site / "_static/language_data.js").read_text()
    for start in re.findall(r'\["([^"]+)", -?\d+\]', scorer):
        assert any(name.startswith(start) for name in index["docnames"]), start
    assert '<input name="q"' in (site / "search.html").read_text()


def pages(site, folder):
    return "".join(path.read_text() for path in (site / "docs" / folder).glob("*.html"))


@needs_sphinx
def test_a_file_of_code_has_its_colours_and_a_folder_its_list(site):
    algorithms = Path("csrc/comm/schedule/algorithms")
    folder = (site / f"{algorithms}.html").read_text()
    for source in (ROOT / algorithms).glob("*.cpp"):
        assert f'<a href="algorithms/{source.name}.html">{source.name}</a>' in folder
    assert "May include: " in folder  # the README of the folder, above the list
    ring = (site / algorithms / "ring.cpp.html").read_text()
    assert "algorithms/<wbr>ring.cpp</h1>" in ring and '<span class="kt">' in ring


@needs_sphinx
def test_dead_links_and_a_document_outside_the_navigation_stop_the_build(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for path in ROOT.iterdir():
        if not path.name.startswith((".", "build")) and path.name != "docs":
            (source / path.name).symlink_to(path)
    shutil.copytree(ROOT / "docs", source / "docs")
    dead = ["nowhere.md", "../csrc/nowhere.h", "gpu.md#no-such-place", "#no-such-place-here"]
    alive = ["gpu.md#without-nccl-backendcuda", "../csrc/comm/base/error.h", "../tests"]
    lines = [f"[{target}]({target})" for target in [*dead, *alive]]
    (source / "docs" / "astray.md").write_text("\n".join(["# Astray", *lines]))
    out = build(source, tmp_path / "site", "-b", "dummy")
    assert out.returncode == 1
    said = [line for line in out.stderr.splitlines() if "astray.md" in line]
    assert len(said) == len(dead) + 1, out.stderr
    assert "document isn't included in any toctree" in said[0]
    for target, line in zip(dead, said[1:], strict=True):
        assert target.rpartition("/")[2].rpartition("#")[2] in line
