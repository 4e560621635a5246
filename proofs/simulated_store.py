"""A store in memory that many simulated processes share. At each call another process may run, and the call may fail.

``SimulatedStore`` is one process's access to the contents (``DurableNames``). It models the local store:

- ``put_once`` is a temporary file, a link, and an fsync: other processes see the name before it is durable, a death
  leaves the temporary.
- ``write`` makes a name that needs ``sync``. Missing directories above it are made, and made durable, one by one.
- A listing takes time: each name that is created or deleted meanwhile may be in it or not.
- *Refused*: without effect. *Done*: with its effect, but the answer was lost. A creation then raises ``Uncertain``
  (*unsure*, done or not), or the layer below tried again and reports that the name exists (*answered twice*). *Late*:
  the request takes effect after it raised ``Uncertain``. *Stale*: a listing from some changes ago, but never from
  before the caller's own last change.
- A power cut drops any of the names that are not durable.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Protocol

from proofs.shelf import DurableFile, DurableNames, create
from relight.errors import CheckpointNotFound, CorruptCheckpoint, NoSpace, StoreUnavailable, UnsafeContent
from relight.format.names import LOG_DIR
from relight.store.base import Entry, Properties, Reader, StoreBase, Uncertain, Writer
from relight.store.durable import TMP_PREFIX

FAULTS: dict[str, tuple[str, ...]] = {
    "put_once": ("refused", "full", "unsure", "unsure_done", "answered_twice", "late"),
    "create": ("refused", "full", "left"),
    "write": ("refused", "full"),
    "finish": ("refused",),
    "abort": ("left",),
    "sync": ("refused", "done"),
    "get": ("refused",),
    "open": ("refused",),
    "list": ("refused", "stale"),
    "delete": ("refused", "done"),
    "delete_dir": ("refused", "done"),
}
"""Faults of each operation."""


_PROPERTIES = Properties(exclusive_create=True, durable=True, parallel_reads=1)


class Died(BaseException):
    """The process has died. Every later call of it raises this too, so that its cleanup has no effect."""


class SimulatedProcess(Protocol):
    """Interface of a process for its store."""

    name: str

    def step(self, operation: str, key: str) -> None:
        """Let other processes run. Raise ``Died`` if this one dies."""

    def takes(self, operation: str, key: str, moments: int) -> None:
        """Let other processes run for about ``moments`` steps."""

    def fault(self, operation: str, key: str) -> str:
        """Return the fault of this operation: one of ``FAULTS``, or an empty string."""


class SimulatedStore(StoreBase):
    """One process's store.

    ``fine``: other processes may run between the steps of one call. ``torn``: whether listings of a prefix take time.
    ``undurable``: names are visible before they are durable.
    """

    def __init__(
        self,
        shelf: DurableNames,
        process: SimulatedProcess,
        rng: random.Random,
        *,
        fine: bool = True,
        torn: Callable[[str], bool] | None = None,
        undurable: bool = True,
    ) -> None:
        self.url = "simulated://"
        self.shelf, self._who, self._rng = shelf, process, rng
        self._fine, self._torn, self._undurable = fine, torn if fine else None, fine and undurable

    def properties(self) -> Properties:
        """See ``ByteStore``."""
        return _PROPERTIES

    def put_once(self, key: str, data: bytes) -> bool:
        """See ``ByteStore``."""
        fault = self._enter("put_once", key)
        if fault == "unsure":
            raise Uncertain("no answer (and nothing was done)", where=key)
        if fault == "late":
            self.shelf.under_way.append((key, data, self._who.name))
            raise Uncertain("no answer (and it is under way)", where=key)
        self._make_parents(key)
        parent, _, name = key.rpartition("/")
        temporary = f"{parent}/{TMP_PREFIX}{name}-{self._rng.getrandbits(64):016x}".lstrip("/")
        if self._fine:
            self.shelf.put(temporary, DurableFile(data=data, finished=True), self._who.name)
            self._who.step("link", key)
            if temporary not in self.shelf.files:  # swept
                if key in self.shelf.files:
                    return False
                raise Uncertain("the temporary was swept", where=key)
        created = create(self.shelf, key, data, self._who.name)
        if created and (fault != "unsure_done" or not self._undurable):
            self._between("sync", key)
            self.shelf.sync(parent)
        if self._fine:
            self._who.step("unlink", temporary)
            self.shelf.remove(temporary, self._who.name)
        if fault == "unsure_done":
            raise Uncertain("no answer (and it was done)", where=key)
        return created and fault != "answered_twice"

    def write(self, key: str, size: int) -> Writer:
        """See ``ByteStore``."""
        fault = self._enter("create", key)
        self._make_parents(key)
        if key in self.shelf.files:
            raise StoreUnavailable("a file of this name exists already", where=key)
        file = DurableFile(size)
        self.shelf.put(key, file, self._who.name)
        if fault == "left":
            raise StoreUnavailable("no answer (and an empty file is left)", where=key)
        return _SimulatedWriter(self, key, file)

    def rewrite(self, key: str, size: int) -> Writer:
        """See ``Rewrites``. The file takes the place of another when it is finished."""
        self._enter("create", key)
        self._make_parents(key)
        return _SimulatedReplacement(self, key, DurableFile(size))

    def sync(self, prefix: str) -> None:
        """See ``ByteStore``."""
        fault = self._enter("sync", prefix)
        self.shelf.sync(prefix)
        if fault:
            raise StoreUnavailable("no answer (and it was done)", where=prefix)

    def get(self, key: str, limit: int) -> bytes:
        """See ``ByteStore``."""
        self._enter("get", key)
        data = self._file(key).data
        if len(data) > limit:
            raise UnsafeContent(f"{len(data)} bytes where at most {limit} are allowed", where=key)
        return bytes(data)

    def open(self, key: str) -> Reader:
        """See ``ByteStore``."""
        self._enter("open", key)
        return _SimulatedReader(self._file(key).data, key)

    def list(self, prefix: str) -> Iterator[Entry]:
        """See ``ByteStore``."""
        fault = self._enter("list", prefix)
        shelf = self.shelf
        names = shelf.past(prefix, self._who.name, self._rng) if fault == "stale" else dict(shelf.dirs.get(prefix, {}))
        if self._torn is not None and fault != "stale" and self._torn(prefix):
            # the log's may be long
            moments = self._rng.choice((1, 1, 2, 6, 40) if prefix.endswith(LOG_DIR) else (1, 1, 2))
            self._who.takes("listed", prefix, moments)
            after = shelf.dirs.get(prefix, {})
            for name in sorted(names.keys() ^ after.keys()):
                if self._rng.random() < 0.5:
                    names.pop(name, None) if name in names else names.setdefault(name, after.get(name, False))
        order = sorted(names.items(), reverse=self._rng.random() < 0.5)
        return map(_entry, order)

    def delete(self, key: str) -> None:
        """See ``ByteStore``."""
        fault = self._enter("delete", key)
        self.shelf.remove(key, self._who.name)
        if fault:
            raise StoreUnavailable("no answer (and it was done)", where=key)

    def delete_dir(self, prefix: str) -> bool:
        """See ``ByteStore``."""
        fault = self._enter("delete_dir", prefix)
        is_removed = self.shelf.remove_dir(prefix, self._who.name)
        if fault:
            raise StoreUnavailable("no answer (and it was tried)", where=prefix)
        return is_removed

    def _enter(self, operation: str, key: str) -> str:
        self._who.step(operation, key)
        fault = self._who.fault(operation, key)
        if fault == "refused":
            raise StoreUnavailable("no answer (and nothing was done)", where=key)
        if fault == "full":
            raise NoSpace("the disk is full", where=key)
        return fault

    def _between(self, operation: str, key: str) -> None:
        if self._undurable:
            self._who.step(operation, key)

    def _make_parents(self, key: str) -> None:
        parent = key.rpartition("/")[0]
        missing = []
        while parent not in self.shelf.dirs:
            missing.append(parent)
            parent = parent.rpartition("/")[0]
        for new in reversed(missing):
            if self._fine:
                self._who.step("mkdir", new)
            self.shelf.make_dir(new, self._who.name)
            self._between("sync", new)
            self.shelf.sync(new.rpartition("/")[0])

    def _file(self, key: str) -> DurableFile:
        try:
            return self.shelf.files[key]
        except KeyError:
            raise CheckpointNotFound("no such file", where=key) from None


_entry = functools.lru_cache(maxsize=1 << 12)(Entry._make)


class _SimulatedWriter:
    align = 1

    def __init__(self, store: SimulatedStore, key: str, file: DurableFile) -> None:
        self._store, self._key, self._file = store, key, file

    def write_at(self, offset: int, data: memoryview) -> None:
        self._store._enter("write", self._key)
        self._file.data[offset : offset + len(data)] = data

    def finish(self, size: int | None = None) -> None:
        self._store._enter("finish", self._key)
        if size is not None:
            del self._file.data[size:]
        self._file.finished = True

    def abort(self) -> None:
        self._store._who.step("abort", self._key)
        if not self._store._who.fault("abort", self._key) and self._store.shelf.files.get(self._key) is self._file:
            self._store.shelf.remove(self._key, self._store._who.name)


class _SimulatedReplacement(_SimulatedWriter):
    def finish(self, size: int | None = None) -> None:
        super().finish(size)
        shelf = self._store.shelf
        if self._key in shelf.files:
            shelf.files[self._key] = self._file
        else:
            shelf.put(self._key, self._file, self._store._who.name)


class _SimulatedReader:
    def __init__(self, data: bytearray, key: str) -> None:
        self._data, self._key, self.size = data, key, len(data)

    def fetch(self, offset: int, length: int, room: memoryview) -> memoryview | None:
        return None

    def read_into(self, offset: int, into: memoryview) -> None:
        if offset + len(into) > len(self._data):
            raise CorruptCheckpoint(f"the file ends at byte {len(self._data)}, and is truncated", where=self._key)
        into[:] = memoryview(bytes(self._data))[offset : offset + len(into)]

    def close(self) -> None:
        pass


class FaultFreeProcess:
    """Process that observes from outside: it never waits, and its calls never fail."""

    name = "outside"

    def step(self, operation: str, key: str) -> None:
        """Return at once."""

    def takes(self, operation: str, key: str, moments: int) -> None:
        """Return at once."""

    def fault(self, operation: str, key: str) -> str:
        """Return no fault."""
        return ""
