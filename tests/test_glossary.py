"""docs/glossary.md defines the nouns that csrc's classes are named after, and no word that is gone.

The head noun of a name is its last word: `Transport` for `TcpTransport` and `MappedTransport`. A
row of the glossary defines it when its term ends with it ("progress lock" defines `ProgressLock`),
in the singular or plural. Only classes of a namespace count: one within a class is explained there.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"
CLASS = re.compile(  # but not where it is only declared
    r"^(?:class|struct|enum(?: class)?) (?:alignas\(.*?\) )?([A-Z]\w*)\b(?! *;)", re.M
)
WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+[0-9]*|[A-Z]+[0-9]*")


def text_of(folder, *endings):
    paths = (path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in endings)
    return "\n".join(path.read_text() for path in paths if path != GLOSSARY)


def words_of(text):
    """Lower case and singular: "ProgressLocks" and "progress_lock" are both progress, lock."""
    return [singular(word.lower()) for word in WORD.findall(text)]


def singular(word):
    for ending, instead in ("ies", "y"), ("xes", "x"), ("ss", "ss"), ("us", "us"), ("s", ""):
        if word.endswith(ending):
            return word.removesuffix(ending) + instead
    return word


def defined(glossary):
    """The terms of all tables, one or several in a row, without what stands in brackets."""
    rows = re.findall(r"^\| (?!word \|)(.+?) \|", glossary, re.M)
    return [term.strip() for row in rows for term in re.sub(r"\(.*?\)|[`*]", "", row).split(",")]


def undefined(headers, terms):
    """name of a class -> its head noun, for those that no term ends with."""
    heads = {words_of(term)[-1] for term in terms}
    nouns = {name: words_of(name)[-1] for name in CLASS.findall(headers)}
    return {name: noun for name, noun in nouns.items() if noun not in heads}


def unused(terms, text):
    """Terms whose words never stand behind each other, be it in prose or in a name."""
    used = f" {' '.join(words_of(text))} "
    return [term for term in terms if f" {' '.join(words_of(term))} " not in used]


def test_every_head_noun_of_a_class_is_in_the_glossary():
    missing = undefined(text_of("csrc", ".h", ".cuh"), defined(GLOSSARY.read_text()))
    assert not missing, "\n".join(
        f"{name}: no term in docs/glossary.md ends with '{noun}'; add a row, or use a word it has"
        for name, noun in missing.items()
    )


def test_every_word_of_the_glossary_is_used():
    text = text_of("csrc", ".h", ".cuh", ".cpp", ".cu", ".inl") + text_of("dpcore", ".py", ".pyi")
    left = unused(defined(GLOSSARY.read_text()), text + text_of("docs", ".md"))
    assert not left, f"docs/glossary.md defines words that nothing uses any more: {left}"


def test_both_see_what_is_wrong():
    terms = defined(
        "| word | meaning |\n|---|---|\n| progress lock | x |\n| arena, `seat` (of y) | |"
    )
    assert terms == ["progress lock", "arena", "seat"]
    headers = (
        "class ProgressLock {\nstruct alignas(64) Arenas : Base {\nstruct Later;\nclass Lobby {"
    )
    assert undefined(headers, terms) == {"Lobby": "lobby"}
    assert unused(terms, "ProgressLock lock;  // of two arenas") == ["seat"]
