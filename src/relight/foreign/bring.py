"""From what was found to one committed checkpoint of Relight: streamed, hashed, checked not to have changed meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relight import audit
from relight.catalog import Run
from relight.commit import Place, SaveRequest
from relight.commit.earlier import Smaller
from relight.commit.pack_writer import Pace
from relight.commit.save import save
from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, IncompatibleState, UnsafeContent
from relight.foreign.found import Found, plant
from relight.format import hexdigest
from relight.log import Log, fold
from relight.store import ByteStore

IMPORTED = "imported"
"""Where a root's user metadata says of what it was made: ``format``, ``name``, ``digest`` and ``bytes``."""


@dataclass(frozen=True, slots=True)
class ImportReport:
    """The checkpoint that came of it. ``there``: an earlier import of the same had brought it already."""

    id: str
    step: int
    bytes: int
    tensors: int
    left_out: list[tuple[str, str]]
    seconds: float
    there: bool = False


def bring_in(
    found: Found,
    store: ByteStore,
    run: str,
    *,
    step: int | None = None,
    which: Sequence[str] = (),
    progress: Callable[[int], None] | None = None,
    before_commit: Callable[[], None] | None = None,
    user: Mapping[str, Any] | None = None,
    smaller: Smaller | None = None,
) -> ImportReport:
    """Make one checkpoint of ``run`` of it, which is committed when this returns. ``which``: only tensors and components that match.

    ``step``: if the source does not say, or says another; else 0. The run is made if there is none; nobody is fenced. Memory: two slabs.
    ``ConfigError`` if the run is further on already: it would resume from here. ``before_commit`` is called when all bytes are durable, and
    may wait; what it raises calls the import off. ``user``: more that its root is to say. ``smaller``: how
    it is stored. In the audit log, if ``RELIGHT_AUDIT`` names one, before anything is written.
    """
    with audit.told("import", f"{found.path} into {store.url}/{run}"):
        return _bring_in(
            found, store, run, step=step, which=which, progress=progress, before_commit=before_commit, user=user, smaller=smaller
        )


def _bring_in(
    found: Found,
    store: ByteStore,
    run: str,
    *,
    step: int | None,
    which: Sequence[str],
    progress: Callable[[int], None] | None,
    before_commit: Callable[[], None] | None,
    user: Mapping[str, Any] | None,
    smaller: Smaller | None,
) -> ImportReport:
    def written() -> None:
        found.files.check_unchanged()
        if before_commit is not None:
            before_commit()

    started = time.monotonic()
    at = step if step is not None else found.step or 0
    planted = plant(found.content, found.files, which)
    if not planted.items and not planted.parts:
        raise IncompatibleState("nothing of it was asked for", where=found.path, hint=f"it has {', '.join(found.parts)}")
    told = {
        "format": found.format, "kind": found.kind, "name": found.files.name[:200], "bytes": found.files.bytes_read,
        "digest": hexdigest("\0".join([found.files.digest(), *sorted(which)]).encode()),
    }  # fmt: skip
    log = Log(store, run)
    there = _there(store, run, told, at)
    size = sum(item.source.length for item in planted.items)
    if there is not None:
        return ImportReport(there, at, size, len(planted.items), planted.left_out, time.monotonic() - started, there=True)
    log.start()
    view = log.read()
    history = fold(view)
    report = save(
        Place(store, log, view.store_id, view.run_id, history.epoch),
        SaveRequest(
            step=at,
            tree=planted.tree,
            items=planted.items,
            reason="import",
            metrics=found.metrics,
            user={**(user or {}), IMPORTED: {**told, "left_out": [list(one) for one in planted.left_out[:100]]}},
            components=planted.kinds,
            exact=[f"imported from {found.format}", *found.notes],
            pace=Pace(progress=progress) if progress is not None else None,
            packs_written=written,
            smaller=smaller,
        ),
    )
    return ImportReport(report.id, at, size, len(planted.items), planted.left_out, time.monotonic() - started)


def _there(store: ByteStore, run: str, told: dict[str, object], step: int) -> str | None:
    """The checkpoint that an earlier import of the same made; ``ConfigError`` if the run is further on."""
    target = Run(store, run)
    try:
        history = target.history()
    except CheckpointNotFound:
        return None
    for one in history.live:
        if one.step == step and one.body.reason == "import":
            try:
                said = target.open(one).root.user.get(IMPORTED)
            except (CorruptCheckpoint, UnsafeContent):
                continue
            if isinstance(said, dict) and all(said.get(key) == value for key, value in told.items()):
                return one.id
    newest = history.live[-1] if history.live else None
    if newest is not None and newest.step > step:
        raise ConfigError(
            f"run {run!r} is at step {newest.step}: with an import of step {step} behind it, that is where it would resume",
            where=store.url, hint="import to a run of its own, or say another step with --step",
        )  # fmt: skip
    return None
