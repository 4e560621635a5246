"""Two nodes that copy the same checkpoint to the same tier, their calls of the store interleaved in every order that a seed gives."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.drain.test_drain import begin, live
from tests.log.test_log_stale_listings import save

import relight.drain.outwards as outwards
from relight.catalog import Run
from relight.catalog.verify import verify_checkpoint
from relight.commit import Attempt
from relight.commit.attempt import take_over
from relight.drain import drain
from relight.errors import LeaseHeld, RelightError
from relight.log import Log
from relight.store import ByteStore, Entry, LocalStore, MemoryStore, Writer, open_bytes
from relight.store.wrapper import StoreWrapper
from relight.transfer.copying import Claimed, copy_one


class Turns:
    """One of several threads runs at a time; who does next, at each call of a store, a seed says."""

    def __init__(self, seed: int, names: list[str]) -> None:
        self._rng, self._changed = random.Random(seed), threading.Condition()
        self._left, self._turn = list(names), self._rng.choice(names)

    def _next(self) -> None:
        self._turn = self._rng.choice(self._left) if self._left else ""
        self._changed.notify_all()

    def wait(self, name: str) -> None:
        """Until it is its turn."""
        with self._changed:
            if self._turn == name:
                self._next()
            assert self._changed.wait_for(lambda: self._turn == name, 60)

    def over(self, name: str) -> None:
        """It makes no more calls."""
        with self._changed:
            self._left.remove(name)
            self._next()


class Taking(StoreWrapper):
    """A store as one thread sees it: before each call it waits for its turn."""

    def __init__(self, inner: ByteStore, wait: Callable[[], None]) -> None:
        super().__init__(inner)
        self._wait = wait

    def _over(self, below: ByteStore) -> ByteStore:
        return Taking(below, self._wait)

    def put_once(self, key: str, data: bytes) -> bool:
        self._wait()
        return self.inner.put_once(key, data)

    def write(self, key: str, size: int) -> Writer:
        self._wait()
        return self.inner.write(key, size)

    def list(self, prefix: str) -> Iterator[Entry]:
        self._wait()
        return iter(list(self.inner.list(prefix)))

    def delete(self, key: str) -> None:
        self._wait()
        self.inner.delete(key)


def both(far: ByteStore, seed: int, source: Run, *, in_charge: bool, gives_way: bool) -> list[str | BaseException]:
    """What became of each of two copies of the newest checkpoint."""
    names = ["a", "b"]
    turns, found = Turns(seed, names), dict[str, str | BaseException]()
    Log(far, "run").start()
    charge = take_over(Log(far, "run"), source.history().attempts[-1], []) if in_charge else None

    def copy(name: str) -> None:
        store = Taking(far, lambda: turns.wait(name))
        try:
            found[name] = copy_one(source.open(source.history().live[-1]), store, Log(store, "run"), None, charge, gives_way=gives_way)
        except BaseException as error:
            found[name] = error
        finally:
            turns.over(name)

    threads = [threading.Thread(target=copy, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return [found[name] for name in names]


def check(far: ByteStore, became: list[str | BaseException], *, in_charge: bool) -> None:
    """What was said to be there is there, to the byte; nothing else is."""
    run = Run(far, "run")
    there = run.history().live
    assert {one.id for one in there} == {one for one in became if isinstance(one, str)}
    assert len(there) == 1 if in_charge else len(there) >= 1
    for one in there:
        assert not verify_checkpoint(far, run.view(), one)
    for failed in (one for one in became if not isinstance(one, str)):
        assert isinstance(failed, LeaseHeld), failed
    directories = {entry.name for entry in far.list("run") if entry.name not in ("log", "relight.json")}
    assert directories == {one.lies_in("run").split("/")[1] for one in there}


@pytest.mark.parametrize("gives_way", [False, True])
@pytest.mark.parametrize("in_charge", [False, True])
def test_neither_touches_what_the_other_writes(in_charge: bool, gives_way: bool) -> None:
    """Fifty orders each: a directory is his who made its first part; the other takes a name of its own, or gives way."""
    near = Attempt.begin(MemoryStore(), "run")
    save(near, 3)
    gave = 0
    for seed in range(50):
        far = MemoryStore()
        became = both(far, seed, Run(near.store, "run"), in_charge=in_charge, gives_way=gives_way)
        check(far, became, in_charge=in_charge)
        gave += any(isinstance(one, Claimed) for one in became)
    assert (gave > 0) == gives_way


def test_neither_does_on_a_server(s3: str) -> None:
    """The same with an object store, where a name does not keep a second writer out."""
    near = Attempt.begin(MemoryStore(), "run")
    save(near, 3)
    for seed in range(6):
        far = open_bytes(f"{s3}/far{seed}")
        check(far, both(far, seed, Run(near.store, "run"), in_charge=True, gives_way=False), in_charge=True)


def test_a_drain_waits_for_the_one_that_was_quicker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another node has begun is watched; when it is there, that is told; what does not go on is copied after all."""
    attempt = begin(tmp_path)
    first = save(attempt, 0)
    assert drain(attempt.store, "run").copied
    second = save(attempt, 1)
    far = LocalStore(tmp_path / "far")
    begun = f"run/0000000001-{second}-e1"
    assert far.put_once(f"{begun}/part-00000.msgpack", b"begun")
    looks, told = [], []

    def finished(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            far.delete(f"{begun}/part-00000.msgpack")
            far.delete_dir(begun)
            copy_one(Run(attempt.store, "run").open(Run(attempt.store, "run").history().live[-1]), far, Log(far, "run"), None, 1)

    monkeypatch.setattr(outwards.time, "sleep", finished)
    report = drain(attempt.store, "run", tell=lambda name, say, fields: told.append((name, fields["id"])))
    assert not report.errors and not report.copied and len(looks) == 2
    assert told == [("drain.found", first), ("drain.found", second)]
    third = save(attempt, 2)
    assert far.put_once(f"run/0000000002-{third}-e1/part-00000.msgpack", b"begun")
    monkeypatch.setattr(outwards, "STILL_S", 0.2)
    monkeypatch.undo()
    monkeypatch.setattr(outwards, "STILL_S", 0.2)
    report = drain(attempt.store, "run")
    assert not report.errors and [one for _, one, _, _ in report.copied] == [third] and live(tmp_path, "far") == [0, 1, 2]


def test_one_that_was_only_quicker_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another's copy is committed while this one is under way: it gives up its own, and says nothing of a failure."""
    attempt = begin(tmp_path)
    save(attempt, 0)
    source = Run(attempt.store, "run")
    inner, told = outwards.copy_one, []

    def slower(opened, store, log, *given, **named):  # type: ignore[no-untyped-def]
        far = LocalStore(tmp_path / "far")
        inner(source.open(source.history().live[-1]), far, Log(far, "run"), *given)
        raise LeaseHeld("somebody else has copied it there meanwhile", where=log.run)

    monkeypatch.setattr(outwards, "copy_one", slower)
    report = drain(attempt.store, "run", tell=lambda name, say, fields: told.append(name))
    assert not report.errors and told == ["drain.found"] and live(tmp_path, "far") == [0]


def test_a_claim_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """Not even an empty directory."""
    near = Attempt.begin(MemoryStore(), "run")
    save(near, 3)
    far = LocalStore(tmp_path)
    Log(far, "run").start()

    class Failing(StoreWrapper):
        def _over(self, below: ByteStore) -> ByteStore:
            return Failing(below)

        def put_once(self, key: str, data: bytes) -> bool:
            if "/part-" in key:
                (tmp_path / key).parent.mkdir()
                raise RelightError("no")
            return self.inner.put_once(key, data)

    source = Run(near.store, "run")
    with pytest.raises(RelightError, match="no"):
        copy_one(source.open(source.history().live[-1]), Failing(far), Log(far, "run"), None)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["log"]
