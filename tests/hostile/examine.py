"""Do everything that a reader does with a store. Only ``RelightError`` may be raised."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge import request

from relight.catalog import candidates, list_runs, open_run
from relight.commit import Attempt
from relight.errors import RelightError
from relight.format import decode_tree
from relight.format.dtypes import dtype_named
from relight.log import Checkpoint, LogView
from relight.reader import VerifyFinding, open_checkpoint, read_tensors, verify_checkpoint, verify_log
from relight.reader.opened import Opened
from relight.store import ByteStore

Values = dict[str, bytes]


class Straight:
    """A sink with memory of its own, made only when the first byte is about to come."""

    def __init__(self, length: int, itemsize: int) -> None:
        self.length, self.itemsize, self.data = length, itemsize, bytearray()

    def view(self) -> memoryview | None:
        """The memory."""
        if not self.data:
            self.data = bytearray(self.length)
        return memoryview(self.data)

    def absorb(self, start: int, data: memoryview) -> None:
        """Never needed."""
        raise AssertionError("a sink with memory was handed bytes")


class Scattered(Straight):
    """A sink that takes whole elements only, like a strided tensor."""

    def view(self) -> memoryview | None:
        """There is none."""
        return None

    def absorb(self, start: int, data: memoryview) -> None:
        """Take a run of elements."""
        assert start % self.itemsize == 0, "a run that starts inside an element"
        assert len(data) % self.itemsize == 0, "a run that ends inside an element"
        if not self.data:
            self.data = bytearray(self.length)
        self.data[start : start + len(data)] = data


@dataclass
class Seen:
    """Outcome of reading a store. ``good`` is newest first, as a restore tries them; ``bad`` has the errors."""

    runs: list[str] = field(default_factory=list)
    refused: RelightError | None = None
    view: LogView | None = None
    good: list[tuple[Checkpoint, Values]] = field(default_factory=list)
    bad: list[tuple[Checkpoint, RelightError]] = field(default_factory=list)
    findings: dict[str, list[VerifyFinding]] = field(default_factory=dict)
    log_findings: list[VerifyFinding] = field(default_factory=list)
    raised: list[RelightError] = field(default_factory=list)
    trees: dict[str, Any] = field(default_factory=dict)

    @property
    def newest(self) -> str | None:
        """The first letter of the id of the newest good checkpoint."""
        return self.good[0][0].id[0] if self.good else None

    @property
    def text(self) -> str:
        """Return all messages about problems: errors, findings, faults, void records."""
        lines = [str(error) for error in self.raised]
        for finding in [*self.log_findings, *(finding for findings in self.findings.values() for finding in findings)]:
            lines += [finding.file, finding.detail, finding.tensor]
        return "\n".join(lines)


def examine(store: ByteStore, run: str, *, sink: Callable[[int, int], Any] = Straight) -> Seen:
    """List runs, open one, read all checkpoints from newest to oldest, and verify everything."""
    seen = Seen()
    with _Expecting(seen):
        seen.runs = list_runs(store)
    with _Expecting(seen) as attempt:
        opened = open_run(store, run)
        seen.view = view = opened.view()
        history = opened.history()
    if attempt.error is not None:
        seen.refused = attempt.error
        return seen
    with _Expecting(seen):
        seen.log_findings = verify_log(store, view)
    for which in ("best", "keep", 20, "ccc"):
        with _Expecting(seen):
            candidates(history, which)
    for checkpoint in candidates(history):
        with _Expecting(seen) as attempt:
            readable = open_checkpoint(store, run, checkpoint, store_id=view.store_id, run_id=view.run_id)
            seen.good.append((checkpoint, read_all(readable, sink, seen)))
        if attempt.error is not None:
            seen.bad.append((checkpoint, attempt.error))
        seen.findings[checkpoint.id] = verify_checkpoint(store, view, checkpoint)
    return seen


def read_all(opened: Opened, sink: Callable[[int, int], Any], seen: Seen) -> Values:
    """Every tensor's bytes by name, the tree decoded first as a restore does."""
    result: Values = {}
    for ref, part in zip(opened.root.parts, opened.parts, strict=True):
        tree = decode_tree(part.tree, len(part.tensors), f"{opened.prefix}/{ref.file}")
        seen.trees.setdefault(opened.checkpoint.id, tree)
        sinks = {
            index: sink(tensor.length, dtype_named(tensor.dtype).itemsize) for index, tensor in enumerate(part.tensors)
        }
        read_tensors(opened, part, sinks)
        result |= {tensor.name: bytes(sinks[index].data) for index, tensor in enumerate(part.tensors)}
    return result


def save_once_more(store: ByteStore, run: str) -> str:
    """Begin an attempt and save once more. Return the id of the save."""
    return Attempt.begin(store, run).save(request(40)).id


class _Expecting:
    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self.error: RelightError | None = None

    def __enter__(self) -> _Expecting:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, RelightError):
            self.error = error
            self._seen.raised.append(error)
        return isinstance(error, RelightError)


def unprintable(text: str) -> list[str]:
    """Characters that could drive a terminal, break a line or fail to encode."""
    return [char for char in text if unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp")]


class Peak:
    """Measure the peak memory that this process takes in the block beyond its use before, in bytes. 0 outside Linux."""

    def __enter__(self) -> Peak:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self._before = None
        else:
            self._before = _status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.extra = 0 if self._before is None else _status("VmHWM") - self._before


def _status(name: str) -> int:
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(name))
    return int(line.split()[1]) << 10
