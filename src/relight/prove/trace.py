"""What a proved script did, step by step: one JSON line an entry."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec

from relight.decode import from_json_bytes
from relight.errors import ConfigError


class TraceEntry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One step (or, for ``kind`` ``restored``, the moment after a restore). Digests are hexadecimal, floats exact (``float.hex``).

    ``state`` maps the path of every tensor and value to its digest; ``batches`` are the digests of what the loaders delivered since the
    entry before; ``samples`` is what the script passed as ``samples=``.
    """

    kind: str
    step: int
    metrics: dict[str, str] = {}
    samples: str | None = None
    batches: list[str] = []
    state: dict[str, str] = {}


class StepTrace:
    """Written by the script's process, flushed with every entry, as the process may be killed right behind it."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def write(self, entry: TraceEntry) -> None:
        """Append one entry."""
        os.write(self._fd, msgspec.json.encode(entry) + b"\n")


def read_trace(path: Path) -> list[TraceEntry]:
    """The entries of a trace; a line cut short by a kill is left out."""
    if not path.exists():
        raise ConfigError(
            "the script never reached ckpt.restore() or ckpt.step()",
            where=path.name,
            hint="prove needs a script that uses relight.Checkpointer in its own process",
        )
    entries = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            entries.append(from_json_bytes(line, TraceEntry))
        except msgspec.DecodeError:
            continue
    return entries


def hexed(value: object) -> str:
    """A metric, exactly: equal texts exactly if equal bits."""
    try:
        return float(value).hex()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return json.dumps(value, default=str, sort_keys=True)
