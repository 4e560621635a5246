"""The files of offline runs of W&B: which steps they have. W&B has no reader of them in Python."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relight.integrations.frameworks import needed

_MAGIC, _HEADER = b":W&B", 7
_BLOCK, _RECORD = 32768, 7
"""Bytes of a block, and of the header of each record in it: CRC, length, kind."""
_FULL, _LAST = 1, 4


def steps_on_disk(directory: Path, run: str) -> int:
    """Return the newest step in the files of the offline run ``run`` below ``directory``; −1: there is none."""
    paths = directory.glob(f"wandb/offline-run-*-{run}/run-{run}.wandb")
    return max((WandbFile(path).newest_step() for path in paths), default=-1)


class WandbFile:
    """One file, which W&B appends to."""

    def __init__(self, path: Path) -> None:
        self._path, self._place, self._newest = path, 0, -1
        self._record = needed("wandb.proto.wandb_internal_pb2", "wandb").Record

    def newest_step(self) -> int:
        """Return the newest step of the history in the file; −1: none yet. Reads what was appended since the last call."""
        for row in self.rows():
            self._newest = max(self._newest, int(row.get("_step", -1)))
        return self._newest

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of the history that were appended since the last call. An incomplete record ends them."""
        for data in self._records():
            record = self._record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = ((item.key or "/".join(item.nested_key), item.value_json) for item in record.history.item)
                yield {name: json.loads(text) for name, text in items}

    def _records(self) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            if not self._place:
                if file.read(_HEADER)[:4] != _MAGIC:
                    return
                self._place = _HEADER
            place, parts = self._place, list[bytes]()
            while True:
                left = _BLOCK - place % _BLOCK
                if left < _RECORD:
                    place += left
                    continue
                file.seek(place)
                header = file.read(_RECORD)
                if len(header) < _RECORD:
                    return
                _, length, kind = struct.unpack("<IHB", header)
                data = file.read(length)
                if not kind or len(data) < length:
                    return
                place += _RECORD + length
                parts.append(data)
                if kind in (_FULL, _LAST):
                    yield b"".join(parts)
                    parts, self._place = [], place
