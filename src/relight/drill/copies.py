"""Rehearsals on copies of a run's checkpoints, without any job: ``relight drill --copy``, and *Drill* on the dashboard.

The run is only read. The copies are in the drill's own directory, which only its owner can read, in a store that is opened with the
settings. If the run is encrypted and the settings would not encrypt the copies, nothing is copied.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from relight.api import load
from relight.arena.memory import available_bytes
from relight.catalog.run import Run
from relight.drill.rehearsals import RehearsalResult
from relight.drill.stage import CannotTry, Wrong, own_store
from relight.errors import CheckpointNotFound, ConfigError, NoSpace, RelightError
from relight.log import Checkpoint
from relight.log.listing import Folders
from relight.observe.events import Event, subscribe
from relight.policy import keep
from relight.reader import verify_checkpoint, verify_log
from relight.reclaim import execute, plan_prune
from relight.transfer import execute_copy, plan_copy
from relight.units import duration_text, size_text

BROUGHT = 2
"""Number of copied checkpoints: the newest, and one to fall back to."""
_ROOM = 2.0
"""Factor of the copies' size that must be free on the disk, so that other users of the disk are not affected."""
_PLACES = 16


@dataclass(frozen=True, slots=True)
class CopyLoads:
    """Copies of a run's newest checkpoints, with methods that verify, restore and damage them."""

    run: Run

    @property
    def live(self) -> list[Checkpoint]:
        """Live checkpoints in the present log, oldest first."""
        return self.run.history().live

    def two(self) -> tuple[Checkpoint, Checkpoint]:
        """Return the newest checkpoint, and the previous one."""
        if len(self.live) < BROUGHT:
            raise CannotTry("the run has only one checkpoint, and no previous one to fall back to")
        return self.live[-1], self.live[-2]

    def damage(self) -> dict[str, str]:
        """Return the damage that ``relight verify`` finds, by checkpoint id; the key "" is the log."""
        view, damage = self.run.view(), {}
        if wrong := verify_log(self.run.store, view):
            damage[""] = f"{wrong[0].file}: {wrong[0].detail}"
        for checkpoint in self.live:
            if findings := verify_checkpoint(self.run.store, view, checkpoint):
                damage[checkpoint.id] = f"{findings[0].file}: {findings[0].detail}"
        return damage

    def restored(self) -> tuple[set[str], float]:
        """Restore the newest good checkpoint into memory, as ``relight.load`` does. Return the ids of skipped ones, and the seconds."""
        needs, has = max(checkpoint.body.logical_bytes for checkpoint in self.live), available_bytes()
        if has is not None and needs > has // 2:
            raise CannotTry(f"a restore needs {size_text(needs)} of memory, and {size_text(has)} are available")
        try:
            import relight.capture  # noqa: F401 - imports torch before the clock starts: the import is not part of a restore
        except ModuleNotFoundError as error:
            raise CannotTry(f"a restore needs {error.name}, which is not installed here") from None
        skipped: set[str] = set()

        def on_event(event: Event) -> None:
            if event.name == "restore.skipped":
                skipped.add(str(event.fields.get("id")))

        undo, began = subscribe(on_event), time.monotonic()
        try:
            load(f"{self.run.store.url.rstrip('/')}/{self.run.name}")
        finally:
            undo()
        return skipped, time.monotonic() - began

    def hurts(self, checkpoint: Checkpoint) -> bool:
        """Return whether a tensor of the checkpoint is damaged. Verify also reports damage between tensors, which affects no restore."""
        return any(finding.tensor for finding in verify_checkpoint(self.run.store, self.run.view(), checkpoint))

    def file_of(self, checkpoint: Checkpoint, matters: Callable[[Path], bool]) -> Path:
        """Return the largest file of the checkpoint for which ``matters`` is true. If names are encrypted, all files are tried."""
        root = Path(self.run.store.url)
        folder = root / checkpoint.directory_in(self.run.name)
        files = [path for path in (folder if folder.is_dir() else root).rglob("*") if path.is_file()]
        files.sort(key=lambda path: -path.stat().st_size)
        chosen = next((path for path in files[:_PLACES] if matters(path)), None)
        if chosen is None:
            raise CannotTry("changing its largest files damages no tensor")
        return chosen


class CopyRehearsal(NamedTuple):
    """A rehearsal on copies. ``do`` returns its result, or raises ``Wrong``."""

    name: str
    what: str
    do: Callable[[CopyLoads], RehearsalResult]


@contextlib.contextmanager
def copied(source: Run, top: Path) -> Iterator[CopyLoads]:
    """Copy a run's newest checkpoints, and verify every byte. Raise ``NoSpace``, before writing anything, if space is missing."""
    newest = source.history().live[-BROUGHT:]
    if not newest:
        raise CheckpointNotFound(f"run {source.name} has no checkpoint", where=source.store.url)
    store = own_store(top / "store")
    if source.store.properties().encrypted and not store.properties().encrypted:
        hint = "set the run's key in relight.toml or RELIGHT_KEY"
        raise ConfigError("the run is encrypted, and copies of it would not be", where=source.store.url, hint=hint)
    needs, free = sum(checkpoint.body.alone_bytes for checkpoint in newest), shutil.disk_usage(top).free
    if needs * _ROOM > free:
        hint = f"free {_ROOM:g} times the size of the copies, or set TMPDIR to another directory"
        raise NoSpace(f"the copies take {size_text(needs)}, and {size_text(free)} are free", where=str(top), hint=hint)
    done = execute_copy(plan_copy(source, newest, store, source.name))
    if done.damaged:
        raise Wrong(f"checkpoint {done.damaged[0][0]} is damaged: {done.damaged[0][1]}")
    yield CopyLoads(Run(store, source.name))


