"""Manage a store's keys: add, rotate and revoke key slots, and encrypt again what a leaked key could open.

Slots are added before any is removed, and a new slot is opened once before it is relied on. So a process that is killed halfway leaves a
store that opens with the old key, the new key, or both.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import NamedTuple, TypeVar

import msgspec

from relight.engines import IN_PROCESS, Engine
from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, RelightError, WrongKey
from relight.format.cipher import KEY_BYTES, PAGE_BYTES, Secret, ring_id, stored_size
from relight.format.keyring import KEYS_DIR, KeySlot
from relight.format.names import STORE_FILE, is_record_key
from relight.format.records import decode_store, encode_store
from relight.format.strict import SEALED_BYTES_MAX
from relight.keys import Keychain, Provider
from relight.reader.by_reference import shared_url
from relight.store import ByteStore, open_bytes
from relight.store.base import rewrites, write_whole
from relight.store.durable import REWRITTEN_PREFIX
from relight.store.encrypted import EncryptedStore, is_clear
from relight.store.keyring import (
    drop_slot,
    open_ring,
    open_slot,
    put_slot,
    require_encrypted,
    revoked_in,
    slots_in,
    store_id_of,
)
from relight.store.mirror_drives import COPIES
from relight.store.mirror_rebuild import OneCopy, mirrored_in
from relight.store.mirror_state import AWAY
from relight.store.wrapper import unwrap

COPY_BYTES = 16 << 20
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KeyStatus:
    """A present or revoked slot. ``opens``: whether the given keys open it. ``revoked``: time of its removal, else ""."""

    generation: int
    kek: str
    kind: str
    label: str
    created: str
    opens: bool
    revoked: str = ""

    def to_dict(self) -> dict[str, object]:
        """Return the fields for ``--json``."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class Changed:
    """Labels and ids of the slots that were added and revoked."""

    added: list[str] = field(default_factory=list)
    revoked: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Rekeyed:
    """What was encrypted again. ``left``: files written meanwhile by a process that still uses the old ring key."""

    files: int = 0
    bytes: int = 0
    left: int = 0
    plain: int = 0
    """Unencrypted files in an encrypted store. Another program put them there, and they are left alone."""
    damaged: list[str] = field(default_factory=list)
    """Damaged files: they stay encrypted under the old ring key."""
    slots_left: list[str] = field(default_factory=list)
    """Slots of old ring keys that stay, because damaged files may need them."""
    needed: list[str] = field(default_factory=list)
    """Those of ``slots_left`` that no kept key opens: their keys must be given to read the repaired files."""
    generation: int = 0
    dropped: list[str] = field(default_factory=list)
    """Keys other than the leaked one that do not open the store any more, because they were not kept."""


def status(inner: ByteStore, keychain: Keychain | None) -> list[KeyStatus]:
    """Return all slots of a store and the revoked ones, by generation. Cost: tries the given keys on each slot."""
    store_id_of(inner)
    rows = [
        KeyStatus(
            slot.generation,
            slot.kek,
            slot.kind,
            slot.label,
            slot.created,
            keychain is not None and open_slot(slot, keychain) is not None,
        )
        for slot in slots_in(inner)
    ]
    rows += [
        KeyStatus(slot.generation, slot.kek, "", slot.label, slot.created, False, slot.revoked)
        for slot in revoked_in(inner)
    ]
    return sorted(rows, key=lambda row: (row.generation, bool(row.revoked), row.created))


def add(inner: ByteStore, keychain: Keychain, new: Provider, label: str = "") -> Changed:
    """Add slots so that ``new`` opens the store. Raise ``WrongKey`` if the given keys do not open every generation."""
    changed = Changed()
    for (generation, _), slots in _rings(inner).items():
        key = _opened(slots, keychain, generation)
        if not any(_opens(slot, new) for slot in slots):
            changed.added.append(_put(inner, slots[0].store, generation, key, new, label))
    return changed


def rotate(inner: ByteStore, keychain: Keychain, old: str, new: Provider, label: str = "") -> Changed:
    """Replace the slots of ``old``, an id or a label, by slots of ``new``. No data is encrypted again: see ``rekey``."""
    mine = _slots_of(inner, old)
    changed = add(inner, keychain, new, label)
    for slot in mine:
        if _opens(slot, new):
            raise ConfigError("the old key and the new one are the same", where=slot.label)
        drop_slot(inner, slot)
        changed.revoked.append(_named(slot))
    return changed


