"""Make the drives of a mirrored store equal again: admit drives that were away or are new, copy what they lack, compare the rest.

Processes may save meanwhile: from its admission on a drive is written too, and a writer that began before copies its file when it ends.
A file in a checkpoint's directory without a root may still be being written: it is copied only where it is missing, and never replaced.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from relight.errors import CheckpointNotFound, ConfigError, RelightError
from relight.format.names import ROOT_FILE, parse_dir
from relight.format.strict import SEALED_BYTES_MAX
from relight.store.base import ByteStore, Entry, Reader, StoreBase, Writer
from relight.store.durable import rewritten_of, temporary_of
from relight.store.mirror_drives import COPIES, is_own
from relight.store.mirror_files import COPY_BYTES
from relight.store.mirror_state import AWAY, DOUBTED, GOOD, is_sealed
from relight.store.mirrored import MirroredStore
from relight.store.wrapper import unwrap

AGAIN_S = 1.0
"""Seconds after which two copies that differ are compared again: a process may be writing them."""


class MirrorDamage(NamedTuple):
    """A file with copies that differ. ``repaired_from``: the drive that the right bytes came from; "" if none is known to be right."""

    file: str
    drive: str
    detail: str
    repaired_from: str = ""


@dataclass(slots=True)
class EqualizeReport:
    """What a rebuild did."""

    files: int = 0
    bytes: int = 0
    deleted: int = 0
    damage: list[MirrorDamage] = field(default_factory=list)


class OneCopy(StoreBase):
    """One copy of a mirrored store: reads come only from the copy with the number ``copy``, 0 or 1."""

    def __init__(self, store: MirroredStore, copy: int) -> None:
        self.store, self.copy, self.url = store, copy, store.url

    def place_of(self, key: str) -> int:
        """Return the place of this copy of a file."""
        return self.store.copies_of(key)[self.copy]

    def put_once(self, key: str, data: bytes) -> bool:
        """See ``ByteStore``."""
        return self.store.put_once(key, data)

    def write(self, key: str, size: int) -> Writer:
        """See ``ByteStore``."""
        return self.store.write(key, size)

    def open(self, key: str) -> Reader:
        """See ``ByteStore``."""
        return self.store.drive(self.place_of(key)).place.open(key)

    def list(self, prefix: str) -> Iterator[Entry]:
        """See ``ByteStore``."""
        return self.store.list(prefix)

    def delete(self, key: str) -> None:
        """See ``ByteStore``."""
        self.store.delete(key)


def mirrored_in(store: ByteStore) -> MirroredStore | None:
    """Return the mirrored store inside wrappers; None if there is none."""
    inner = unwrap(store)
    return inner if isinstance(inner, MirroredStore) else None


def admit(store: MirroredStore, new_drives: Sequence[str]) -> list[str]:
    """Admit the drives that were away and are there, and those in ``new_drives``. Return those that are not whole yet.

    A new drive's directory must be empty, or have the remains of the same place. Without being named, an empty directory is not admitted:
    it may be the mount point of a drive that is not mounted.
    """
    roots = [status.path for status in store.statuses()]
    named = [os.path.abspath(os.path.expanduser(path)) for path in new_drives]
    for path in named:
        if path not in roots:
            raise ConfigError(
                f"{path} is not a drive of this store", where=store.url, hint=f"its drives: {', '.join(roots)}"
            )
        store.identify(roots.index(path))
    admitted = {
        number: DOUBTED
        for number, status in enumerate(store.statuses())
        if (status.status == AWAY and store.is_place(number)) or status.path in named
    }
    if admitted:
        store.change(admitted, "it is being rebuilt", also=list(admitted))
    return [status.path for status in store.statuses() if status.status == DOUBTED]


def settle(store: MirroredStore) -> list[str]:
    """Declare all doubted drives good, after they were made equal. Return them."""
    doubted = {number: GOOD for number, status in enumerate(store.statuses()) if status.status == DOUBTED}
    if doubted:
        store.change(doubted, "it was rebuilt")
    return [store.statuses()[number].path for number in doubted]


def equalize(
    store: MirroredStore,
    report: EqualizeReport,
    *,
    prefix: str = "",
    deep: bool = True,
    verified: Callable[[str], bool] | None = None,
    repair: bool = True,
    progress: Callable[[int], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Make the copies of all files below ``prefix`` equal; only of those directly in it unless ``deep``.

    ``verified``: returns whether both copies of a directory's files were checked against their hashes, so that they need no comparison.
    None: only copy what is missing.
    """
    todo, empty = [prefix], list[tuple[int, str]]()
    while todo and not stop():
        here = todo.pop()
        usable = [number for number, status in enumerate(store.statuses()) if status.status != AWAY]
        listed = {
            number: {entry.name: entry.is_dir for entry in store.drive(number).place.list(here)} for number in usable
        }
        names = {name: is_dir for entries in listed.values() for name, is_dir in entries.items()}
        below = [
            f"{here}/{name}" if here else name
            for name, is_dir in names.items()
            if is_dir and (here or name != "lost+found")
        ]
        todo += below if deep else []
        writing = parse_dir(here.rpartition("/")[2]) is not None and ROOT_FILE not in names
        for name in sorted(name for name, is_dir in names.items() if not is_dir):
            if temporary_of(name) or rewritten_of(name) or (not here and is_own(name)):
                continue
            key = f"{here}/{name}" if here else name
            having = [number for number in store.copies_of(key) if name in listed.get(number, ())]
            if len(having) == 1:
                _missing(store, key, having[0], report, repair, verified is not None, writing, progress)
            elif len(having) == COPIES and verified is not None and not writing and not verified(here):
                _compare(store, key, report, repair, progress)
        empty += [(number, here) for number in usable if here and verified is not None]
    for number, here in reversed(empty):  # what a drive that was away had of deleted checkpoints
        if store.statuses()[number].status == DOUBTED and repair:
            store.drive(number).place.delete_dir(here)


