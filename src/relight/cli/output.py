"""How commands speak: tables for people, JSON for programs, progress on a terminal. Stored text is escaped before it is printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import click


def emit_json(value: Any) -> None:
    """``value`` as indented JSON on stdout."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def escape(text: object, *, lines: bool = False) -> str:
    """Text that a terminal shows and does not obey: control characters as ``\\x1b``, lone surrogates too."""
    shown = []
    for char in str(text):
        code = ord(char)
        if lines and char == "\n":
            shown.append(char)
        elif code < 32 or 127 <= code < 160 or 0xD800 <= code < 0xE000 or code in (0x202A, 0x202B, 0x202D, 0x202E, 0x2066, 0x2067, 0x2068):
            shown.append(f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")
        else:
            shown.append(char)
    return "".join(shown)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[str] = ()) -> None:
    """Aligned columns; the last one is cut on a terminal that is too narrow. Plain text, so that it pipes."""
    cells = [[escape(cell) for cell in row] for row in rows]
    widths = [max(len(column), *(len(row[i]) for row in cells)) if cells else len(column) for i, column in enumerate(columns)]

    def line(row: Sequence[str]) -> str:
        parts = [cell.rjust(width) if column in right else cell.ljust(width) for cell, width, column in zip(row, widths, columns)]
        return "  ".join(parts).rstrip()

    limit = _width()
    heading = line(columns)
    click.echo(click.style(_cut(heading, limit), bold=True) if sys.stdout.isatty() else heading)
    for row in cells:
        click.echo(_cut(line(row), limit))


def _width() -> int | None:
    import shutil

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _cut(text: str, limit: int | None) -> str:
    return text if limit is None or len(text) <= limit else text[: limit - 1] + "…"


def size(count: int) -> str:
    """Bytes for people."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return str(count)


def age(text: str) -> str:
    """How long ago a record says it was written."""
    try:
        then = datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        return text[:20]
    seconds = (datetime.now(UTC) - then).total_seconds()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"


def metrics_text(metrics: dict[str, Any]) -> str:
    """``loss=1.234 …``"""
    return " ".join(f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}" for name, value in metrics.items())


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar of bytes on stderr, on a terminal only. The callable may be called from any thread."""
    if not sys.stderr.isatty() or total < 1 << 20:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    with bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)
