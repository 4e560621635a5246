"""Table of a run's checkpoints: a line for each, as wide as the terminal, with a column for each metric."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from shutil import get_terminal_size
from typing import Any

import click

from relight.cli.output import escape, paint, since, width_of
from relight.errors import ConfigError
from relight.units import percent_text, size_text

Row = dict[str, Any]
"""A checkpoint's fields, as ``--json`` has them."""
DROPPED = ("new", "reason", "size", "tags", "saved")
"""Columns that a terminal too narrow for all of them loses, in this order. Metrics give way before that, down to one column."""
_LEAST = {"reason": 16, "tags": 10, "flags": 10}
"""Least width to which a column of free text is shortened."""
_RIGHT = ("step", "size", "new")
_HEADING_MAX = 16


def number_text(value: Any) -> str:
    """Return a metric with four significant digits, and without an exponent from 0.0001 to a million; "–" if there is none."""
    if value is None:
        return "–"
    number = float(value)
    if not math.isfinite(number):
        return str(number)
    if 1000 <= abs(number) < 1e6:
        return f"{number:.0f}"
    return f"{number:.4g}"


def flags_of(row: Row) -> str:
    """Return what is special about a checkpoint; damage comes first."""
    flags = [
        "DAMAGED" if row["damaged"] else "",
        "suspect" if row["suspect"] else "",
        "set aside" if row["set_aside"] else "",
        f"in {row['home']}" if row["home"] else "",
        f"needs {len(row['requires'])}" if row["requires"] else "",
        f"lossy, ±{percent_text(row['lossy'])}" if row["lossy"] else "",
    ]
    return " ".join(filter(None, flags))


_TEXTS: dict[str, Callable[[Row], str]] = {
    "id": lambda row: row["id"],
    "step": lambda row: str(row["step"]),
    "saved": lambda row: since(row["created"]),
    "size": lambda row: size_text(row["stored_bytes"]),
    "new": lambda row: size_text(row["new_bytes"]),
    "reason": lambda row: row["reason"],
    "tags": lambda row: " ".join(row["tags"]),
    "flags": flags_of,
}
"""Text of each column that is not a metric; constant."""
_KEYS: dict[str, Callable[[Row], Any]] = {
    "step": lambda row: row["step"],
    "saved": lambda row: row["created"],
    "size": lambda row: row["stored_bytes"],
}
"""Columns that ``--sort`` takes next to the metrics; constant."""


def metrics_of(rows: Sequence[Row], first: str | None = None) -> list[str]:
    """Return the names of the metrics, the newest checkpoint's first. ``first``: the metric that the run itself goes by."""
    names = dict.fromkeys(name for row in reversed(rows) for name in row["metrics"])
    return sorted(names, key=lambda name: name != first)


def sorted_rows(rows: list[Row], by: str) -> list[Row]:
    """Return the rows in the order of ``by``, a column or a metric; ``-`` before it: the largest first. Rows without a value are last."""
    name, down = (by[1:], True) if by.startswith("-") else (by, False)
    metrics = metrics_of(rows)
    if name in _KEYS:
        return sorted(rows, key=_KEYS[name], reverse=down)
    if name not in metrics and rows:
        raise _unknown("--sort", name, [*_KEYS, *metrics])
    known = [row for row in rows if not math.isnan(_metric(row, name))]
    rest = [row for row in rows if math.isnan(_metric(row, name))]
    return [*sorted(known, key=lambda row: _metric(row, name), reverse=down), *rest]


def _metric(row: Row, name: str) -> float:
    return float(row["metrics"].get(name, math.nan))


def _unknown(option: str, name: str, known: list[str]) -> ConfigError:
    close = get_close_matches(name, known, n=3)
    near = f"did you mean {' or '.join(close)}? " if close else ""
    shown = ", ".join(known[:16]) + (f" and {len(known) - 16} more" if len(known) > 16 else "")
    return ConfigError(f"{option}: there is no column {name[:80]!r}", hint=f"{near}there are {shown}")


