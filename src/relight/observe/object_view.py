"""Views of objects for a shell and a notebook: a line, and a small HTML table, of what is known without reading a store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from relight.observe.masking import mask_text

TEXT_MAX = 200
"""Longest text of one fact, in characters: names and metrics come from a store."""
_CELL = "text-align:left;padding:0.1em 1em 0.1em 0;background:none;vertical-align:top;white-space:nowrap"


class Facts(NamedTuple):
    """What is known of an object: its name, and pairs of a short name and a value. Empty and None values are left out."""

    name: str
    pairs: Sequence[tuple[str, object]] = ()

    @property
    def texts(self) -> list[tuple[str, str]]:
        """The pairs that have a value, as short printable texts."""
        return [(name, printable(value)) for name, value in self.pairs if value not in ("", None)]


class ObjectView:
    """Base of objects with a ``repr`` and an HTML table of the same facts. Both are cheap: neither waits, reads or raises."""

    __slots__ = ()

    def _facts(self) -> Facts:
        """Return what is known now."""
        raise NotImplementedError

    def _facts_if_made(self) -> Facts:
        try:
            return self._facts()
        except Exception as error:  # noqa: BLE001 - a debugger shows objects that are half made
            return Facts(f"({type(error).__name__})")

    def __repr__(self) -> str:
        facts = self._facts_if_made()
        pairs = ", ".join(f"{name} {text}" for name, text in facts.texts)
        return f"<{type(self).__name__} {printable(facts.name)}{': ' if pairs else ''}{pairs}>"

    def _repr_html_(self) -> str:
        facts = self._facts_if_made()
        return html_table(f"{type(self).__name__} {printable(facts.name)}", (), facts.texts)


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table for a notebook, with escaped texts. Without ``columns``, the first cell of each row is its heading.

    It has no colours, so that it is readable in dark and in light themes.
    """

    def cell(tag: str, text: object) -> str:
        return f'<{tag} style="{_CELL}">{escape(printable(text))}</{tag}>'

    lines = ["".join(cell("th", column) for column in columns)] if columns else []
    for first, *rest in rows:
        lines.append(cell("td" if columns else "th", first) + "".join(cell("td", text) for text in rest))
    body = "".join(f'<tr style="background:none">{line}</tr>' for line in lines)
    return f'<div><b>{escape(printable(title))}</b><table style="margin:0.3em 0">{body}</table></div>'


def printable(value: object) -> str:
    """Return a value as a short text without control characters and without secrets of an address."""
    text = mask_text(str(value))
    text = text if len(text) <= TEXT_MAX else f"{text[: TEXT_MAX - 1]}…"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
