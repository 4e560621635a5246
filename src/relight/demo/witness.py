"""Independent reader of a run's directory, as ``docs/format.md`` describes it, without the code that wrote it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

_SAVE = re.compile(r"[0-9]{10,}-[0-9a-z]{10}-e[0-9]+\Z")


def saves(run: Path) -> set[str]:
    """Return the names of the directories that saves have made, committed or not."""
    try:
        return {name for name in os.listdir(run) if _SAVE.match(name)}
    except FileNotFoundError:
        return set()


def committed(run: Path) -> set[str]:
    """Return the names of the directories that a COMMIT record names."""
    try:
        records = sorted(name for name in os.listdir(run / "log") if name.endswith(".json"))
    except FileNotFoundError:
        return set()
    names = set()
    for name in records:
        payload = json.loads((run / "log" / name).read_bytes())["body"]
        if payload["kind"] == "COMMIT":
            names.add(payload["body"]["dir"])
    return names


def unfinished(run: Path) -> set[str]:
    """Return the names of the directories of saves that were begun and never committed."""
    begun = saves(run)  # list before reading the log: a save committed in between then does not count as unfinished
    return begun - committed(run)
