"""Trace of a script's steps: one JSON line for each step."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec

from relight.decode import from_json_bytes
from relight.errors import ConfigError


class TraceEntry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A step, or, with ``kind`` ``restored``, the state after a restore. Digests are hexadecimal, floats exact (``float.hex``).

    ``state`` maps the path of every tensor and value to its digest. ``batches``: digests of the batches delivered since the previous
    entry. ``samples``: digest of what the script passed as ``samples=``.
    """

    kind: str
    step: int
    metrics: dict[str, str] = {}
    samples: str | None = None
    batches: list[str] = []
    state: dict[str, str] = {}


class StepTrace:
    """Writer of a trace in the script's process. Entries are unbuffered, because the process may be killed right after one."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def write(self, entry: TraceEntry) -> None:
        """Append one entry."""
        os.write(self._fd, msgspec.json.encode(entry) + b"\n")


def read_trace(path: Path) -> list[TraceEntry]:
    """Return the entries of a trace, without a line cut short by a kill. Raise ``ConfigError`` if there is no trace."""
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
    """Return a metric as text. Two texts are equal exactly if the bits are."""
    try:
        return float(value).hex()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return json.dumps(value, default=str, sort_keys=True)
