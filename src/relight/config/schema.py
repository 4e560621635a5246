"""The JSON schema of relight.toml, for editors: ``relight config schema``. It is made from the structs of the tables.

``python -m relight.config.schema relight.schema.json`` writes the file that the repository has.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from relight.settings.registry import TABLES, Setting, settings_by_name

SCHEMA = "https://json-schema.org/draft/2020-12/schema"


def _table() -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": {}}


def _of(setting: Setting) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the schema of a setting's value, and the definitions that it refers to."""
    rule = msgspec.json.schema(setting.type)
    if setting.type.__metadata__[0].extra["parse"] and "anyOf" not in rule:
        rule = {"anyOf": [{"type": "string"}, rule]}  # a time, size or rate: see kinds
    named = " Counts only in a named file." if setting.named else ""
    text = f"{setting.doc}. Default: {setting.default}. Variable: {setting.variable}.{named}"
    return {**rule, "description": text}, rule.pop("$defs", {})


def schema() -> dict[str, Any]:
    """Return the JSON schema of the file. Editors complete keys with it, show what each is for, and mark mistakes of type and range."""
    root: dict[str, Any] = {
        "$schema": SCHEMA,
        "title": "relight.toml",
        "description": "Settings of Relight. Each has a variable that overrides it: relight config show --all",
        **_table(),
        "$defs": {},
    }
    root["properties"] = {name: _table() for name in TABLES}
    for setting in settings_by_name().values():
        *tables, key = setting.name.split(".")
        below = root
        for table in tables:
            below = below["properties"].setdefault(table, _table())
        below["properties"][key], definitions = _of(setting)
        root["$defs"] |= definitions
    return root


def schema_text() -> str:
    """Return the schema as the text of a file."""
    return json.dumps(schema(), indent=2) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(schema_text(), encoding="utf-8")
