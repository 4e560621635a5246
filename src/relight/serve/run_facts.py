"""Facts of a run's newest attempt, from the root of its newest checkpoint: its host, and the metadata that the script gave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from relight.errors import RelightError
from relight.format import decode_root
from relight.format.names import ROOT_FILE
from relight.format.root_keys import PREFIX
from relight.log import Checkpoint
from relight.store import ByteStore

ROOT_READ_MAX = 4 << 20
"""Largest root in bytes that is read."""
VALUES_MAX, VALUE_CHARS_MAX = 200, 120


class ScriptFacts(NamedTuple):
    """Facts of an attempt. ``epoch``: its number. They stay the same until another attempt saves a checkpoint."""

    epoch: int = -1
    host: str = ""
    config: Mapping[str, str] = {}


def facts_of(store: ByteStore, run: str, checkpoint: Checkpoint) -> ScriptFacts:
    """Read the facts. They are empty if the root is too large, damaged or missing."""
    where, size = f"{checkpoint.directory_in(run)}/{ROOT_FILE}", checkpoint.body.root_bytes
    if size > ROOT_READ_MAX:
        return ScriptFacts(checkpoint.epoch)
    try:
        root = decode_root(store.get(where, max(size, 1)), checkpoint.body.root, where)
    except (RelightError, OSError):
        return ScriptFacts(checkpoint.epoch)
    given = {name: value for name, value in root.user.items() if not name.startswith(PREFIX)}
    values = {"ranks": str(root.world)}
    for name, value in _flat("", given):
        if len(values) >= VALUES_MAX:
            break
        values[name[:VALUE_CHARS_MAX]] = value[:VALUE_CHARS_MAX]
    return ScriptFacts(checkpoint.epoch, str(root.environment.get("host", ""))[:64], values)


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flat(f"{prefix}.{name}" if prefix else str(name), inner)
    elif prefix:
        yield prefix, str(value)


def differing(configs: list[Mapping[str, str]]) -> list[str]:
    """Return the names of values that differ between these configurations, or are missing in some, sorted."""
    names = sorted({name for config in configs for name in config})
    return [name for name in names if len({config.get(name) for config in configs}) > 1]
