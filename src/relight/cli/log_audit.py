"""``relight log --audit``: show and check who did what to which checkpoint."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import click

from relight.audit import AuditEntry, AuditLog, check
from relight.cli.common import json_option
from relight.cli.output import Styled, emit_json, escape, paint, since, table
from relight.errors import ConfigError, StoreUnavailable
from relight.settings.environment import environment
from relight.store import ByteStore, open_bytes
from relight.store.urls import absolute
from relight.units import count_text

_ANCHOR_BYTES_MAX = 200


@click.command("log --audit")
@click.argument("path", metavar="[STORE]", required=False)
@click.option("-n", "newest", type=click.IntRange(min=1), metavar="N", help="Only the newest N.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, for a spreadsheet.")
@click.option("--check", "checks", is_flag=True, help="Check that no record was changed, and list what was.")
@click.option(
    "--anchor",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="With --check: the last verified state; updated if all is well.",
)
@json_option
def command(
    path: str | None, newest: int | None, as_csv: bool, checks: bool, anchor: Path | None, as_json: bool
) -> int:
    """Show who did what to which checkpoint, when, and how it ended, newest last.

    relight serve writes these entries, and so do commands that change something if RELIGHT_AUDIT names the audit store. STORE is that
    store, by default RELIGHT_AUDIT.

    Records are chained by hash, so --check always finds a changed one; the exit code is then 1. Only an anchor reveals that the newest
    records were cut off or that all were rewritten: keep FILE where people who can write to STORE cannot write.

    \b
    Examples:
      relight log audit --audit
      relight log audit --audit --check --anchor /elsewhere/audit.anchor
      relight log audit --audit --csv > audit.csv
    """
    if anchor is not None and not checks:
        raise ConfigError("--anchor is for --check")
    if as_csv and (as_json or checks):
        raise ConfigError("--csv goes neither with --json nor with --check")
    if checks and newest is not None:
        raise ConfigError("--check reads every record", hint="leave -n out")
    if checks:
        return _check(_store(path), anchor, as_json)
    book = AuditLog(_store(path))
    rows = book.entries() if newest is None else book.newest(newest)
    if as_json:
        emit_json([_row(entry) for entry in rows])
    elif as_csv:
        click.echo(_csv(rows), nl=False)
    elif not rows:
        click.echo("this store has no audit entry: relight serve writes them, and commands with RELIGHT_AUDIT do")
    else:
        cells = [
            [entry.seq, since(entry.at), entry.who, entry.what, entry.on, _words(entry), _how(entry)] for entry in rows
        ]
        table(
            ["record", "when", "who", "what", "on", "fields", "ended"], cells, right=("record",), wrap=("on", "fields")
        )
    return 0


def _check(store: ByteStore, anchor: Path | None, as_json: bool) -> int:
    """Check the chain and the anchor, print the outcome, and return the exit code. If all is well, update the anchor."""
    known = _read_anchor(anchor) if anchor is not None else ""
    result = check(store, known)
    if not result.faults and anchor is not None:
        _write_anchor(anchor, result.anchor)
    if as_json:
        emit_json(
            {
                "ok": not result.faults,
                "entries": result.entries,
                "faults": result.faults,
                "anchor": result.anchor,
                "anchored": bool(known),
            }
        )
        return 1 if result.faults else 0
    for fault in result.faults:
        click.echo(f"{paint('CHANGED', 'red')}  {escape(fault)}")
    if not result.faults:
        against = (
            "and they continue the anchor" if known else "as far as the chain shows: --anchor FILE also finds a cut end"
        )
        click.echo(f"{result.entries} {'entry' if result.entries == 1 else 'entries'}, unchanged, {against}")
        click.echo(f"anchor: {result.anchor}")
    else:
        click.echo(count_text(len(result.faults), "fault"))
    return 1 if result.faults else 0


def _csv(rows: Sequence[AuditEntry]) -> str:
    """Return the entries as CSV. Cells that a spreadsheet would take for a formula get a leading quote."""
    into = io.StringIO()
    writer = csv.writer(into, lineterminator="\n")
    writer.writerow(AuditEntry._fields)
    writer.writerows([[_cell(value) for value in entry[:-1]] + [_cell(_words(entry))] for entry in rows])
    return into.getvalue()


def _row(entry: AuditEntry) -> dict[str, object]:
    """Return an entry's fields for ``--json``."""
    return {**entry._asdict(), "fields": dict(entry.fields)}


def _words(entry: AuditEntry) -> str:
    """Return an entry's fields, without empty ones, in one line."""
    return "; ".join(f"{name}={value}" for name, value in entry.fields if value)


def _cell(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def _how(entry: AuditEntry) -> Styled:
    return Styled(entry.how or "not ended", {"ok": "green", "": "yellow"}.get(entry.how, "red"))


def _store(path: str | None) -> ByteStore:
    url = path or environment().audit
    if not url:
        raise ConfigError("which audit store?", hint="relight log STORE --audit, or set RELIGHT_AUDIT")
    return open_bytes(absolute(url))


def _read_anchor(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        return file.read(_ANCHOR_BYTES_MAX).decode("ascii", "replace").strip()


def _write_anchor(path: Path, anchor: str) -> None:
    """Replace the anchor file atomically."""
    new = path.with_name(path.name + ".new")
    try:
        new.write_text(anchor + "\n")
        new.replace(path)
    except OSError as error:
        raise StoreUnavailable(f"the anchor cannot be written: {error}", where=str(path)) from error