def verified(copy: CopyLoads) -> RehearsalResult:
    """Verify every byte, and the log."""
    if bad := copy.damage():
        raise Wrong(f"the copies are damaged: {next(iter(bad.values()))}")
    return RehearsalResult(f"{len(copy.live)} checkpoints are as committed, to the byte")


def restored(copy: CopyLoads) -> RehearsalResult:
    """Restore the newest checkpoint into memory."""
    skipped, took = copy.restored()
    if skipped:
        raise Wrong(f"{', '.join(sorted(skipped))} cannot be restored")
    newest = copy.live[-1]
    return RehearsalResult(
        f"step {newest.step}, {size_text(newest.body.logical_bytes)}, was restored in {duration_text(took)}",
        back_s=round(took, 3),
    )


def damaged(copy: CopyLoads) -> RehearsalResult:
    """Change one byte of the newest checkpoint. Verify must name the checkpoint, and a restore must skip it."""
    newest, before = copy.two()
    offset = -1

    def matters(path: Path) -> bool:
        nonlocal offset
        for part in range(_PLACES // 2, _PLACES):  # unlikely to be a header or padding
            offset = path.stat().st_size * part // _PLACES
            _flip(path, offset)
            if copy.hurts(newest):
                return True
            _flip(path, offset)
        return False

    path = copy.file_of(newest, matters)
    try:
        return _check_fallback(copy, newest, before, f"a byte of {path.name} was changed")
    finally:
        _flip(path, offset)


def lost(copy: CopyLoads) -> RehearsalResult:
    """Remove one file of the newest checkpoint."""
    newest, before = copy.two()
    aside = Path(copy.run.store.url).with_name("aside")

    def matters(path: Path) -> bool:
        path.rename(aside)
        if newest.id in copy.damage():
            return True
        aside.rename(path)
        return False

    path = copy.file_of(newest, matters)
    try:
        return _check_fallback(copy, newest, before, f"{path.name} was removed")
    finally:
        aside.rename(path)


def torn(copy: CopyLoads) -> RehearsalResult:
    """Cut off half of the newest COMMIT record, as a storage crash may leave it. Only the previous checkpoint must then exist."""
    newest, before = copy.two()
    record = Path(copy.run.store.url, Folders(copy.run.store, copy.run.name).key(newest.seq))
    if not record.is_file():
        raise CannotTry("names in the store are encrypted, so the record's file is unknown")
    whole = record.read_bytes()
    record.write_bytes(whole[: len(whole) // 2])
    try:
        again = CopyLoads(Run(own_store(copy.run.store.url), copy.run.name))  # opened again, as a new process would
        if not again.run.view().faults:
            raise Wrong("half a record was accepted as a whole one")
        if [checkpoint.id for checkpoint in again.live] != [before.id]:
            raise Wrong(f"the log has {len(again.live)} checkpoints left, and should have only the previous one")
        _, took = again.restored()
    finally:
        record.write_bytes(whole)
    why = f"the log reports record {newest.seq} as damaged; step {before.step} was restored in {duration_text(took)}"
    return RehearsalResult(
        why,
        back_s=round(took, 3),
        steps_lost=newest.step - before.step,
        means=f"half of record {newest.seq} was cut off",
    )


def pruned(copy: CopyLoads) -> RehearsalResult:
    """Prune all checkpoints except the newest, which must then be undamaged. This rehearsal comes last: it cannot be undone."""
    newest, _ = copy.two()
    done = execute(plan_prune(copy.run.store, copy.run.name, keep(last=1)), copy.run.store)
    if [checkpoint.id for checkpoint in copy.live] != [newest.id]:
        raise Wrong(f"{len(copy.live)} checkpoints are left, and only the newest should be")
    if bad := copy.damage():
        raise Wrong(f"the copies are damaged after pruning: {next(iter(bad.values()))}")
    return RehearsalResult(f"{len(done.retired)} were pruned, and step {newest.step} is still as committed")


REHEARSALS = {
    rehearsal.name: rehearsal
    for rehearsal in (
        CopyRehearsal("verify", "every byte of the copies was read", verified),
        CopyRehearsal("restore", "the newest checkpoint was restored", restored),
        CopyRehearsal("damage", "a byte of the newest checkpoint was changed", damaged),
        CopyRehearsal("lost", "a file of the newest checkpoint was removed", lost),
        CopyRehearsal("torn", "half of the newest checkpoint's record was cut off", torn),
        CopyRehearsal("prune", "all checkpoints but the newest were pruned", pruned),
    )
}
"""Rehearsals by name, in their order."""


def chosen_of(names: list[str]) -> list[CopyRehearsal]:
    """Return the named rehearsals; all if none is named."""
    unknown = [name for name in names if name not in REHEARSALS]
    if unknown:
        raise ConfigError(f"there is no rehearsal {unknown[0]!r} of copies", hint=f"there are {', '.join(REHEARSALS)}")
    return [rehearsal for rehearsal in REHEARSALS.values() if not names or rehearsal.name in names]


def _check_fallback(copy: CopyLoads, newest: Checkpoint, before: Checkpoint, means: str) -> RehearsalResult:
    bad = copy.damage()
    if before.id in bad:
        raise Wrong(f"the previous checkpoint is damaged as well: {bad[before.id]}")
    try:
        skipped, took = copy.restored()
    except RelightError as error:
        raise Wrong(f"nothing could be restored: {error.what}") from error
    if skipped != {newest.id}:
        raise Wrong(
            "the damaged checkpoint was restored"
            if not skipped
            else f"the restore skipped {', '.join(sorted(skipped))}"
        )
    why = f"verify named it; a restore skipped it and restored step {before.step} in {duration_text(took)}"
    return RehearsalResult(why, back_s=round(took, 3), steps_lost=newest.step - before.step, means=means)


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
