"""Do one task, in any process: import a checkpoint, or read one again and compare it with its source."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from relight.catalog import Run
from relight.commit.chunk_index import IncrementalState
from relight.errors import LeaseHeld, RelightError
from relight.format.root_keys import MIGRATED
from relight.importers import detect, import_checkpoint
from relight.importers.found import plant
from relight.migrate.journal import MigrationJournal
from relight.policy.compact import Compact
from relight.reader import Opened, verify_checkpoint
from relight.reader.merged_parts import whole_of
from relight.reader.slab_reader import SLAB_BYTES, SlabReader, is_straight, slabs_of
from relight.settings.utf8 import escaped
from relight.store import open_bytes
from relight.units import duration_text

TURN_S_MAX = 24 * 3600.0
"""Seconds that a task waits for earlier tasks of its run."""
_POLL_S = (0.01, 0.5)


@dataclass(frozen=True, slots=True)
class MigrationTask:
    """``kind`` is ``bring`` or ``check``. ``after`` is the number of the task that must commit before this one, or None."""

    kind: str
    url: str
    old: str
    session: int
    number: int
    source: str
    path: str
    run: str
    step: int
    bytes: int
    after: int | None = None
    id: str = ""
    compress: bool = False


def work(task: MigrationTask) -> dict[str, Any]:
    """Do a task, and write its result to the journal. Relight's errors and OS errors are results, too."""
    store = open_bytes(task.url)
    journal = MigrationJournal(store, task.old)
    started = time.monotonic()
    result: dict[str, Any] = {
        "kind": task.kind,
        "source": task.source,
        "run": task.run,
        "step": task.step,
        "bytes": task.bytes,
    }
    try:
        result |= {"ok": True, **(_bring(task, journal) if task.kind == "bring" else _check(task))}
    except (RelightError, OSError, MemoryError) as error:
        result |= {"ok": False, **error_record(error)}
        if isinstance(error, LeaseHeld):
            return result  # the other session reports the result
    result["seconds"] = round(time.monotonic() - started, 3)
    journal.write(task.session, task.number, result)
    return result


def error_record(error: BaseException) -> dict[str, Any]:
    """Return an error's fields for the journal."""
    if isinstance(error, RelightError):
        record = {"error": error.kind, "what": error.what, "where": error.where, "hint": error.hint}
    else:
        record = {"error": type(error).__name__, "what": str(error), "where": "", "hint": ""}
    return {name: escaped(text[:2000]) for name, text in record.items()}


def _bring(task: MigrationTask, journal: MigrationJournal) -> dict[str, Any]:
    source = detect(task.path)
    mark = MIGRATED.field({"journal": journal.prefix, "source": task.source})
    smaller = IncrementalState(Compact(reuse=False, codecs="always")) if task.compress else None
    turn = partial(_wait_for_turn, task, journal)
    report = import_checkpoint(
        source, open_bytes(task.url), task.run, step=task.step, before_commit=turn, user=mark, smaller=smaller
    )
    return {
        "id": report.id,
        "tensors": report.tensors,
        "format": source.format,
        "left_out": [list(item) for item in report.left_out[:100]],
    }


def _wait_for_turn(task: MigrationTask, journal: MigrationJournal) -> None:
    """Wait until the earlier task of the run has committed or failed.

    Raise ``LeaseHeld`` if another session has begun: that session owns the run, and the run's log would refuse this commit.
    """
    end, pause = time.monotonic() + TURN_S_MAX, _POLL_S[0]
    while task.after is not None and journal.read(task.session, task.after) is None:
        if time.monotonic() > end:
            raise LeaseHeld(f"waited {duration_text(TURN_S_MAX)} for task {task.after}", where=task.run)
        journal.check_newest(task.session)
        time.sleep(pause)
        pause = min(2 * pause, _POLL_S[1])
    journal.check_newest(task.session)


def _check(task: MigrationTask) -> dict[str, Any]:
    """Check that all bytes are what was committed, and that the source still has the same tensors."""
    store = open_bytes(task.url)
    run = Run(store, task.run)
    checkpoint = run.history().find(task.id)
    if checkpoint is None:
        return {
            "ok": False,
            "id": task.id,
            "error": "not_found",
            "what": "it was retired since",
            "where": task.run,
            "hint": "",
        }
    findings = verify_checkpoint(store, run.view(), checkpoint)
    problems = [f"{finding.file}: {finding.detail}" for finding in findings] or list(
        _differences(task, run.open(checkpoint))
    )
    if problems:
        return {
            "ok": False,
            "id": task.id,
            "error": "corrupt",
            "what": "; ".join(problems[:3])[:2000],
            "where": task.run,
            "hint": "",
        }
    return {"id": task.id}


def _differences(task: MigrationTask, opened: Opened) -> Iterator[str]:
    planted = plant(detect(task.path).content, detect(task.path).files)
    whole = whole_of(opened)
    number_of = {tensor.name: index for index, tensor in enumerate(whole.tensors)}
    if number_of.keys() != {item.name for item in planted.items}:
        yield "it has other tensors than the source"
        return
    reader = SlabReader(opened, whole)
    for item in planted.items:
        number = number_of[item.name]
        tensor = whole.tensors[number]
        if (tensor.dtype, tensor.shape) != (item.dtype, item.shape):
            yield f"{item.name}: another shape or dtype"
            continue
        size = tensor.length // max(1, math.prod(tensor.shape))
        for slab in slabs_of(
            tensor.shape, number, by_rows=not is_straight(whole, number), at_most=max(1, SLAB_BYTES // max(1, size))
        ):
            (data,) = reader.read([slab])
            original = memoryview(bytearray(len(data)))
            begin, view = slab.first * size, item.source.view()
            if view is not None:
                original = view[begin : begin + len(data)]
            else:
                item.source.fill(begin, original)
            if original != data:
                yield f"{item.name}: other bytes than the source"
                break
