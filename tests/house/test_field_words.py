"""A search for a word of the field finds the file: by the file's name, or by a class in it. The page of the design lists them."""

from __future__ import annotations

import re

import pytest
from tree import PRODUCT, PROOFS, ROOT, page

WORDS = (
    "heartbeat", "rollback", "retry", "grace period", "handover", "serializer", "cost model", "simulator", "importer", "integration",
    "monitoring", "prediction", "communicator", "in-flight save", "tier replication", "incremental writer", "chunk index",
    "auth middleware", "alert delivery", "incident log",
)  # fmt: skip
"""What an engineer who has never seen Relight would search for."""
BY_ANOTHER_NAME = {"serializer", "retention", "resharding plan", "write-ahead log"}
"""Terms for which the page is the way to the file: its name is another term of the field."""


def rows() -> dict[str, str]:
    """Return the file of each term in the page's table."""
    return {term: file for term, file, _ in entries()}


def entries() -> list[tuple[str, str, str]]:
    """Return term, file and page of each row of the page's table."""
    table = page("design.md").partition("## Where things are\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| ([^|`]+?) \| `([^`]+)` \| \[[^\]]+\]\(([^)]+)\) \|$", table, re.MULTILINE)


@pytest.mark.parametrize("word", WORDS)
def test_a_word_of_the_field_is_in_the_page(word: str) -> None:
    """Each word of the list stands in the table, or names a room that the page describes."""
    text = page("design.md")
    assert any(word in term for term in rows()) or f"| `{word}` |" in text or f"`{word}/" in text


@pytest.mark.parametrize("term", sorted(rows()))
def test_a_term_leads_to_its_file(term: str) -> None:
    """The file exists, and its path or one of its classes has the term's words."""
    path = (ROOT if rows()[term].startswith(f"{PROOFS.name}/") else PRODUCT) / rows()[term]
    source = path.read_text(encoding="utf-8")
    if BY_ANOTHER_NAME & set(re.split(r", ", term)):
        return
    words = [word[:5] for word in re.findall(r"[a-z]+", term.replace("in-flight save", "inflight"))]
    names = [rows()[term].lower(), *(name.lower() for name in re.findall(r"^class (\w+)", source, re.MULTILINE))]
    assert any(all(word in name for word in words) for name in names), (words, names)


@pytest.mark.parametrize(("term", "file", "where"), entries())
def test_a_term_is_used_on_its_page(term: str, file: str, where: str) -> None:
    """A reader who searches the page of a term finds the term."""
    text = page(where).lower()
    assert all(word.lower() in text for word in term.split(", ")), where


def test_each_row_has_a_page() -> None:
    """No row of the table is left out of these checks."""
    table = page("design.md").partition("## Where things are\n")[2].partition("\n## ")[0]
    assert len(entries()) == table.count("\n| ") - 1
