"""Count the words that docs/writing.md replaces, per room, and class names that stand for more than one class.

``python tests/house/prose.py`` prints the counts per 10,000 words. ``--lower`` lowers the limits in ``prose.json`` to them.
``--show ROW [ROOM]`` prints file, line and text of each.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tree import ROOT

LIMITS = Path(__file__).with_name("prose.json")
"""The most that may stand in each room: a count may only fall."""
LOCALS = "vague locals"
"""Row of the assignments to ``VAGUE``."""
VAGUE = frozenset({"one", "found", "told", "held", "said", "at", "there"})
PROXIED = r"(?: (?:a|an|the|its|their|your|this|that|such a|nginx|TLS|NAT))?(?: [A-Za-z0-9-]+)? ?(?:proxy|proxies|balancer|gateway|firewall|nginx|NAT|TLS)"

ROWS: dict[str, str] = {
    "tell, say": r"\b(?:tell|tells|told|telling|say|says|said|saying)\b",
    "hear": r"\b(?:hear|hears|heard|hearing)\b",
    "behind": rf"\bbehind\b(?!{PROXIED})|\bin front of\b",
    "nobody, somebody, whoever": r"\b(?:nobody|somebody|whoever)\b",
    "go on": r"\b(?:go|goes|going|gone|went) on\b(?! to\b)",
    "anew": r"\banew\b",
    "as it is": r"\bas (?:it|they) (?:is|was|are|were)\b",
    "so many": r"\"\"\"So (?:many|much|long|often|far|few)\b",
    "of which, whose": r"\b(?:of which|of whom|whose)\b",
    "that is none": r"\b(?:that|what|which) (?:is|are) (?:no|none)\b",
    "comes to, came of": r"\b(?:come|comes|came|coming) (?:of|to)\b",
    "worked out": r"\b(?:work|works|worked|working) (?:it |them )?out\b",
    "lie": r"\b(?:lie|lies|lay|lain)\b",
    "is to": r"\b(?:is|are|was|were) to (?!the\b|a\b|an\b)[a-z]+",
    "beside": r"\bbesides?\b",
    "mend": r"\bmend(?:s|ed|ing)?\b",
    "pass over": r"\bpass(?:es|ed|ing)? over\b",
    "to be had": r"\bto be had\b",
    "for want of": r"\bfor want of\b",
    "in the midst of": r"\bin the midst of\b",
    "call off": r"\bcall(?:s|ed|ing)? off\b",
    "deal out": r"\b(?:deal|deals|dealt|dealing)\b",
    "reckon": r"\breckon(?:s|ed|ing)?\b",
    "look": r"\b(?:look|looks|looked|looking)\b(?! like\b)",
}
"""What a row counts, in text of which identifiers were split into their words. docs/writing.md names the plain word of each."""

_PATTERNS = {row: re.compile(pattern, re.IGNORECASE) for row, pattern in ROWS.items()}
_IDENTIFIER = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|_+")
_WORD = re.compile(r"[A-Za-z][A-Za-z']*")
_OWN_PAGES = ("docs/writing.md", "docs/notes/040-plain-words.md", "tests/house/prose.py", "tests/house/test_prose.py")
"""Files that quote the words in order to replace them."""


class Hit(NamedTuple):
    """One place that a row counts."""

    room: str
    row: str
    file: str
    line: int
    text: str


@cache
def files() -> dict[str, list[Path]]:
    """Return the files of each room: a folder of the package, ``package`` for the files at its top, proofs, tests, benchmarks, examples, docs, notes."""
    rooms: dict[str, list[Path]] = {}
    for path in sorted(ROOT.glob("src/relight/**/*.py")):
        parts = path.relative_to(ROOT / "src/relight").parts
        rooms.setdefault(parts[0] if len(parts) > 1 else "package", []).append(path)
    for room in ("proofs", "tests", "benchmarks", "examples"):
        rooms[room] = sorted(ROOT.glob(f"{room}/**/*.py"))
    rooms["notes"] = sorted(ROOT.glob("docs/notes/*.md"))
    rooms["docs"] = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/guides/*.md")])
    return {
        room: [path for path in paths if str(path.relative_to(ROOT)) not in _OWN_PAGES] for room, paths in rooms.items()
    }


@cache
def hits() -> tuple[tuple[Hit, ...], dict[str, int]]:
    """Return every place that a row counts, and the number of words of each room. Cost: reads the whole tree once."""
    places: list[Hit] = []
    words: Counter[str] = Counter()
    for room, paths in files().items():
        for path in paths:
            source, name = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
            for number, line in enumerate(source.splitlines(), 1):
                text = _IDENTIFIER.sub(" ", line)
                words[room] += len(_WORD.findall(text))
                for row, pattern in _PATTERNS.items():
                    places += [Hit(room, row, name, number, line.strip()) for _ in pattern.finditer(text)]
            if path.suffix == ".py":
                places += [Hit(room, LOCALS, name, line, text) for line, text in _vague_locals(source)]
    return tuple(places), dict(words)


def counts() -> dict[str, dict[str, int]]:
    """Return the count of each row in each room, without zeros."""
    found: dict[str, Counter[str]] = {room: Counter() for room in files()}
    for hit in hits()[0]:
        found[hit.room][hit.row] += 1
    return {room: dict(sorted(rows.items())) for room, rows in sorted(found.items())}


def repeated_classes() -> dict[str, list[str]]:
    """Return the names that stand for more than one class of the package and its proofs, each with the files that define it."""
    places: dict[str, list[str]] = {}
    for path in sorted([*ROOT.glob("src/relight/**/*.py"), *ROOT.glob("proofs/**/*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


def _vague_locals(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE:
            yield node.lineno, node.id


def main(arguments: list[str]) -> None:
    """Print the counts, show places, or lower the limits."""
    if arguments[:1] == ["--show"]:
        row, room = arguments[1], (arguments[2] if len(arguments) > 2 else None)
        for hit in hits()[0]:
            if hit.row == row and room in (None, hit.room):
                print(f"{hit.file}:{hit.line}: {hit.text}")
        return
    found, words = counts(), hits()[1]
    if arguments[:1] == ["--lower"]:
        old = json.loads(LIMITS.read_text()) if LIMITS.exists() else {"rows": {}, "classes": []}
        rows = {
            room: {row: min(number, old["rows"].get(room, {}).get(row, number)) for row, number in rows.items()}
            for room, rows in found.items()
        }
        LIMITS.write_text(json.dumps({"rows": rows, "classes": sorted(repeated_classes())}, indent=1) + "\n")
    total = sum(words.values())
    for row in [*ROWS, LOCALS]:
        number = sum(rows.get(row, 0) for rows in found.values())
        worst = sorted(found, key=lambda room: -found[room].get(row, 0))[:4]
        print(
            f"{row:28} {number:6} {10_000 * number / total:7.1f}   "
            + ", ".join(f"{room} {found[room].get(row, 0)}" for room in worst)
        )
    print(f"{'class names defined twice':28} {len(repeated_classes()):6}   {total} words")


if __name__ == "__main__":
    main(sys.argv[1:])
