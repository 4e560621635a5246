"""Output of commands: tables for people, JSON for programs.

Text from a store is untrusted: ``escape`` it before it is printed. On a terminal, tables fit its width and have colour (rich, imported only
then). In a pipe they are plain, aligned and uncut.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import click

from relight.errors import RelightError
from relight.run_names import shown as with_names
from relight.units import age_text


class Styled(NamedTuple):
    """A table cell with a colour, which is used on a terminal only."""

    text: object
    style: str


_ON_DISK = frozenset({"file", "path", "dir"})
"""Fields with raw paths on disk. In other fields, directories of runs are replaced by the runs' names."""


def emit_json(value: Any) -> None:
    """Print ``value`` as indented, strict ASCII JSON on stdout. NaN and infinities become the strings "nan", "inf" and "-inf"."""
    click.echo(json.dumps(_strict(value), indent=2, allow_nan=False))


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {
            str(key): item if key in _ON_DISK and isinstance(item, str) else _strict(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    if isinstance(value, str):
        return with_names(value)
    return value if isinstance(value, (int, float, bool, type(None))) else repr(value)


def escape(text: object) -> str:
    """Return text that is safe for a terminal: characters that are not printable become escapes such as ``\\x1b`` and ``\\u202e``."""
    named = with_names(str(text))
    return named if named.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in named)


def paint(text: str, style: str) -> str:
    """Return ``text`` in a colour, or bold, if stdout is a terminal and NO_COLOR is unset."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return click.style(text, bold=True) if style == "bold" else click.style(text, fg=style)


def warn(text: str) -> None:
    """Print a warning on stderr."""
    click.echo(f"warning: {text}", err=True)


def show_error(error: RelightError) -> None:
    """Print an error's cause, place, details and hint on stderr."""
    where = f" [{escape(error.where)}]" if error.where else ""
    colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    lines = [f"{click.style('relight:', fg='red') if colour else 'relight:'} {escape(error.what)}{where}"]
    lines += [f"  - {escape(detail)}" for detail in error.details[:20]]
    if len(error.details) > 20:
        lines.append(f"  … and {len(error.details) - 20} more")
    if error.hint:
        lines.append(f"  → {escape(error.hint)}")
    click.echo("\n".join(lines), err=True)


def table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[str] = (), wrap: Sequence[str] = ()
) -> None:
    """Print aligned columns, those in ``right`` right-aligned. On a terminal, columns in ``wrap`` are wrapped if necessary."""
    cells = [
        [(escape(cell.text), cell.style) if isinstance(cell, Styled) else (escape(cell), "") for cell in row]
        for row in rows
    ]
    if sys.stdout.isatty():
        _rich_table(columns, cells, right, wrap)
        return
    widths = [
        max(width_of(column), *(width_of(row[i][0]) for row in cells)) if cells else 0
        for i, column in enumerate(columns)
    ]
    for texts in [list(columns), *([text for text, _ in row] for row in cells)]:
        padded = []
        for column, text, width in zip(columns, texts, widths, strict=True):
            space = " " * (width - width_of(text))
            padded.append(space + text if column in right else text + space)
        click.echo("  ".join(padded).rstrip())


def _rich_table(
    columns: Sequence[str], cells: list[list[tuple[str, str]]], right: Sequence[str], wrap: Sequence[str]
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    least = 2 * (len(columns) - 1)
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, column in enumerate(columns):
        longest = max(width_of(column), *(width_of(row[i][0]) for row in cells))
        narrowest = min(longest, 16) if column in wrap else longest
        least += narrowest
        shown.add_column(
            column,
            justify="right" if column in right else "left",
            no_wrap=column not in wrap,
            overflow="fold",
            min_width=narrowest,
        )
    for row in cells:
        shown.add_row(*(Text(text, style) for text, style in row))
    console = Console(highlight=False)
    console.width = max(console.width, least)  # a narrow terminal breaks lines; rich would cut them off
    console.print(shown)


def width_of(text: str) -> int:
    """Return the number of terminal columns that ``text`` takes."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text)


def facts_list(facts: Sequence[tuple[str, object]]) -> None:
    """Print names and values, indented. On a terminal, long values are wrapped below themselves."""
    width = max((width_of(escape(name)) for name, _ in facts), default=0)
    for name, value in facts:
        head = f"  {escape(name)}{' ' * (width - width_of(escape(name)))}  "
        if sys.stdout.isatty():
            from shutil import get_terminal_size
            from textwrap import fill

            columns = max(get_terminal_size().columns, width + 24)
            click.echo(fill(escape(value), columns, initial_indent=head, subsequent_indent=" " * (width + 4)))
        else:
            click.echo(head + escape(value))


def hanging(text: str, indent: int) -> str:
    """Return the text indented; on a terminal wrapped with the same indent."""
    space = " " * indent
    if not sys.stdout.isatty():
        return space + text
    from shutil import get_terminal_size
    from textwrap import fill

    columns = max(get_terminal_size().columns, indent + 24)
    return fill(
        text, columns, initial_indent=space, subsequent_indent=space, break_on_hyphens=False, break_long_words=False
    )


def since(time: str) -> str:
    """Return how long ago a record's time was; the text itself if it is not a time."""
    try:
        return age_text((datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds())
    except (ValueError, TypeError):  # no time, or one without a zone
        return time[:20]


def code_text(code: Mapping[str, Any]) -> str:
    """Return the recorded revision of the script's code, and whether there were uncommitted changes. Empty if none was recorded."""
    changes = code.get("changes")
    more = "" if not changes else " perhaps with changes" if changes == "unknown" else " with changes"
    return f"{str(code['commit'])[:12]}{more}" if code.get("commit") else ""
