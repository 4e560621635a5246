"""``relight version``: print the versions of Relight and of its main dependencies."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

import click

from relight.cli.common import json_option
from relight.cli.output import emit_json
from relight.format.records import VERSION as FORMAT_VERSION
from relight.version import VERSION

NEIGHBOURS = ("torch", "numpy", "blake3", "msgspec")


@click.command("version")
@json_option
def command(as_json: bool) -> None:
    """Print the versions of Relight, of its format and of its main dependencies, for bug reports.

    \b
    Example:
      relight version --json
    """
    facts: dict[str, object] = {"relight": VERSION, "format": FORMAT_VERSION, "python": platform.python_version()}
    facts |= {name: _installed(name) for name in NEIGHBOURS} | {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}"
    }
    if as_json:
        emit_json(facts)
    else:
        for name, value in facts.items():
            click.echo(f"{name:8}  {value or 'not installed'}")


def _installed(name: str) -> str | None:
    """Return a package's version without importing it; None if it is not installed."""
    try:
        return installed(name)
    except PackageNotFoundError:
        return None
