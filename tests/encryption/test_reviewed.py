"""Findings of a hostile review of the code, one test each."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.encryption.test_key_ring import kek, save, sound, specs

from relight.catalog.run import open_run
from relight.errors import CorruptCheckpoint, RelightError, WrongKey
from relight.format.cipher import Secret
from relight.keys import Keychain, StoreSecurity, resolve
from relight.keys.providers import Passphrase
from relight.log import require_store
from relight.store import MemoryStore
from relight.store.anchored import AnchoredStore
from relight.store.blocks import BlockCache
from relight.store.cached import CachedStore
from relight.store.encrypted import EncryptedStore
from relight.store.keyring import put_slot, slots_in
from relight.testing.store_suite import refuses
from relight.transfer.keys import rekey, revoke, rotate

__all__ = ["specs"]


def test_a_planted_plaintext_run_is_not_encrypted(specs: list[str]) -> None:
    """A plaintext run, with the store's id, that an attacker put into an encrypted store is not re-encrypted:

    it is counted, and refused as before.
    """
    inner, forged = MemoryStore(), MemoryStore()
    store = EncryptedStore(inner, Keychain.from_specs(specs[0]))
    save(store, 1)
    forged._files["relight.json"] = bytes(inner._files["relight.json"]).replace(b',"encrypted":true', b"")
    from relight.format.records import StoreRecord, decode_store, encode_store

    known = decode_store(bytes(inner._files["relight.json"]))
    forged._files["relight.json"] = encode_store(StoreRecord(id=known.id, created=known.created))
    save(forged, 666)
    for key in [key for key in inner._files if key.startswith("run/")]:
        del inner._files[key]
    inner._files.update({key: data for key, data in forged._files.items() if key.startswith("run/")})
    report = rekey(inner, Keychain.from_specs(specs[:2]), leaked=kek(specs[0]), keep=Keychain.from_specs(specs[1]))
    assert report.plain > 5 and report.files == 0
    assert open_run(EncryptedStore(inner, Keychain.from_specs(specs[1])), "run").history().live == []


def test_a_trainer_that_outlives_a_rekeying_gets_an_error(specs: list[str]) -> None:
    """Its next commit fails and states why. The one after that is made with the new key, and opens."""
    inner = MemoryStore()
    store = EncryptedStore(inner, Keychain.from_specs(specs[:2]))
    save(store, 1)
    rekey(inner, Keychain.from_specs(specs[:2]), leaked=kek(specs[0]), keep=Keychain.from_specs(specs[1]))
    assert "rekeyed meanwhile" in refuses(WrongKey, lambda: save(store, 2)).what
    save(store, 3)
    assert sound(inner, specs[1]) == 2
    late = EncryptedStore(inner, Keychain.from_specs(specs[1]))
    save(late, 4)
    rekey(inner, Keychain.from_specs(specs[1:3]), leaked=kek(specs[1]), keep=Keychain.from_specs(specs[2]))
    refuses(WrongKey, lambda: save(late, 5))
    refuses(WrongKey, lambda: save(late, 6))


def test_passphrases_are_derived_one_at_a_time() -> None:
    """Two threads at the same time would wait for each other for ever."""
    words = Passphrase("x", Secret(b"words of this test"))
    threads = [threading.Thread(target=lambda: words.wrap(Secret(bytes(32)), b""), daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)


def test_a_record_that_is_gone_under_junk_is_a_log_rolled_back(specs: list[str]) -> None:
    """The anchored record is deleted, with junk above it.

    If the junk was there first, it is not recorded in the anchor.
    """
    for order in ("gone, then junk", "junk, then gone"):
        inner, anchor = MemoryStore(), MemoryStore()
        for step in (1, 2):
            save(AnchoredStore(inner, anchor), step)
        names = sorted(key for key in inner._files if key.startswith("run/log/"))
        junk = f"run/log/{len(names):012d}.json"
        inner._files[junk] = b"junk"
        if order == "junk, then gone":
            open_run(AnchoredStore(inner, anchor), "run")
        del inner._files[names[-1]]
        error = refuses(
            CorruptCheckpoint, lambda inner=inner, anchor=anchor: open_run(AnchoredStore(inner, anchor), "run")
        )  # type: ignore[misc]
        assert "rolled back" in error.what


def test_two_rings_of_one_generation(specs: list[str]) -> None:
    """Neither ring loses its last slot:

    a key is not replaced where it has no slot, and re-encryption makes one ring of them.
    """
    inner = MemoryStore()
    store = EncryptedStore(inner, Keychain.from_specs(specs[0]))
    save(store, 1)
    other = Secret(os.urandom(32))
    put_slot(inner, slots_in(inner)[0].store, 1, other, resolve(specs[1]))
    both = Keychain.from_specs(specs[:2])
    save(EncryptedStore(inner, both), 2)
    assert (
        "rekey --all" in refuses(WrongKey, lambda: rotate(inner, both, kek(specs[0]), resolve(specs[2]), "third")).hint
    )
    refuses(RelightError, lambda: revoke(inner, Keychain.from_specs(specs[1]), kek(specs[0])))
    assert sound(inner, *specs[:2]) == 2
    rekey(inner, both, leaked="*", keep=Keychain.from_specs(specs[2]))
    assert sound(inner, specs[2]) == 2


def flip(inner: MemoryStore, key: str, at: int = 0) -> bytes:
    """Damage one byte of a file. Return what was there before."""
    contents = bytearray(inner._files[key])
    before = bytes(contents)
    contents[at] ^= 1
    inner._files[key] = bytes(contents)
    return before


def two_saved(specs: list[str]) -> MemoryStore:
    """Return a store with two checkpoints, encrypted with the first key."""
    inner = MemoryStore()
    for step in (1, 2):
        save(EncryptedStore(inner, Keychain.from_specs(specs[0])), step)
    return inner


@pytest.mark.parametrize("at", [0, -34, -1], ids=["first page", "length in the trailer", "mark of the trailer"])
def test_one_damaged_page_does_not_stop_it(specs: list[str], at: int) -> None:
    """The damaged file is named, and everything else is re-encrypted. The old key stays until the file is repaired."""
    inner = two_saved(specs)
    pack = next(key for key in inner._files if "pack-" in key)
    whole = flip(inner, pack, at)
    arguments = {"leaked": kek(specs[0]), "keep": Keychain.from_specs(specs[1])}
    report = rekey(inner, Keychain.from_specs(specs[:2]), **arguments)
    assert report.damaged == [pack] and report.files > 8 and not report.left
    assert [name.split()[1].strip("(),") for name in report.slots_left] == [kek(specs[0])[:8]]
    assert report.needed == report.slots_left and not report.plain
    assert any(slot.kek == kek(specs[0]) for slot in slots_in(inner))
    refuses(WrongKey, lambda: sound(inner, specs[0]))
    inner._files[pack] = whole  # as from a backup: it opens, since its key is there
    assert sound(inner, *specs[:2]) == 2
    report = rekey(inner, Keychain.from_specs(specs[:2]), **arguments)
    assert report.files == 1 and not report.damaged and not report.slots_left
    assert not any(slot.kek == kek(specs[0]) for slot in slots_in(inner))
    assert sound(inner, specs[1]) == 2


def test_the_old_key_encrypts_nothing_while_its_slot_stays(specs: list[str]) -> None:
    """A damaged file keeps the leaked key's slot. A job that has only this key cannot save, and an unfinished save is not committed."""
    inner = two_saved(specs)
    both = EncryptedStore(inner, Keychain.from_specs(specs[:2]))
    both.put_once("run/begun", b"x")
    old = EncryptedStore(inner, Keychain.from_specs(specs[0]))
    old.put_once("run/begun too", b"x")
    flip(inner, next(key for key in inner._files if "pack-" in key))
    report = rekey(inner, both.keychain, leaked=kek(specs[0]), keep=Keychain.from_specs(specs[1]))
    assert len(report.slots_left) == 1 and not report.left
    for store in (old, EncryptedStore(inner, old.keychain)):
        error = refuses(WrongKey, lambda store=store: save(store, 3, "another"))  # type: ignore[misc]
        assert "newer key" in error.what
        refuses(WrongKey, lambda store=store: save(store, 3, "another"))  # type: ignore[misc]
    assert "rekeyed meanwhile" in refuses(WrongKey, lambda: save(both, 3)).what
    save(both, 4)
    assert open_run(EncryptedStore(inner, Keychain.from_specs(specs[1])), "run").history().live[-1].step == 4