def revoke(inner: ByteStore, keychain: Keychain, old: str) -> Changed:
    """Remove the slots of ``old``, an id or a label. Raise ``ConfigError`` if the given keys would then no longer open a generation."""
    mine, changed = _slots_of(inner, old), Changed()
    for (generation, _), slots in _rings(inner).items():
        if any(slot in mine for slot in slots) and not any(
            open_slot(slot, keychain) for slot in slots if slot not in mine
        ):
            raise ConfigError(
                f"without it none of the keys at hand opens generation {generation}",
                where=old,
                hint="add another first: relight keys add; or give it: RELIGHT_KEY=",
            )
    for slot in mine:
        drop_slot(inner, slot)
        changed.revoked.append(_named(slot))
    return changed


def rekey(
    inner: ByteStore,
    keychain: Keychain,
    *,
    leaked: str = "",
    keep: Keychain | None = None,
    progress: Callable[[int], None] = lambda length: None,
    plan_only: bool = False,
    encrypt_plain: bool = False,
    engine: Engine = IN_PROCESS,
) -> Rekeyed:
    """Encrypt again, under a new ring key, every file that ``leaked`` could open, then remove the old ring keys' slots.

    The slots of a ring key stay while a damaged file may need it: the whole pages of that file open with no other key.

    ``leaked``: id or label of a key, also of a revoked one; "*" for every file. A store that is not encrypted is encrypted as a whole. In
    an encrypted store, unencrypted files may come from another program. ``encrypt_plain`` takes them as the store's own, to continue an
    interrupted first encryption.

    ``keychain`` opens the present slots; each key of ``keep`` (None: of ``keychain``) gets a slot of the new ring key. A file is replaced
    atomically, so an interruption leaves whole files, each under the old or the new key, and calling it again continues. Processes that
    have the store open still use the old ring key: ``left`` counts what they wrote meanwhile. Cost: reads and writes each such file once.
    The engine's processes encrypt; they find the keys by their specs.
    """
    report, plain = Rekeyed(), not _is_marked(inner)
    keep = keep or keychain
    if leaked and plain:
        raise ConfigError("this store is not encrypted: no key could leak it", where=inner.url)
    if any(slot.store != store_id_of(inner) for slot in slots_in(inner)):
        raise WrongKey(
            "its slots are of another store: relight.json was replaced", where=inner.url, hint="restore it from a copy"
        )
    touched, damaged = _touched(inner, leaked) if leaked else set(), set[str]()
    report.dropped = [
        _named(slot)
        for slot in slots_in(inner)
        if bytes.fromhex(slot.ring) in touched
        and not _is(slot.kek, slot.label, leaked)
        and not any(_opens(slot, provider) for provider in keep.providers)
    ]
    if plan_only:
        planned = _Sources(EncryptedStore(inner, keychain, takes_plain=plain or encrypt_plain))
        for _, size in _to_do(planned, touched, report, damaged):
            report.files, report.bytes = report.files + 1, report.bytes + size
        report.damaged = sorted(damaged)
        return report
    if plain:
        _mark(inner)
    report.generation = _new_generation(inner, keychain, keep, touched)
    chain = Keychain([*keep.providers, *keychain.providers])
    encrypted = EncryptedStore(inner, chain, takes_plain=plain or encrypt_plain)
    for again in range(2):
        # damaged files are read a second time: bytes that were damaged in transit are whole then
        report.plain, before, damaged = 0, damaged, set()
        sources = _Sources(encrypted)
        files = _to_do(sources, touched, report, damaged)
        this_pass = (report.generation, again)
        for (key, size), is_whole in _rewrite_all(sources, chain, files, this_pass, engine, progress):
            if is_whole is None:
                continue
            if not is_whole:
                damaged.add(key)
                continue
            report.left += again and key not in before
            report.files, report.bytes = report.files + 1, report.bytes + size
    sources = _Sources(encrypted)
    late = sum(1 for _ in _to_do(sources, touched, Rekeyed(), damaged))
    report.left, report.damaged = report.left + late, sorted(damaged)
    if not late:
        needed = set[bytes | None]().union(*(_needed_by(sources, key, touched) for key in damaged))
        for slot in slots_in(inner):
            ring = bytes.fromhex(slot.ring)
            if ring in touched and ring in needed:
                report.slots_left.append(_named(slot))
                if open_slot(slot, keep) is None:
                    report.needed.append(_named(slot))
            elif ring in touched:
                drop_slot(inner, slot)
    report.dropped = [name for name in report.dropped if name not in report.slots_left]
    return report


