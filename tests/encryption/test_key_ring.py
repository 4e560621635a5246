"""Add, exchange and revoke keys, and re-encrypt.

A process that is killed at any step leaves a store that the right keys open.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relight.catalog.run import open_run
from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.errors import CheckpointNotFound, ConfigError, RelightError, WrongKey
from relight.format import encode_tree
from relight.format.keyring import KEYS_DIR
from relight.keys import Keychain, resolve, write_key_file
from relight.layout import Bytes, Item
from relight.log import read_store
from relight.policy import Keep
from relight.reader import verify_checkpoint
from relight.reclaim import execute, plan_prune
from relight.store import ByteStore, LocalStore, MemoryStore, put
from relight.store.base import Entry
from relight.store.encrypted import EncryptedStore
from relight.store.keyring import slots_in
from relight.testing.killable_store import Killed, Mortal
from relight.testing.store_suite import refuses
from relight.transfer.keys import add, rekey, revoke, rotate, status

DATA = random.Random(7).randbytes(300_000)


@pytest.fixture
def specs(tmp_path: Path) -> list[str]:
    """Return the specs of four new keys."""
    for number in range(4):
        write_key_file(str(tmp_path / f"{number}.key"))
    return [f"file:{tmp_path / f'{number}.key'}" for number in range(4)]


def save(store: ByteStore, step: int, run: str = "run") -> None:
    """Save one checkpoint."""
    items = [Item("x", "uint8", (len(DATA),), "param", Bytes(DATA))]
    Attempt.begin(store, run).save(SaveRequest(SaveInfo(step=step), tree=encode_tree({}), items=items))


def sound(inner: ByteStore, *specs: str) -> int:
    """Return how many checkpoints these keys open, all of them undamaged. Raise ``WrongKey`` if they open nothing."""
    store: ByteStore = EncryptedStore(inner, Keychain.from_specs(list(specs))) if specs else inner
    read_store(store)
    run = open_run(store, "run")
    view, live = run.view(), run.history().live
    assert not view.faults, view.faults
    for checkpoint in live:
        findings = verify_checkpoint(store, view, checkpoint)
        if any(finding.kind == "wrong_key" for finding in findings):
            raise WrongKey(findings[0].detail)
        assert not findings, findings
    return len(live)


def encrypted(spec: str, mortal: bool = False) -> Any:
    """Return a store with two checkpoints, and its underlying store."""
    inner: Any = Mortal(MemoryStore()) if mortal else MemoryStore()
    store = EncryptedStore(inner, Keychain.from_specs(spec))
    for step in (1, 2):
        save(store, step)
    return inner


def files_of(store: Any) -> dict[str, Any]:
    """Return the files of the innermost store, which is in memory."""
    return getattr(store, "inner", store)._files  # type: ignore[no-any-return]


def kek(spec: str) -> str:
    """Return the key's id."""
    return resolve(spec).kek


def test_a_key_is_added(specs: list[str]) -> None:
    """Then both keys open everything. Adding the key again does nothing. A key that opens nothing cannot add one."""
    inner = encrypted(specs[0])
    assert len(add(inner, Keychain.from_specs(specs[0]), resolve(specs[1]), "recovery").added) == 1
    assert sound(inner, specs[0]) == sound(inner, specs[1]) == 2
    assert not add(inner, Keychain.from_specs(specs[0]), resolve(specs[1])).added
    refuses(WrongKey, lambda: add(inner, Keychain.from_specs(specs[2]), resolve(specs[2])))
    refuses(WrongKey, lambda: sound(inner, specs[2]))