def test_a_key_that_is_kept_keeps_what_it_opens(specs: list[str]) -> None:
    """The leaked key was rotated away before. The slots that stay are of the kept key, so no other key is asked for."""
    inner = two_saved(specs)
    rotate(inner, Keychain.from_specs(specs[0]), kek(specs[0]), resolve(specs[1]), "new")
    flip(inner, next(key for key in inner._files if "pack-" in key))
    report = rekey(inner, Keychain.from_specs(specs[1]), leaked=kek(specs[0]))
    assert len(report.slots_left) == 1 and report.needed == [] and report.dropped == []


def test_a_damaged_record_needs_no_key(specs: list[str]) -> None:
    """No part of a damaged record is useful, so the old key goes: with its slot, the run's log could not be read with the new key."""
    inner = two_saved(specs)
    record = sorted(key for key in inner._files if key.startswith("run/log/"))[-1]
    flip(inner, record)
    report = rekey(inner, Keychain.from_specs(specs[:2]), leaked=kek(specs[0]), keep=Keychain.from_specs(specs[1]))
    assert report.damaged == [record] and not report.slots_left
    assert not any(slot.kek == kek(specs[0]) for slot in slots_in(inner))
    assert len(open_run(EncryptedStore(inner, Keychain.from_specs(specs[1])), "run").history().live) == 1


