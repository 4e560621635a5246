"""Plain words: what docs/writing.md replaces may only become rarer."""

from __future__ import annotations

import json

import pytest
from prose import LIMITS, ROWS, counts, files, hits, repeated_classes

SHOWN = 12
ALLOWED = json.loads(LIMITS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("room", sorted(files()))
def test_words_become_rarer(room: str) -> None:
    """No row of docs/writing.md's table stands more often in a room than ``prose.json`` allows."""
    allowed = ALLOWED["rows"].get(room, {})
    excess = {
        row: number - allowed.get(row, 0) for row, number in counts()[room].items() if number > allowed.get(row, 0)
    }
    places = [f"{hit.file}:{hit.line}: {hit.text[:120]}" for hit in hits()[0] if hit.room == room and hit.row in excess]
    assert not excess, (
        f"{room}: {excess} more than allowed. Write the plain word of docs/writing.md in the lines you added "
        f"(python tests/house/prose.py --show ROW {room}):\n" + "\n".join(places[-SHOWN:])
    )


def test_class_names_are_unique() -> None:
    """No further class name stands for two classes."""
    new = {name: where for name, where in repeated_classes().items() if name not in ALLOWED["classes"]}
    assert not new, f"one name for one thing: rename {new}"


def test_rows_are_on_the_page() -> None:
    """docs/writing.md has a line for each row that is counted."""
    page = (LIMITS.parents[2] / "docs" / "writing.md").read_text(encoding="utf-8")
    assert [row for row in ROWS if not any(word in page for word in row.split(", "))] == []


def test_the_count_sees_a_word() -> None:
    """A word of the table is counted in text, in a docstring and in the middle of a name; a reverse proxy is not counted."""
    from prose import _IDENTIFIER, _PATTERNS

    seen = {
        row
        for row, pattern in _PATTERNS.items()
        if pattern.search(_IDENTIFIER.sub(" ", "def isToldBehind(one): pass_over_it = anew"))
    }
    assert seen == {"tell, say", "behind", "pass over", "anew"}
    assert not _PATTERNS["behind"].search("run it behind a TLS proxy, or behind nginx")