def _needed_by(sources: _Sources, key: str, touched: set[bytes]) -> set[bytes | None]:
    """Return the ring keys that a damaged file may need: all of ``touched`` if its trailer is damaged, too.

    A record, or a file of one page, is useful only as a whole. With a slot that no key at hand opens, a damaged record would be
    reported as ``WrongKey``, and the whole log would be unreadable.
    """
    try:
        if is_record_key(key) or sources.store.stored_size_of(key) <= stored_size(PAGE_BYTES):
            return set()
        return sources.rings_of(key)
    except CheckpointNotFound:  # deleted meanwhile
        return set()
    except CorruptCheckpoint:
        return {*touched}


def _to_do(sources: _Sources, touched: set[bytes], report: Rekeyed, damaged: set[str]) -> Iterator[tuple[str, int]]:
    """Yield the files to encrypt again, with their lengths, except those in ``damaged``. Add further damaged files there.

    Count unencrypted files that are left alone in ``report.plain``.
    """
    store = sources.store
    for key in _files(store, ""):
        if key in damaged:
            continue
        try:
            rings = sources.rings_of(key)
            if None in rings and not store.takes_plain:
                report.plain += store.stored_size_of(key) > 0
                continue
            if None not in rings and rings.isdisjoint(touched):
                continue
            size = _by_first(sources.to_read(key, rings), partial(_size_of, key))
        except CheckpointNotFound:  # swept meanwhile
            continue
        except CorruptCheckpoint:  # it cannot be encrypted again
            damaged.add(key)
            continue
        if size:
            yield key, size


class _Sources:
    """A store to encrypt again and, if it is mirrored, a store for each copy of its files.

    The drives' states are read once, so each pass makes a new one: a drive can fail, or be rebuilt, meanwhile.
    """

    def __init__(self, store: EncryptedStore) -> None:
        self.store = store
        mirrored = mirrored_in(store.inner)
        copies = [OneCopy(mirrored, number) for number in range(COPIES)] if mirrored is not None else []
        self._copies = [(copy, EncryptedStore(copy, store.keychain, takes_plain=store.takes_plain)) for copy in copies]
        self._statuses = [drive.status for drive in mirrored.statuses()] if mirrored is not None else []

    def rings_of(self, key: str) -> set[bytes | None]:
        """Return the ids of the ring keys that encrypt the file, None for plaintext.

        In a mirrored store, a process that is killed between the renames on two drives leaves copies under different ring keys.
        """
        rings: set[bytes | None] = set()
        copies = self._copies_of(key)
        for copy in copies if len(copies) > 1 else ():
            with contextlib.suppress(RelightError):
                rings.add(copy.ring_of(key))
        return rings or {self.store.ring_of(key)}

    def to_read(self, key: str, rings: set[bytes | None]) -> list[EncryptedStore]:
        """Return the stores to read a file from. Copies under different ring keys are read one by one: their bytes do not fit together."""
        return [self.store] if len(rings) == 1 else self._copies_of(key)

    def _copies_of(self, key: str) -> list[EncryptedStore]:
        """Return the stores of a file's copies. A drive that is away is left out: a rebuild replaces its files."""
        return [store for copy, store in self._copies if self._statuses[copy.place_of(key)] != AWAY]


def _by_first(sources: list[EncryptedStore], read: Callable[[EncryptedStore], T]) -> T:
    """Return ``read`` of the first source that has the file whole.

    Raise ``CorruptCheckpoint`` if a source has it damaged, ``CheckpointNotFound`` if none has it.
    """
    damage: CorruptCheckpoint | None = None
    missing: CheckpointNotFound | None = None
    for source in sources:
        try:
            return read(source)
        except CorruptCheckpoint as error:
            damage = error
        except CheckpointNotFound as error:
            missing = error
    failure = damage or missing
    assert failure is not None
    raise failure


def _size_of(key: str, source: EncryptedStore) -> int:
    with contextlib.closing(source.open(key)) as reader:
        return reader.size