def test_a_file_that_is_written_last_is_reported(specs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A file written with the old key after the second pass keeps the old slots. The command reports it, and is incomplete."""
    import relight.transfer.keys as module

    inner = two_saved(specs)
    trainer = EncryptedStore(inner, Keychain.from_specs(specs[0]))
    trainer.get("run/log/000000000000.json", 1 << 20)
    plain, passes = module._to_do, []

    def to_do(*arguments: Any) -> Iterator[tuple[str, int]]:
        passes.append(1)
        if len(passes) == 3:
            trainer.put_once("run/written late", b"x")
        return plain(*arguments)

    monkeypatch.setattr(module, "_to_do", to_do)
    report = rekey(inner, Keychain.from_specs(specs[:2]), leaked=kek(specs[0]), keep=Keychain.from_specs(specs[1]))
    assert report.left == 1 and any(slot.kek == kek(specs[0]) for slot in slots_in(inner))


def test_a_cache_from_before_a_rekeying(tmp_path: Path, specs: list[str]) -> None:
    """Files of the cache are copied again, and not reported as damaged."""
    inner = MemoryStore()
    save(EncryptedStore(inner, Keychain.from_specs(specs[0])), 1)

    def opened() -> EncryptedStore:
        return EncryptedStore(
            CachedStore(inner, BlockCache(tmp_path / "cache", 1 << 26)), Keychain.from_specs(specs[:2])
        )

    pack = next(key for key in inner._files if "pack-" in key)
    into = bytearray(1000)
    for _ in range(2):
        opened().open(pack).read_into(0, memoryview(into))
    rekey(inner, Keychain.from_specs(specs[:2]), leaked=kek(specs[0]), keep=Keychain.from_specs(specs[1]))
    again = bytearray(1000)
    opened().open(pack).read_into(0, memoryview(again))
    assert into == again


def test_readers_make_no_keys(specs: list[str]) -> None:
    """Missing slots are reported, and reading creates none in their place."""
    inner = MemoryStore()
    save(EncryptedStore(inner, Keychain.from_specs(specs[0])), 1)
    slot = next(key for key in inner._files if key.startswith(".keys/"))
    contents = inner._files.pop(slot)
    refuses(WrongKey, lambda: sound(inner, specs[0]))
    assert not any(key.startswith(".keys/") for key in inner._files)
    inner._files[slot] = contents
    assert sound(inner, specs[0]) == 1


def test_one_without_a_key_does_not_begin_a_store_over(specs: list[str]) -> None:
    """A process without a key begins no new store in an encrypted one, even if relight.json is missing."""
    inner = MemoryStore()
    save(EncryptedStore(inner, Keychain.from_specs(specs[0])), 1)
    del inner._files["relight.json"]
    refuses(WrongKey, lambda: require_store(inner))
    assert "relight.json" not in inner._files


def test_an_anchor_is_the_same_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is relative to the process that names it, also in processes that receive it."""
    monkeypatch.chdir(tmp_path)
    assert StoreSecurity.from_settings(anchor="anchor").anchor == str(tmp_path / "anchor")
