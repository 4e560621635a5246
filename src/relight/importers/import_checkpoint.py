"""Import a detected checkpoint as one committed checkpoint of Relight: streamed, hashed, and the source checked for
changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relight import audit
from relight.audit.facts import ActionFacts
from relight.catalog import Run
from relight.commit import CommitTarget, SaveInfo, SaveRequest
from relight.commit.chunk_index import IncrementalState
from relight.commit.pack_writer import WriteLimits
from relight.commit.save import save
from relight.errors import (
    CheckpointNotFound,
    ConfigError,
    CorruptCheckpoint,
    IncompatibleState,
    UnsafeContent,
    memory_refusals,
)
from relight.format import hexdigest
from relight.format.root_keys import FIRST_STEP
from relight.importers.found import DetectedCheckpoint, plant
from relight.log import Log, fold
from relight.save_reason import SaveReason
from relight.settings.utf8 import escaped, is_utf8
from relight.store import ByteStore

IMPORTED = "imported"
"""Key of a root's user metadata with the checkpoint's source: ``format``, ``name``, ``digest`` and ``bytes``."""


@dataclass(frozen=True, slots=True)
class ImportReport:
    """The imported checkpoint. ``there``: an earlier import of the same source had already created it."""

    id: str
    step: int
    bytes: int
    tensors: int
    left_out: list[tuple[str, str]]
    seconds: float
    there: bool = False


def import_checkpoint(
    found: DetectedCheckpoint,
    store: ByteStore,
    run: str,
    *,
    step: int | None = None,
    which: Sequence[str] = (),
    progress: Callable[[int], None] | None = None,
    before_commit: Callable[[], None] | None = None,
    user: Mapping[str, Any] | None = None,
    smaller: IncrementalState | None = None,
    force: bool = False,
) -> ImportReport:
    """Import ``found`` as a checkpoint of ``run``. It is committed when this returns.

    attempt is fenced. Memory: two slabs.

    Raise ``ConfigError`` if the run's newest checkpoint has a later step, is an import of another file at this step, or
    is not an import. The run would then resume from the imported checkpoint instead. ``force``: import in these cases,
    too.

    If ``RELIGHT_AUDIT`` names an audit log, the import is recorded there before anything is written.

    Args:
        found: What ``detect`` returned.
        store: The store, as ``relight.store.open_bytes`` opens it.
        run: The run's name. It is created if it does not exist.
        step: The step's number. None: the source's step, else 0.
        which: Patterns of the tensors and components to import. Empty: all.
        progress: A function that is called with the number of bytes of each piece that was read.
        before_commit: A function that is called when all bytes are durable, and may wait; an error that it raises
            aborts the import.
        user: More user metadata for the root.
        smaller: How to store it incrementally. None: whole.
        force: Import although the run's newest checkpoint would be hidden.
    """
    facts = ActionFacts(run, after=run, given={"source": found.path, "step": step, "which": which})
    doing = f"the import of {found.path}"
    with audit.recorded("import", f"{found.path} into {store.url}/{run}", facts), memory_refusals(doing):
        return _bring_in(
            found, store, run, step=step, which=which, progress=progress, before_commit=before_commit, user=user, smaller=smaller,
            force=force,
        )  # fmt: skip


def _bring_in(
    detected: DetectedCheckpoint,
    store: ByteStore,
    run: str,
    *,
    step: int | None,
    which: Sequence[str],
    progress: Callable[[int], None] | None,
    before_commit: Callable[[], None] | None,
    user: Mapping[str, Any] | None,
    smaller: IncrementalState | None,
    force: bool,
) -> ImportReport:
    def written() -> None:
        detected.files.check_unchanged()
        if before_commit is not None:
            before_commit()

    started = time.monotonic()
    if not is_utf8(detected.files.name):
        raise IncompatibleState(
            "its name is not UTF-8, and the checkpoint records it", where=escaped(detected.path), hint="rename it"
        )
    step_number = step if step is not None else detected.step or 0
    planted = plant(detected.content, detected.files, which)
    if not planted.items and not planted.parts:
        raise IncompatibleState(
            "no part of it matches the selection", where=detected.path, hint=f"it has {', '.join(detected.parts)}"
        )
    # without any step, none is done
    counts_done = detected.content.first_step == 1 or (step is None and detected.step is None)
    origin = {
        "format": detected.format, "kind": detected.kind, "name": detected.files.name[:200], "bytes": detected.files.bytes_read,
        "digest": hexdigest("\0".join([detected.files.digest(), *sorted(which)]).encode()),
    }  # fmt: skip
    log = Log(store, run)
    earlier = _imported_before(store, run, origin, step_number, force, step is not None)
    size = sum(item.source.length for item in planted.items)
    if earlier is not None:
        return ImportReport(
            earlier, step_number, size, len(planted.items), planted.left_out, time.monotonic() - started, there=True
        )
    log.start()
    view = log.read()
    history = fold(view)
    report = save(
        CommitTarget(store, log, view.store_id, view.run_id, history.epoch),
        SaveRequest(
            SaveInfo(
                step=step_number,
                reason=SaveReason("import", "import"),
                metrics=detected.metrics,
                user={
                    **(user or {}),
                    **(FIRST_STEP.field(1) if counts_done else {}),
                    IMPORTED: {**origin, "left_out": [list(entry) for entry in planted.left_out[:100]]},
                },
                components=planted.kinds,
                exact=[f"imported from {detected.format}", *detected.notes],
            ),
            tree=planted.tree,
            items=planted.items,
            pace=WriteLimits(progress=progress) if progress is not None else None,
            packs_written=written,
            smaller=smaller,
        ),
    )
    return ImportReport(report.id, step_number, size, len(planted.items), planted.left_out, time.monotonic() - started)


def _imported_before(
    store: ByteStore, run: str, source_facts: dict[str, object], step: int, force: bool, named: bool
) -> str | None:
    """Return the id of an earlier import of the same source. Raise ``ConfigError`` if the run would resume from
    another checkpoint."""
    target = Run(store, run)
    try:
        history = target.history()
    except CheckpointNotFound:
        return None
    other_name = ""
    for checkpoint in history.live:
        if checkpoint.step == step and checkpoint.body.save_reason.kind == "import":
            try:
                source = target.open(checkpoint).root.user.get(IMPORTED)
            except (CorruptCheckpoint, UnsafeContent):
                continue
            if isinstance(source, dict) and all(source.get(key) == value for key, value in source_facts.items()):
                return checkpoint.id
            other_name = (
                str(source.get("name"))
                if isinstance(source, dict) and source.get("name") != source_facts["name"] and not named
                else other_name
            )
    newest = history.live[-1] if history.live else None
    if (
        newest is not None
        and not force
        and (newest.step > step or newest.body.save_reason.kind != "import" or other_name)
    ):
        origin = (
            f"an import of {other_name[:80]!r}"
            if other_name
            else "an import"
            if newest.body.save_reason.kind == "import"
            else "saved by training"
        )
        raise ConfigError(
            f"run {run!r} is at step {newest.step} ({newest.id}), {origin}: it would resume from the import of step {step} instead",
            where=store.url,
            hint="import to a run of its own, name a later step with --step, or pass --force",
        )
    return None