def _files(store: EncryptedStore, prefix: str) -> Iterator[str]:
    for entry in sorted(store.list(prefix)):
        key = f"{prefix}/{entry.name}" if prefix else entry.name
        if entry.is_dir:
            if key != KEYS_DIR:
                yield from _files(store, key)
        elif entry.name.startswith(REWRITTEN_PREFIX):
            # left by a killed rekey; a running one fails when its file is gone
            store.delete(key)
        elif not is_clear(key):
            yield key


class _RekeyTask(NamedTuple):
    """A file to encrypt again. ``specs``: of the keys that open the store. ``this_pass``: generation of the new ring key, and the pass."""

    url: str
    specs: tuple[str, ...]
    takes_plain: bool
    this_pass: tuple[int, int]
    key: str
    size: int


def _rewrite_all(
    sources: _Sources,
    chain: Keychain,
    files: Iterable[tuple[str, int]],
    this_pass: tuple[int, int],
    engine: Engine,
    progress: Callable[[int], None],
) -> Iterator[tuple[tuple[str, int], bool | None]]:
    """Encrypt files again. Yield each with the result of ``_rewrite``."""
    if engine.is_local:
        yield from ((item, _rewrite(sources, *item, progress)) for item in files)
        return
    store, specs = sources.store, tuple(provider.spec for provider in chain.providers)
    url = shared_url(store.inner)
    tasks = (_RekeyTask(url, specs, store.takes_plain, this_pass, key, size) for key, size in files)
    for task, is_whole in engine.run(_rewrite_one, tasks):
        progress(task.size)
        yield (task.key, task.size), is_whole


@lru_cache(maxsize=1)
def _store_for(url: str, specs: tuple[str, ...], takes_plain: bool, this_pass: tuple[int, int]) -> _Sources:
    """Return a process's store of one pass. ``this_pass`` keeps a later one from using the earlier one's ring key and states of drives."""
    return _Sources(EncryptedStore(unwrap(open_bytes(url)), Keychain.from_specs(specs), takes_plain=takes_plain))


def _rewrite_one(task: _RekeyTask) -> bool | None:
    """Encrypt a file again, in any process."""
    store = _store_for(task.url, task.specs, task.takes_plain, task.this_pass)
    return _rewrite(store, task.key, task.size, lambda length: None)


def _rewrite(sources: _Sources, key: str, size: int, progress: Callable[[int], None]) -> bool | None:
    """Encrypt a file again. Return False if it is damaged: it cannot be decrypted, and stays damaged.

    Return None if another process has deleted it meanwhile, as retention does.
    """
    try:
        to_read = sources.to_read(key, sources.rings_of(key))
        _by_first(to_read, lambda source: _rewrite_whole(source, sources.store, key, size, progress))
    except CheckpointNotFound:
        return None
    except CorruptCheckpoint:
        return False
    return True


def _rewrite_whole(
    source: EncryptedStore, store: EncryptedStore, key: str, size: int, progress: Callable[[int], None]
) -> None:
    reader = source.open(key)
    try:
        writer = store.rewrite(key, size)
        try:
            room = memoryview(bytearray(min(COPY_BYTES, size)))
            for offset in range(0, size, len(room)):
                piece = room[: min(len(room), size - offset)]
                reader.read_into(offset, piece)
                writer.write_at(offset, piece)
                progress(len(piece))
            writer.finish()
        except BaseException:
            writer.abort()
            raise
    finally:
        reader.close()


def _new_generation(inner: ByteStore, keychain: Keychain, keep: Keychain, touched: set[bytes]) -> int:
    """Make a generation with a new ring key and a slot for each kept key. Return its number.

    If the newest generation is not to be replaced, an earlier call began it, and it is completed instead.
    """
    store_id = require_encrypted(inner)
    rings = _rings(inner)
    newest, ring = max(rings, default=(0, ""))
    slots_kept = rings.get((newest, ring), [])
    if newest and bytes.fromhex(ring) not in touched:
        key = _opened(slots_kept, keychain, newest)
    else:
        newest, slots_kept, key = newest + 1, [], Secret(secrets.token_bytes(KEY_BYTES))
    for provider in keep.providers:
        if not any(_opens(slot, provider) for slot in slots_kept):
            known = [slot.label for slots in rings.values() for slot in slots if provider.fits(slot.kind, slot.kek)]
            _put(inner, store_id, newest, key, provider, known[-1] if known else "")
    open_ring(inner, keep)
    return newest


