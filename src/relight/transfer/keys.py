"""A store's keys: who may open it, by adding, exchanging and taking away slots; and encrypting anew what a leaked key could open.

Slots are added before any is taken away, and what was added is opened once before it is relied on: whoever is killed on the way leaves
a store that opens with the old key, the new one, or both.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, WrongKey
from relight.format.cipher import KEY_BYTES, Secret, ring_id
from relight.format.keyring import KEYS_DIR, KeySlot
from relight.format.names import STORE_FILE
from relight.format.records import decode_store, encode_store
from relight.format.strict import SEALED_BYTES_MAX
from relight.keys import Keychain, Provider
from relight.store import ByteStore
from relight.store.durable import REWRITTEN_PREFIX
from relight.store.encrypted import EncryptedStore, is_clear
from relight.store.keyring import drop_slot, open_ring, open_slot, put_slot, require_encrypted, revoked_in, slots_in, store_id_of
from relight.store.wrapper import rewrites

COPY_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class KeyStatus:
    """One slot, or one that was: ``opens`` says whether the keys at hand open it; ``revoked`` when it was taken away, else ""."""

    generation: int
    kek: str
    kind: str
    label: str
    created: str
    opens: bool
    revoked: str = ""

    def to_dict(self) -> dict[str, object]:
        """For ``--json``."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class Changed:
    """What was done: labels and ids of slots added and taken away."""

    added: list[str] = field(default_factory=list)
    revoked: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Rekeyed:
    """What was encrypted anew. ``left``: files that came meanwhile, of a process that goes on with the old ring key."""

    files: int = 0
    bytes: int = 0
    left: int = 0
    plain: int = 0
    """Files that lie in the clear in a store that is encrypted: somebody put them there, and they are left alone."""
    damaged: int = 0
    generation: int = 0


def status(inner: ByteStore, keychain: Keychain | None) -> list[KeyStatus]:
    """All slots of a store, and those that were taken away, by generation. Cost: opening each with the keys at hand, if there are any."""
    store_id_of(inner)
    rows = [
        KeyStatus(one.generation, one.kek, one.kind, one.label, one.created, keychain is not None and open_slot(one, keychain) is not None)
        for one in slots_in(inner)
    ]
    rows += [KeyStatus(one.generation, one.kek, "", one.label, one.created, False, one.revoked) for one in revoked_in(inner)]
    return sorted(rows, key=lambda row: (row.generation, bool(row.revoked), row.created))


def add(inner: ByteStore, keychain: Keychain, new: Provider, label: str = "") -> Changed:
    """Have ``new`` open what the keys at hand open. ``WrongKey`` if there is a generation that they don't."""
    changed = Changed()
    for (generation, _), slots in _rings(inner).items():
        key = _opened(slots, keychain, generation)
        if not any(_opens(slot, new) for slot in slots):
            changed.added.append(_put(inner, slots[0].store, generation, key, new, label))
    return changed


def rotate(inner: ByteStore, keychain: Keychain, old: str, new: Provider, label: str = "") -> Changed:
    """Have ``new`` open what ``old``, an id or a label, opens, and ``old`` open nothing. No data is written anew: see ``rekey``."""
    mine = _slots_of(inner, old)
    changed = add(inner, keychain, new, label)
    for slot in mine:
        if _opens(slot, new):
            raise ConfigError("the old key and the new one are the same", where=slot.label)
        drop_slot(inner, slot)
        changed.revoked.append(_named(slot))
    return changed


