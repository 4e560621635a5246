"""``relight.toml``: the table ``[supervise]``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relight.settings.error_location import located
from relight.settings.file import checked
from relight.settings.supervise_settings import SuperviseSettings
from relight.settings.validation import decode
from relight.supervise.notice_sources import sources_of


def read_settings(path: Path | None) -> SuperviseSettings:
    """Return the settings from environment variables and the file, else the defaults.

    Raise ``ConfigError`` for an invalid or unknown setting, with its line or variable.
    """
    return checked("supervise", settings_of, path)[0]


def settings_of(table: dict[str, Any], where: str) -> SuperviseSettings:
    """Return the table ``[supervise]`` as settings."""
    settings = decode(table, SuperviseSettings, "supervise", where)
    with located({}, ("notices",), where):
        sources_of(settings.notices)
    return settings