def _touched(inner: ByteStore, leaked: str) -> set[bytes]:
    """Return the ids of the ring keys that ``leaked`` could open."""
    known = [(slot.kek, slot.label, slot.ring) for slot in slots_in(inner)] + [
        (slot.kek, slot.label, slot.ring) for slot in revoked_in(inner)
    ]
    fitting = [(kek, ring) for kek, label, ring in known if leaked == "*" or _is(kek, label, leaked)]
    if not fitting:
        raise CheckpointNotFound(
            f"no key {leaked!r} has, or had, a slot here", where=inner.url, hint="relight keys status STORE"
        )
    if leaked != "*":
        _refuse_several(inner, {kek for kek, _ in fitting}, leaked)
    return {bytes.fromhex(ring) for _, ring in fitting}


def _rings(inner: ByteStore) -> dict[tuple[int, str], list[KeySlot]]:
    """Return the slots by generation and ring key.

    Two processes that create a store at the same time with different keys may make two rings of one generation.
    """
    rings: dict[tuple[int, str], list[KeySlot]] = {}
    for slot in slots_in(inner):
        rings.setdefault((slot.generation, slot.ring), []).append(slot)
    return dict(sorted(rings.items()))


def _slots_of(inner: ByteStore, name: str) -> list[KeySlot]:
    mine = [slot for slot in slots_in(inner) if _is(slot.kek, slot.label, name)]
    if not mine:
        raise CheckpointNotFound(f"no key {name!r} has a slot here", where=inner.url, hint="relight keys status STORE")
    _refuse_several(inner, {slot.kek for slot in mine}, name)
    return mine


def _refuse_several(inner: ByteStore, keks: set[str], name: str) -> None:
    """Raise ``ConfigError`` if a name fits several keys: another key than the intended one would be treated like it."""
    if len(keks) > 1:
        raise ConfigError(
            f"several keys are called {name!r}", where=inner.url, hint="give the id that relight keys status shows"
        )


def _is(kek: str, label: str, name: str) -> bool:
    return label == name or (len(name) >= 4 and kek.startswith(name))


def _opened(slots: list[KeySlot], keychain: Keychain, generation: int) -> Secret:
    for slot in slots:
        key = open_slot(slot, keychain)
        if key is not None:
            return key
    raise WrongKey(f"none of the keys at hand opens generation {generation}", where=KEYS_DIR)


def _opens(slot: KeySlot, provider: Provider) -> bool:
    return open_slot(slot, Keychain([provider])) is not None


def _put(inner: ByteStore, store_id: str, generation: int, key: Secret, provider: Provider, label: str) -> str:
    """Write a slot, read it back and open it. Return its name for people."""
    slot = put_slot(inner, store_id, generation, key, provider, label)
    inner.sync(KEYS_DIR)
    reread = [entry for entry in slots_in(inner) if entry.file == slot.file]
    if not reread or reread[0].ring != ring_id(key).hex() or not _opens(reread[0], provider):
        what = "the new slot does not open, or another process made a slot of the same name"
        hint = "no slot was removed; relight keys rekey --all makes one of two rings of a generation"
        raise WrongKey(what, where=f"{KEYS_DIR}/{slot.file}", hint=hint)
    return _named(reread[0])


def _named(slot: KeySlot) -> str:
    return f"{slot.label} ({slot.kek[:8]}), generation {slot.generation}"


def _is_marked(inner: ByteStore) -> bool:
    return decode_store(inner.get(STORE_FILE, SEALED_BYTES_MAX)).encrypted


def _mark(inner: ByteStore) -> None:
    """Mark the store as encrypted: from now on no process opens it without a key."""
    record = decode_store(inner.get(STORE_FILE, SEALED_BYTES_MAX))
    data = encode_store(msgspec.structs.replace(record, encrypted=True))
    write_whole(rewrites(inner).rewrite(STORE_FILE, len(data)), data)


def age_days(created: str, now: datetime | None = None) -> float:
    """Return a slot's age in days."""
    made = datetime.strptime(created, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    return ((now or datetime.now(UTC)) - made).total_seconds() / 86400