def _missing(
    store: MirroredStore,
    key: str,
    having: int,
    report: EqualizeReport,
    repair: bool,
    deletes: bool,
    writing: bool,
    progress: Callable[[int], None] | None,
) -> None:
    """Copy a file that one drive lacks; delete it if only a doubted drive has it."""
    other = next(number for number in store.copies_of(key) if number != having)
    status = {number: row.status for number, row in enumerate(store.statuses())}
    if status[other] == AWAY or not repair:
        if status[other] == GOOD and not writing:
            report.damage.append(MirrorDamage(key, _root(store, other), "the file is missing"))
        return
    if status[having] == GOOD:
        if status[other] == GOOD and writing:
            return  # its writer is between the two
        try:
            copied = store.copy_file(key, having, other, progress, only_if_missing=True)
        except CheckpointNotFound:
            return  # deleted meanwhile
        report.files, report.bytes = report.files + 1, report.bytes + copied
        if status[other] == GOOD:
            report.damage.append(MirrorDamage(key, _root(store, other), "the file was missing", _root(store, having)))
    elif deletes and not _has(store, other, key):
        store.drive(having).place.delete(key)
        report.deleted += 1


def _compare(
    store: MirroredStore, key: str, report: EqualizeReport, repair: bool, progress: Callable[[int], None] | None
) -> None:
    """Compare two copies of a file, and repair one if the other is known to be right."""
    first, second = store.copies_of(key)
    for last in (False, True):
        try:
            if not differs(store, key, None if last else progress):
                return
        except CheckpointNotFound:
            return  # deleted meanwhile
        except RelightError:
            break  # one of them is unreadable
        if not last:
            time.sleep(AGAIN_S)
    right = _right(store, key)
    if right is None or not repair:
        names = f"{_root(store, first)} and {_root(store, second)}"
        report.damage.append(
            MirrorDamage(key, names, "the copies differ" + ("" if right is not None else ", and neither proves itself"))
        )
        return
    wrong = second if right == first else first
    report.bytes += store.copy_file(key, right, wrong)
    report.files += 1
    report.damage.append(MirrorDamage(key, _root(store, wrong), "the copies differed", _root(store, right)))


def _right(store: MirroredStore, key: str) -> int | None:
    """Return the place with the copy that counts: the one that is sealed, or readable, or the good drive's; None if that is unknown."""
    copies, sealed, readable = store.copies_of(key), list[int](), list[int]()
    for number in copies:
        try:
            _read_through(store, number, key)
            readable.append(number)
            sealed += [number] if is_sealed(store.drive(number).place.get(key, SEALED_BYTES_MAX)) else []
        except RelightError:
            continue
    if not readable:
        return None
    rows = store.statuses()
    good = [number for number in copies if rows[number].status == GOOD]
    return next((those[0] for those in (sealed, readable, good) if len(those) == 1), None)


def _read_through(store: MirroredStore, number: int, key: str) -> None:
    reader = store.drive(number).place.open(key)
    try:
        room = memoryview(bytearray(min(COPY_BYTES, reader.size)))
        for offset in range(0, reader.size, COPY_BYTES):
            reader.read_into(offset, room[: min(COPY_BYTES, reader.size - offset)])
    finally:
        reader.close()


def differs(store: MirroredStore, key: str, progress: Callable[[int], None] | None = None) -> bool:
    """Return whether the two copies of a file differ."""
    with contextlib.ExitStack() as files:
        # one by one: if the second cannot be opened, the first must be closed
        first, second = (
            files.enter_context(contextlib.closing(store.drive(number).place.open(key)))
            for number in store.copies_of(key)
        )
        if first.size != second.size:
            return True
        rooms = [memoryview(bytearray(min(COPY_BYTES, first.size))) for _ in range(COPIES)]
        for offset in range(0, first.size, COPY_BYTES):
            length = min(COPY_BYTES, first.size - offset)
            for reader, room in zip((first, second), rooms, strict=True):
                reader.read_into(offset, room[:length])
            if progress is not None:
                progress(length)
            if rooms[0][:length] != rooms[1][:length]:
                return True
        return False


def _has(store: MirroredStore, number: int, key: str) -> bool:
    try:
        store.drive(number).place.open(key).close()
    except CheckpointNotFound:
        return False
    return True


def _root(store: MirroredStore, number: int) -> str:
    return store.drive(number).place.url
