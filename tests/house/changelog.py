"""Collect the fragments of the changelog, by kind.

``python tests/house/changelog.py`` prints them as one Markdown section for each kind, for ``CHANGELOG.md``.
"""

from __future__ import annotations

from pathlib import Path

from tree import ROOT

FOLDER = ROOT / "changelog.d"
KINDS = ("added", "changed", "removed", "fixed", "security")
"""The kinds of fragments, in the order of their sections (https://keepachangelog.com)."""


def fragments(folder: Path = FOLDER) -> list[Path]:
    """Return the fragments of a folder, sorted by name: every file except its page ``README.md``."""
    return sorted(path for path in folder.iterdir() if path.name != "README.md")


def kind_of(fragment: Path) -> str:
    """Return a fragment's kind, from a name of the form ``WHAT.KIND.md``. Any other name is a ``ValueError``."""
    what, *rest = fragment.name.split(".")
    if not what or len(rest) != 2 or rest[0] not in KINDS or rest[1] != "md":
        raise ValueError(
            f"naming a fragment failed: {fragment.name} is not WHAT.KIND.md, with KIND one of {', '.join(KINDS)}"
        )
    return rest[0]


def collect(folder: Path = FOLDER) -> str:
    """Return one section for each kind that has fragments. Links are relative to the parent folder, where the changelog is."""
    texts: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for fragment in fragments(folder):
        text = fragment.read_text(encoding="utf-8").strip()
        texts[kind_of(fragment)].append(text.replace("](../", "]("))
    return "\n\n".join(f"### {kind.capitalize()}\n\n" + "\n".join(texts[kind]) for kind in KINDS if texts[kind]) + "\n"


if __name__ == "__main__":
    print(collect(), end="")
