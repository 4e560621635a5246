"""What is in a run's directory, read as ``docs/format.md`` describes it and without the code that wrote it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

_SAVE = re.compile(r"[0-9]{10,}-[0-9a-z]{10}-e[0-9]+\Z")


def saves(run: Path) -> set[str]:
    """Names of the directories that saves have made, committed or not."""
    try:
        return {name for name in os.listdir(run) if _SAVE.match(name)}
    except FileNotFoundError:
        return set()


def committed(run: Path) -> set[str]:
    """Names of the directories that a COMMIT record names."""
    try:
        records = sorted(name for name in os.listdir(run / "log") if name.endswith(".json"))
    except FileNotFoundError:
        return set()
    found = set()
    for name in records:
        payload = json.loads((run / "log" / name).read_bytes())["body"]
        if payload["kind"] == "COMMIT":
            found.add(payload["body"]["dir"])
    return found


def unfinished(run: Path) -> set[str]:
    """Names of the directories of saves that were begun and never committed."""
    begun = saves(run)  # before the log: what is committed in between is not taken for unfinished
    return begun - committed(run)
