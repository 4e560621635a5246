"""Rehearsals on copies of a run's checkpoints alone, without any job: what ``relight drill --copy`` does, here and behind a page.

The run is read, and nothing else of it is touched. Copies lie in a directory of the drill's own, which only its owner can read, in a store
opened as the settings say: what is encrypted there is so here, or nothing is copied.
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
from relight.catalog import verify_checkpoint, verify_log
from relight.catalog.run import Run
from relight.drill.rehearsals import RehearsalResult
from relight.drill.stage import CannotTry, Wrong, own_store
from relight.errors import CheckpointNotFound, ConfigError, NoSpace, RelightError
from relight.log import Checkpoint
from relight.log.listing import Folders
from relight.observe.events import Event, subscribe
from relight.policy import keep
from relight.reclaim import execute, plan_prune
from relight.store.base import encrypts
from relight.transfer import execute_copy, plan_copy

BROUGHT = 2
"""Number of copied checkpoints: the newest, and one to fall back to."""
_ROOM = 2.0
"""Factor of the copies' size that must be free on the disk, so that other users of the disk are not affected."""
_PLACES = 16


@dataclass(frozen=True, slots=True)
class CopyLoads:
    """The copies, and how the loads of them went."""

    run: Run

    @property
    def live(self) -> list[Checkpoint]:
        """Live checkpoints in the present log, oldest first."""
        return self.run.history().live

    def two(self) -> tuple[Checkpoint, Checkpoint]:
        """The newest, and the one before."""
        if len(self.live) < BROUGHT:
            raise CannotTry("the run has one checkpoint: there is none to go back to")
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
        """Restore the newest good one as ``relight.load`` does, into memory: which were passed over, and how long it took."""
        needs, has = max(checkpoint.body.logical_bytes for checkpoint in self.live), available_bytes()
        if has is not None and needs > has // 2:
            raise CannotTry(f"it takes {needs / 1e9:.1f} GB of memory, of which this machine has {has / 1e9:.1f} left")
        try:
            import relight.capture  # noqa: F401 - which brings torch: that takes its time, and is no restore's
        except ModuleNotFoundError as error:
            raise CannotTry(f"to restore takes {error.name}, which is not installed here") from None
        passed: set[str] = set()

        def heard(event: Event) -> None:
            if event.name == "restore.skipped":
                passed.add(str(event.fields.get("id")))

        undo, began = subscribe(heard), time.monotonic()
        try:
            load(f"{self.run.store.url.rstrip('/')}/{self.run.name}")
        finally:
            undo()
        return passed, time.monotonic() - began

    def hurts(self, one: Checkpoint) -> bool:
        """Whether a tensor of it is damaged: what lies between tensors hurts no restore, though verify says so."""
        return any(finding.tensor for finding in verify_checkpoint(self.run.store, self.run.view(), one))

    def file_of(self, one: Checkpoint, much: Callable[[Path], bool]) -> Path:
        """The largest of its files of which that is true; where names are encrypted, of all files."""
        root = Path(self.run.store.url)
        folder = root / one.lies_in(self.run.name)
        files = [path for path in (folder if folder.is_dir() else root).rglob("*") if path.is_file()]
        files.sort(key=lambda path: -path.stat().st_size)
        path_ = next((path for path in files[:_PLACES] if much(path)), None)
        if path_ is None:
            raise CannotTry("none of its files matters for its bytes")
        return path_


class CopyRehearsal(NamedTuple):
    """One. ``do`` gives what it has shown, or says that it is wrong."""

    name: str
    what: str
    do: Callable[[CopyLoads], RehearsalResult]


@contextlib.contextmanager
def copied(source: Run, top: Path) -> Iterator[CopyLoads]:
    """Its newest checkpoints, every byte verified on the way. ``NoSpace`` before anything is written, if there is not the room."""
    newest = source.history().live[-BROUGHT:]
    if not newest:
        raise CheckpointNotFound(f"run {source.name} has no checkpoint", where=source.store.url)
    store = own_store(top / "store")
    if encrypts(source.store) and not encrypts(store):
        hint = "have relight.toml, or RELIGHT_KEY, say with which key, as for the run"
        raise ConfigError("the run is encrypted, and copies of it would not be", where=source.store.url, hint=hint)
    needs, free = sum(checkpoint.body.alone_bytes for checkpoint in newest), shutil.disk_usage(top).free
    if needs * _ROOM > free:
        hint = f"{_ROOM:g} times the copies must be free; TMPDIR names another place"
        raise NoSpace(f"the copies take {needs / 1e9:.1f} GB, and {free / 1e9:.1f} are free", where=str(top), hint=hint)
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
    passed, took = copy.restored()
    if passed:
        raise Wrong(f"{', '.join(sorted(passed))} cannot be restored")
    newest = copy.live[-1]
    return RehearsalResult(f"step {newest.step}, {newest.body.logical_bytes:,} bytes, was restored in {took:.2f} s", back_s=round(took, 3))