def test_a_key_is_revoked(specs: list[str]) -> None:
    """Then it opens nothing. The last available key cannot be revoked. A revoked key stays listed."""
    inner = encrypted(specs[0])
    refuses(ConfigError, lambda: revoke(inner, Keychain.from_specs(specs[0]), kek(specs[0])))
    add(inner, Keychain.from_specs(specs[0]), resolve(specs[1]), "recovery")
    refuses(ConfigError, lambda: revoke(inner, Keychain.from_specs(specs[0]), kek(specs[0])))
    refuses(CheckpointNotFound, lambda: revoke(inner, Keychain.from_specs(specs[0]), "no such key"))
    revoke(inner, Keychain.from_specs(specs[1]), kek(specs[0]))
    refuses(WrongKey, lambda: sound(inner, specs[0]))
    assert sound(inner, specs[1]) == 2
    assert [(row.label, bool(row.revoked), row.opens) for row in status(inner, Keychain.from_specs(specs[1]))] == [
        ("recovery", False, True),
        ("file", True, False),
    ]


def each_death(make: Callable[[], Any], work: Callable[[Any], object]) -> Iterator[tuple[Any, bool]]:
    """Yield what is left of ``work`` on a fresh store, killed before its first change, its second, … The last time it completes."""
    for left in range(10_000):
        inner = make()
        inner.left = left
        try:
            work(inner)
            done = True
        except Killed:
            done = False
        inner.left = -1
        yield inner, done
        if done:
            return
    raise AssertionError("it never ends")


def test_rotation_killed_at_every_step(specs: list[str]) -> None:
    """At each step, the old and the new key together open everything.

    A repetition completes the rotation. After that the old key opens nothing.
    """
    old, new = specs[:2]

    def work(inner: Any) -> None:
        rotate(inner, Keychain.from_specs(old), kek(old), resolve(new), "new")

    def both_generations() -> Any:
        inner = encrypted(old, mortal=True)
        # slots of a second generation, and the first one's taken away
        rekey(inner, Keychain.from_specs(old), leaked="*")
        save(EncryptedStore(inner, Keychain.from_specs(old)), 3)
        return inner

    deaths = 0
    for make in (lambda: encrypted(old, mortal=True), both_generations):
        for inner, done in each_death(make, work):
            deaths += not done
            key_ids = [slot.kek for slot in slots_in(inner)]
            assert sound(inner, old, new) >= 2
            if kek(old) in key_ids:  # nothing was taken away yet
                rotate(inner, Keychain.from_specs([old, new]), kek(old), resolve(new), "new")
            assert sound(inner, new) >= 2
            refuses(WrongKey, lambda inner=inner: sound(inner, old))  # type: ignore[misc]
    assert deaths >= 6


def test_a_process_that_saves_during_a_rotation_continues(specs: list[str]) -> None:
    """A process that saves during a rotation knows the ring key, which does not change.

    So its saves continue, although its own key opens the store no longer. Once the ring key is replaced, its saves must
    fail: the leaked key could read them.
    """
    old, new = specs[:2]
    inner = encrypted(old)
    store = EncryptedStore(inner, Keychain.from_specs(old))
    save(store, 11)
    rotate(inner, Keychain.from_specs(old), kek(old), resolve(new), "new")
    for step in (12, 13):
        save(store, step)
    assert sound(inner, new) >= 3
    refuses(WrongKey, lambda: sound(inner, old))
    rekey(inner, Keychain.from_specs(new), leaked="*")
    refuses(WrongKey, lambda: save(store, 14))