def revoke(inner: ByteStore, keychain: Keychain, old: str) -> Changed:
    """Have ``old``, an id or a label, open nothing. ``ConfigError`` if the keys at hand would open less than now without it."""
    mine, changed = _slots_of(inner, old), Changed()
    for (generation, _), slots in _rings(inner).items():
        if any(slot in mine for slot in slots) and not any(open_slot(slot, keychain) for slot in slots if slot not in mine):
            raise ConfigError(
                f"without it none of the keys at hand opens generation {generation}",
                where=old, hint="add another first: relight keys add; or give it: RELIGHT_KEY=",
            )  # fmt: skip
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
) -> Rekeyed:
    """Encrypt anew, under a new ring key, what ``leaked`` could open, an id or a label, also one that was revoked; or, if ``leaked`` is
    "*", everything; then those old ring keys' slots go. In a store that is not encrypted: all of it. In one that is, what lies in the
    clear was put there by somebody, and is taken for what the store holds only if ``encrypt_plain``: to end what was interrupted.

    ``keychain`` opens what is there, ``keep`` (the same, if None) what will be: a slot for each of them. A file is replaced as a whole, so
    whoever is killed leaves nothing but whole files, each under one key or the other; done again it goes on. Processes that have the
    store open go on with the ring key they know: ``left`` counts what they wrote meanwhile. Cost: what is touched, read and written once.
    """
    report, plain = Rekeyed(), not _is_marked(inner)
    keep = keep or keychain
    if leaked and plain:
        raise ConfigError("this store is not encrypted: no key could leak it", where=inner.url)
    if any(slot.store != store_id_of(inner) for slot in slots_in(inner)):
        raise WrongKey("its slots are of another store: relight.json was replaced", where=inner.url, hint="restore it from a copy")
    touched = _touched(inner, leaked) if leaked else set()
    if plan_only:
        for _, size in _to_do(EncryptedStore(inner, keychain, takes_plain=plain or encrypt_plain), touched, report):
            report.files, report.bytes = report.files + 1, report.bytes + size
        return report
    if plain:
        _mark(inner)
    report.generation = _new_generation(inner, keychain, keep, touched)
    store = EncryptedStore(inner, Keychain([*keep.providers, *keychain.providers]), takes_plain=plain or encrypt_plain)
    damaged: set[str] = set()
    for again in range(2):
        report.plain = 0
        for key, size in _to_do(store, touched, report):
            if key in damaged:
                continue
            try:
                _rewrite(store, key, size, progress)
            except CorruptCheckpoint:  # nobody can write it anew: it goes on being damaged
                damaged.add(key)
                continue
            report.left += again
            report.files, report.bytes = report.files + 1, report.bytes + size
    report.damaged = len(damaged)
    if not any(key not in damaged for key, _ in _to_do(store, touched, Rekeyed())):
        for slot in slots_in(inner):
            if bytes.fromhex(slot.ring) in touched:
                drop_slot(inner, slot)
    return report


def _to_do(store: EncryptedStore, touched: set[bytes], report: Rekeyed) -> Iterator[tuple[str, int]]:
    """Files, and their lengths, of what is to be written anew; counts what lies in the clear and is not."""
    for key in _files(store, ""):
        try:
            ring = store.ring_of(key)
            if ring is None and not store.takes_plain:
                report.plain += not store.is_empty(key)
                continue
            if ring is not None and ring not in touched:
                continue
            reader = store.open(key)
        except (CheckpointNotFound, CorruptCheckpoint):  # swept meanwhile; or damaged, which nobody can write anew
            continue
        size = reader.size
        reader.close()
        if size:
            yield key, size


def _files(store: EncryptedStore, prefix: str) -> Iterator[str]:
    for entry in sorted(store.list(prefix)):
        key = f"{prefix}/{entry.name}" if prefix else entry.name
        if entry.is_dir:
            if key != KEYS_DIR:
                yield from _files(store, key)
        elif entry.name.startswith(REWRITTEN_PREFIX):  # of one that was killed; one that is at work will say that it is gone
            store.delete(key)
        elif not is_clear(key):
            yield key


def _rewrite(store: EncryptedStore, key: str, size: int, progress: Callable[[int], None]) -> None:
    reader = store.open(key)
    try:
        writer = store.rewrite(key, size)
        try:
            room = memoryview(bytearray(min(COPY_BYTES, size)))
            for at in range(0, size, len(room)):
                piece = room[: min(len(room), size - at)]
                reader.read_into(at, piece)
                writer.write_at(at, piece)
                progress(len(piece))
            writer.finish()
        except BaseException:
            writer.abort()
            raise
    finally:
        reader.close()