def damaged(copy: CopyLoads) -> RehearsalResult:
    """One byte is another: verify must name it, and a restore must pass it over."""
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
        return _goes_back(copy, newest, before, f"a byte of {path.name} was changed")
    finally:
        _flip(path, offset)


def lost(copy: CopyLoads) -> RehearsalResult:
    """Remove one of its files."""
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
        return _goes_back(copy, newest, before, f"{path.name} was taken away")
    finally:
        aside.rename(path)


def torn(copy: CopyLoads) -> RehearsalResult:
    """The record of its commit is half of what it was, as a crash of the storage may leave it: it does not exist, the one before does."""
    newest, before = copy.two()
    record = Path(copy.run.store.url, Folders(copy.run.store, copy.run.name).key(newest.seq))
    if not record.is_file():
        raise CannotTry("names in the store are encrypted, so that no record can be told from another")
    whole = record.read_bytes()
    record.write_bytes(whole[: len(whole) // 2])
    try:
        again = CopyLoads(Run(own_store(copy.run.store.url), copy.run.name))  # as a process that starts now
        if not again.run.view().faults:
            raise Wrong("half a record was taken for a whole one")
        if [checkpoint.id for checkpoint in again.live] != [before.id]:
            raise Wrong(f"the log has {len(again.live)} checkpoints left, where it should have the one before")
        _, took = again.restored()
    finally:
        record.write_bytes(whole)
    why = f"the log says that record {newest.seq} is damaged; step {before.step} was restored in {took:.2f} s"
    return RehearsalResult(
        why, back_s=round(took, 3), steps_lost=newest.step - before.step, means=f"half of record {newest.seq} was cut off"
    )


def pruned(copy: CopyLoads) -> RehearsalResult:
    """All but the newest go, as retention would have it; that one must be whole behind it. The last: it does not come back."""
    newest, _ = copy.two()
    done = execute(plan_prune(copy.run.store, copy.run.name, keep(last=1)), copy.run.store)
    if [checkpoint.id for checkpoint in copy.live] != [newest.id]:
        raise Wrong(f"{len(copy.live)} are left, where one should be")
    if bad := copy.damage():
        raise Wrong(f"what is left is damaged: {next(iter(bad.values()))}")
    return RehearsalResult(f"{len(done.retired)} went, and step {newest.step} is as committed behind it")


REHEARSALS = {
    rehearsal.name: rehearsal
    for rehearsal in (
        CopyRehearsal("verify", "the copies were read to the byte", verified),
        CopyRehearsal("restore", "the newest was restored", restored),
        CopyRehearsal("damage", "a byte of the newest was changed", damaged),
        CopyRehearsal("lost", "a file of the newest was taken away", lost),
        CopyRehearsal("torn", "half of the newest's record was cut off", torn),
        CopyRehearsal("prune", "all but the newest went", pruned),
    )
}
"""Rehearsals by name, in their order."""


def chosen_of(names: list[str]) -> list[CopyRehearsal]:
    """Return the named rehearsals; all if none is named."""
    unknown = [name for name in names if name not in REHEARSALS]
    if unknown:
        raise ConfigError(f"there is no rehearsal {unknown[0]!r} of copies", hint=f"there are {', '.join(REHEARSALS)}")
    return [rehearsal for rehearsal in REHEARSALS.values() if not names or rehearsal.name in names]


def _goes_back(copy: CopyLoads, newest: Checkpoint, before: Checkpoint, means: str) -> RehearsalResult:
    bad = copy.damage()
    if before.id in bad:
        raise Wrong(f"the one before is damaged as well: {bad[before.id]}")
    try:
        passed, took = copy.restored()
    except RelightError as error:
        raise Wrong(f"nothing could be restored: {error.what}") from error
    if passed != {newest.id}:
        raise Wrong("the damaged one was restored" if not passed else f"{', '.join(sorted(passed))} were passed over")
    why = f"verify named it; a restore passed it over and had step {before.step} in {took:.2f} s"
    return RehearsalResult(why, back_s=round(took, 3), steps_lost=newest.step - before.step, means=means)


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