@pytest.mark.parametrize("what", ["plain", "leaked", "revoked before"])
def test_re_encryption_killed_at_every_step(specs: list[str], what: str) -> None:
    """At each step, the old and the new key together open everything.

    A repetition resumes. After that no file is encrypted with the leaked key.
    """
    old, new = specs[:2]

    def make() -> Any:
        if what == "plain":
            inner = Mortal(MemoryStore())
            for step in (1, 2):
                save(inner, step)
            return inner
        inner = encrypted(old, mortal=True)
        if what == "revoked before":
            rotate(inner, Keychain.from_specs(old), kek(old), resolve(new), "new")
        return inner

    leaked = "" if what == "plain" else kek(old)
    at_hand = Keychain.from_specs(new if what != "leaked" else [old, new])

    def work(inner: Any, again: bool = False) -> object:
        return rekey(inner, at_hand, leaked=leaked, keep=Keychain.from_specs(new), encrypt_plain=again)

    before = {key: bytes(data) for key, data in files_of(make()).items()} if what == "plain" else {}
    deaths = 0
    for inner, done in each_death(make, work):
        deaths += not done
        if not done:
            with_both = EncryptedStore(inner, at_hand, takes_plain=True)
            if "relight.json" in files_of(inner) and (what != "plain" or slots_in(inner)):
                view = open_run(with_both, "run").view()
                assert not view.faults and len(open_run(with_both, "run").history().live) == 2
                assert not any(
                    verify_checkpoint(with_both, view, checkpoint)
                    for checkpoint in open_run(with_both, "run").history().live
                )
            if not leaked or any(slot.kek == kek(old) for slot in slots_in(inner)) or what == "revoked before":
                work(inner, again=True)
        assert sound(inner, new) == 2
        refuses(WrongKey, lambda inner=inner: sound(inner, old))  # type: ignore[misc]
        if leaked:
            assert all(slot.kek != kek(old) for slot in slots_in(inner))
        assert not any(bytes(data) == before.get(key) for key, data in files_of(inner).items() if data)
        assert (
            rekey(inner, Keychain.from_specs(new), leaked="*", plan_only=True).files
            == rekey(inner, Keychain.from_specs(new), leaked="*").files
        )
    assert deaths > 12


def test_a_key_that_is_not_kept_is_named(specs: list[str]) -> None:
    """A recovery key that opens nothing any more is noticed before it is needed. The leaked key is not among them."""
    work, recovery = specs[:2]
    inner = encrypted(work)
    add(inner, Keychain.from_specs(work), resolve(recovery), "recovery")
    for plan_only in (True, False):
        report = rekey(inner, Keychain.from_specs(work), leaked="*", plan_only=plan_only)
        assert [name.split()[0] for name in report.dropped] == ["recovery"], report
    add(inner, Keychain.from_specs(work), resolve(recovery), "recovery")
    both = Keychain.from_specs([work, recovery])
    assert rekey(inner, both, leaked="*").dropped == []
    assert rekey(inner, both, leaked="recovery", keep=Keychain.from_specs(work)).dropped == []


@pytest.mark.parametrize("revoked", [False, True])
def test_a_leaked_key_is_one_key(specs: list[str], revoked: bool) -> None:
    """A label that several keys have, or had, is refused before anything changes. The id selects one, and the other key is named."""
    work, recovery, new = specs[:3]
    inner = encrypted(work)
    add(inner, Keychain.from_specs(work), resolve(recovery))
    assert {slot.label for slot in slots_in(inner)} == {"file"}
    if revoked:
        revoke(inner, Keychain.from_specs(recovery), kek(work))
    at_hand, kept = Keychain.from_specs([recovery, new]), Keychain.from_specs(new)
    files = {key: bytes(data) for key, data in files_of(inner).items()}
    for plan_only in (True, False):
        error = refuses(
            ConfigError, lambda only=plan_only: rekey(inner, at_hand, leaked="file", keep=kept, plan_only=only)
        )  # type: ignore[misc]
        assert "several keys" in error.what and "keys status" in error.hint
    assert {key: bytes(data) for key, data in files_of(inner).items()} == files
    report = rekey(inner, at_hand, leaked=kek(work), keep=kept)
    assert [name.split()[1].strip("(),") for name in report.dropped] == [kek(recovery)[:8]]