def print_table(rows: list[Row], chosen: Sequence[str] = (), first: str | None = None) -> None:
    """Print the rows. ``chosen``: columns by name, which are never dropped; "metrics" stands for all metrics.

    On a terminal, a row takes one line: as many metrics as fit are shown, texts are shortened with …, and if that does not suffice, columns
    are left out in the order of ``DROPPED``. In a pipe nothing is cut.
    """
    metrics = metrics_of(rows, first)
    columns = _columns(rows, chosen, metrics)
    texts = {name: [escape(_TEXTS[name](row)) for row in rows] for name in columns if name in _TEXTS}
    texts |= {name: [number_text(row["metrics"].get(name)) for row in rows] for name in columns if name not in _TEXTS}
    headings = {name: escape(name) for name in columns}
    if sys.stdout.isatty():
        terminal = get_terminal_size().columns
        headings = {name: name if name in _TEXTS else _end(text, _HEADING_MAX) for name, text in headings.items()}
        natural = {name: max(width_of(headings[name]), *map(width_of, texts[name])) for name in columns}
        columns, widths, hidden = _fit(columns, natural, metrics, terminal, droppable=not chosen)
    else:
        widths = {name: max(width_of(headings[name]), *map(width_of, texts[name])) for name in columns}
        hidden = 0
    right = {name for name in columns if name in _RIGHT or name not in _TEXTS}
    more = next((i + 1 for i in reversed(range(len(columns))) if columns[i] not in _TEXTS), 0) if hidden else 0
    note = f"+{hidden}"

    def line(cells: list[tuple[str, str, str]], extra: str) -> str:
        """Return a line of ``(column, text, style)``, with ``extra`` after the metrics."""
        padded = []
        for name, text, style in cells:
            shown = _start(text, widths[name])
            space = " " * (widths[name] - width_of(shown))
            padded.append(space + _styled(shown, style) if name in right else _styled(shown, style) + space)
        if hidden:
            padded.insert(more, extra)
        return "  ".join(padded).rstrip()

    lines = [line([(name, headings[name], "bold") for name in columns], _styled(note, "bold"))]
    for i, row in enumerate(rows):
        styles = {"flags": "red" if row["damaged"] else "yellow", "tags": "green"}
        cells = [
            (name, texts[name][i], "red" if name == "id" and row["damaged"] else styles.get(name, ""))
            for name in columns
        ]
        lines.append(line(cells, " " * len(note)))
    click.echo("\n".join(lines))


def _columns(rows: list[Row], chosen: Sequence[str], metrics: list[str]) -> list[str]:
    """Return the names of the columns to show: those chosen, else all that have content."""
    damaged = any(row["damaged"] for row in rows)
    if chosen:
        for name in chosen:
            if name not in _TEXTS and name not in metrics and name != "metrics":
                raise _unknown("--columns", name, [*_TEXTS, "metrics", *metrics])
        named = [other for name in chosen for other in (metrics if name == "metrics" else [name])]
        return list(dict.fromkeys([*named, *(["flags"] if damaged else [])]))
    columns = ["id", "step", "saved", "size"]
    if any(row["new_bytes"] != row["stored_bytes"] for row in rows):
        columns.append("new")
    columns += ["reason", *(name for name in metrics if name not in _TEXTS)]
    return columns + [name for name in ("tags", "flags") if any(_TEXTS[name](row) for row in rows)]


def _fit(
    columns: list[str], natural: dict[str, int], metrics: list[str], terminal: int, *, droppable: bool
) -> tuple[list[str], dict[str, int], int]:
    """Return the columns that fit into ``terminal`` columns, their widths, and how many metrics are left out."""
    least = {name: min(width, _LEAST.get(name, width)) for name, width in natural.items()}
    shown = [name for name in columns if name not in metrics or name in _TEXTS]
    wanted = [name for name in columns if name not in shown]

    def total(names: Sequence[str], hidden: int) -> int:
        note = 2 + len(f"+{hidden}") if hidden else 0
        return sum(least[name] + 2 for name in names) - 2 + note

    if not droppable:
        kept = wanted
    else:
        kept = wanted[:1]
        for name in DROPPED:
            if total([*shown, *kept], len(wanted) - len(kept)) > terminal and name in shown:
                shown.remove(name)
        if total([*shown, *kept], len(wanted) - len(kept)) > terminal:
            kept = []
        while len(kept) < len(wanted) and kept:
            if total([*shown, *wanted[: len(kept) + 1]], len(wanted) - len(kept) - 1) > terminal:
                break
            kept = wanted[: len(kept) + 1]
    result = [name for name in columns if name in shown or name in kept]
    hidden = len(wanted) - len(kept)
    room = terminal - total(result, hidden)
    widths = {name: least[name] for name in result}
    for name in ("flags", "tags", "reason"):
        if name in widths and room > 0:
            added = min(room, natural[name] - widths[name])
            widths[name] += added
            room -= added
    return result, widths, hidden


def _start(text: str, width: int) -> str:
    """Return the text, or its beginning and … if it is wider than ``width``."""
    if width_of(text) <= width:
        return text
    while text and width_of(text) > width - 1:
        text = text[:-1]
    return f"{text.rstrip()}…"


def _end(text: str, width: int) -> str:
    """Return the text, or … and its end if it is wider than ``width``: names of metrics often begin alike."""
    if width_of(text) <= width:
        return text
    while text and width_of(text) > width - 1:
        text = text[1:]
    return f"…{text}"


def _styled(text: str, style: str) -> str:
    return paint(text, style) if style and text else text