def _new_generation(inner: ByteStore, keychain: Keychain, keep: Keychain, touched: set[bytes]) -> int:
    """One whose ring key nobody knew before, with a slot for each key that is kept; the newest, if it is one that was begun and not
    touched. Its number."""
    store_id = require_encrypted(inner)
    rings = _rings(inner)
    newest, ring = max(rings, default=(0, ""))
    held = rings.get((newest, ring), [])
    if newest and bytes.fromhex(ring) not in touched:
        key = _opened(held, keychain, newest)
    else:
        newest, held, key = newest + 1, [], Secret(secrets.token_bytes(KEY_BYTES))
    for provider in keep.providers:
        if not any(_opens(slot, provider) for slot in held):
            known = [slot.label for slots in rings.values() for slot in slots if provider.fits(slot.kind, slot.kek)]
            _put(inner, store_id, newest, key, provider, known[-1] if known else "")
    open_ring(inner, keep)
    return newest


def _touched(inner: ByteStore, leaked: str) -> set[bytes]:
    """The ring keys that it could open."""
    known = [(one.kek, one.label, one.ring) for one in slots_in(inner)] + [(one.kek, one.label, one.ring) for one in revoked_in(inner)]
    found = {bytes.fromhex(ring) for kek, label, ring in known if leaked == "*" or _is(kek, label, leaked)}
    if not found:
        raise CheckpointNotFound(f"no key {leaked!r} has, or had, a slot here", where=inner.url, hint="relight keys status STORE")
    return found


def _rings(inner: ByteStore) -> dict[tuple[int, str], list[KeySlot]]:
    """Slots by generation and ring key. Two who begin a store at one moment, with keys of two names, may make two rings of a generation."""
    found: dict[tuple[int, str], list[KeySlot]] = {}
    for slot in slots_in(inner):
        found.setdefault((slot.generation, slot.ring), []).append(slot)
    return dict(sorted(found.items()))


def _slots_of(inner: ByteStore, name: str) -> list[KeySlot]:
    mine = [slot for slot in slots_in(inner) if _is(slot.kek, slot.label, name)]
    if not mine:
        raise CheckpointNotFound(f"no key {name!r} has a slot here", where=inner.url, hint="relight keys status STORE")
    if len({slot.kek for slot in mine}) > 1:
        raise ConfigError(f"several keys are called {name!r}", where=inner.url, hint="give the id that relight keys status shows")
    return mine


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
    """A slot that was read back and opened."""
    slot = put_slot(inner, store_id, generation, key, provider, label)
    inner.sync(KEYS_DIR)
    there = [one for one in slots_in(inner) if one.file == slot.file]
    if not there or there[0].ring != ring_id(key).hex() or not _opens(there[0], provider):
        what = "a slot that was just made does not open, or another was made of that name"
        hint = "nothing was taken away; of two rings of one generation relight rekey --all makes one"
        raise WrongKey(what, where=f"{KEYS_DIR}/{slot.file}", hint=hint)
    return _named(there[0])


def _named(slot: KeySlot) -> str:
    return f"{slot.label} ({slot.kek[:8]}), generation {slot.generation}"


def _is_marked(inner: ByteStore) -> bool:
    return decode_store(inner.get(STORE_FILE, SEALED_BYTES_MAX)).encrypted


def _mark(inner: ByteStore) -> None:
    """Have the store say that it is encrypted: from now on nobody opens it without a key."""
    record = decode_store(inner.get(STORE_FILE, SEALED_BYTES_MAX))
    data = encode_store(msgspec.structs.replace(record, encrypted=True))
    writer = rewrites(inner).rewrite(STORE_FILE, len(data))
    try:
        writer.write_at(0, memoryview(data))
        writer.finish()
    except BaseException:
        writer.abort()
        raise


def age_days(created: str, now: datetime | None = None) -> float:
    """How old a slot is."""
    made = datetime.strptime(created, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    return ((now or datetime.now(UTC)) - made).total_seconds() / 86400