def test_only_what_a_leaked_key_could_open_is_written_again(specs: list[str]) -> None:
    """A key that was added later has a generation of its own. Files that are encrypted under it do not change."""
    first, second, third = specs[:3]
    inner = encrypted(first)
    rekey(inner, Keychain.from_specs([first, second]), leaked="*", keep=Keychain.from_specs(second))
    add(inner, Keychain.from_specs(second), resolve(third), "third")
    save(EncryptedStore(inner, Keychain.from_specs(second)), 3)
    assert rekey(inner, Keychain.from_specs(second), leaked=kek(first), plan_only=True).files == 0, (
        "all it could open is gone"
    )
    files = {key: bytes(data) for key, data in files_of(inner).items()}
    report = rekey(inner, Keychain.from_specs(second), leaked="third", keep=Keychain.from_specs(second))
    assert report.files > 10 and report.generation == 3 and not report.left
    changed = {key for key, data in files_of(inner).items() if bytes(data) != files.get(key)}
    assert all(
        not data or key in changed or key.startswith(KEYS_DIR) or key == "relight.json"
        for key, data in files_of(inner).items()
    )
    assert sound(inner, second) == 3
    refuses(WrongKey, lambda: sound(inner, third))
    refuses(CheckpointNotFound, lambda: rekey(inner, Keychain.from_specs(second), leaked="no such key"))


def test_a_process_that_continues_with_the_old_key_is_noticed(
    specs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that a process writes during the re-encryption are found in a second pass.

    Later ones still open, and are found later.
    """
    import relight.transfer.keys as module

    old, new = specs[:2]
    inner = encrypted(old)
    trainer = EncryptedStore(inner, Keychain.from_specs(old))
    trainer.get("run/log/000000000000.json", 1 << 20)
    plain, calls = module._rewrite, []

    def rewrite(*args: Any) -> bool:
        is_whole = plain(*args)
        if not calls:
            calls.append(1)
            trainer.put_once("run/log/000000000099.json.x", b"written meanwhile")
        return is_whole

    monkeypatch.setattr(module, "_rewrite", rewrite)
    report = rekey(inner, Keychain.from_specs([old, new]), leaked=kek(old), keep=Keychain.from_specs(new))
    assert report.files > 8
    assert (
        EncryptedStore(inner, Keychain.from_specs(new)).get("run/log/000000000099.json.x", 99) == b"written meanwhile"
    )


def test_retention_may_delete_files_during_a_rekey(tmp_path: Path, specs: list[str]) -> None:
    """A checkpoint that is removed while its files are encrypted again does not end the command."""
    old, new = specs[:2]
    inner = LocalStore(tmp_path / "s")
    for step in (1, 2):
        save(EncryptedStore(inner, Keychain.from_specs(old)), step)
    reports: list[int] = []
    both = Keychain.from_specs([old, new])

    def prune(length: int) -> None:
        if not reports:
            other = EncryptedStore(inner, both)
            reports.append(len(execute(plan_prune(other, "run", Keep(last=1)), other).deleted))

    report = rekey(inner, both, leaked=kek(old), keep=Keychain.from_specs(new), progress=prune)
    assert reports == [1] and report.files > 5 and not report.damaged
    assert sound(inner, new) == 1


def test_ranks_that_begin_a_store_together_have_one_ring(specs: list[str]) -> None:
    """Many processes open a new store at the same moment:

    one of them makes the first slot, and each reads what all wrote.
    """
    for _ in range(10):
        inner = MemoryStore()
        stores = [EncryptedStore(inner, Keychain.from_specs(specs[0])) for _ in range(8)]
        gate = threading.Barrier(8)

        def begin(number: int, stores: list[EncryptedStore] = stores, gate: threading.Barrier = gate) -> None:
            gate.wait()
            stores[number].put_once(f"run/{number}", b"%d" % number)

        threads = [threading.Thread(target=begin, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(slots_in(inner)) == 1
        assert [stores[0].get(f"run/{number}", 9) for number in range(8)] == [b"%d" % number for number in range(8)]


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_slot_that_appears_between_two_listings(specs: list[str], at: int) -> None:
    """Two processes create a store.

    One lists slots before the other has created one, and reads the directory after that: no key is wrong.
    """
    inner = MemoryStore()
    keychain = Keychain.from_specs(specs[0])

    class Late(MemoryStore):
        listings = 0

        def list(self, prefix: str) -> Iterator[Entry]:
            if prefix != KEYS_DIR:
                return inner.list(prefix)
            self.listings += 1
            if self.listings == at:  # earlier listings have no slot
                EncryptedStore(inner, keychain).put_once("run/other", b"other")
            return iter([*inner.list(prefix)])

        def __getattribute__(self, name: str) -> Any:
            return (
                object.__getattribute__(self, name)
                if name in ("list", "listings", "__dict__")
                else getattr(inner, name)
            )

    late = EncryptedStore(Late(), keychain)
    assert late.put_once("run/late", b"late")
    assert late.get("run/other", 9) == b"other" and len(slots_in(inner)) == 1
    (slot,) = slots_in(inner)
    inner.delete(f"{KEYS_DIR}/{slot.file}")
    inner.put_once(f"{KEYS_DIR}/{slot.file}", b"nonsense")
    with pytest.raises(WrongKey, match="none of the keys at hand"):
        EncryptedStore(inner, keychain).get("run/late", 9)


def test_slots_that_are_damaged_or_exchanged(specs: list[str]) -> None:
    """If one bit of a slot is changed, the slot opens nothing, or nothing wrong; another slot still opens the store.

    Slots of other stores open nothing.
    """
    inner = encrypted(specs[0])
    name = next(key for key in files_of(inner) if key.startswith(KEYS_DIR))
    whole = bytes(files_of(inner)[name])
    for offset in range(0, len(whole), 5):
        changed = bytearray(whole)
        changed[offset] ^= 1 << offset % 8
        files_of(inner)[name] = bytes(changed)
        refuses(RelightError, lambda: sound(inner, specs[0]))
    files_of(inner)[name] = whole
    add(inner, Keychain.from_specs(specs[0]), resolve(specs[1]))
    files_of(inner)[name] = whole[:-9]
    assert sound(inner, specs[1]) == 2
    refuses(WrongKey, lambda: sound(inner, specs[0]))
    other = encrypted(specs[0])
    files_of(inner)[name] = files_of(other)[name]
    refuses(WrongKey, lambda: sound(inner, specs[0]))
    assert sound(inner, specs[1]) == 2


def test_on_a_disk(tmp_path: Path, specs: list[str]) -> None:
    """Rotation with files: they are replaced as a whole, and nothing is left next to them."""
    inner = LocalStore(tmp_path / "store")
    for step in (1, 2):
        save(inner, step)
    report = rekey(inner, Keychain.from_specs(specs[0]))
    assert report.files == sum(
        1 for path in (tmp_path / "store" / "run").rglob("*") if path.is_file() and path.stat().st_size
    )
    assert sound(inner, specs[0]) == 2
    (tmp_path / "store" / "run" / ".rekey-root.json-0123456789abcdef").write_bytes(b"of one that was killed")
    rekey(inner, Keychain.from_specs(specs[:2]), leaked="*", keep=Keychain.from_specs(specs[1]))
    assert sound(inner, specs[1]) == 2
    assert not list((tmp_path / "store").rglob(".rekey-*"))
    refuses(WrongKey, lambda: sound(inner, specs[0]))


def test_a_save_that_began_before_a_re_encryption_does_not_commit_after_it(specs: list[str]) -> None:
    """An agent's first record is a COMMIT.

    Its pack is encrypted with the leaked key, and no remaining key could open it, so the COMMIT is refused. A rank
    cannot report that its part is ready either. The next save uses the new key.
    """
    old, new = specs[:2]
    for last in ("record", "ready"):
        inner = encrypted(old)
        store = EncryptedStore(inner, Keychain.from_specs([old, new]))
        put(store, "run/pack", b"of a save that is in progress")
        rekey(inner, Keychain.from_specs([old, new]), leaked=kek(old), keep=Keychain.from_specs(new))
        if last == "record":
            refuses(WrongKey, lambda store=store: store.put_once("run/log/000000000009.json", b"COMMIT"))  # type: ignore[misc]
        else:
            refuses(WrongKey, lambda store=store: put(store, "run/ready/0", b""))  # type: ignore[misc]
        put(store, "run/other", b"whole")
        assert EncryptedStore(inner, Keychain.from_specs(new)).get("run/other", 100) == b"whole"
