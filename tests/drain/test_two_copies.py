"""Two commands that copy the same checkpoint to the same run, with their store calls interleaved in random orders."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.log.test_log_stale_listings import save

from relight.catalog import Run
from relight.commit import Attempt
from relight.errors import LeaseHeld, RelightError
from relight.log import Log
from relight.reader.verify import verify_checkpoint
from relight.store import ByteStore, Entry, LocalStore, MemoryStore, Writer, open_bytes
from relight.store.wrapper import StoreWrapper
from relight.transfer.copying import copy_one


class Turns:
    """Lets one of several threads run at a time. A seed chooses the next one at each call of a store."""

    def __init__(self, seed: int, names: list[str]) -> None:
        self._rng, self._changed = random.Random(seed), threading.Condition()
        self._left, self._turn = list(names), self._rng.choice(names)

    def _next(self) -> None:
        self._turn = self._rng.choice(self._left) if self._left else ""
        self._changed.notify_all()

    def wait(self, name: str) -> None:
        """Wait until it is the turn of thread ``name``."""
        with self._changed:
            if self._turn == name:
                self._next()
            assert self._changed.wait_for(lambda: self._turn == name, 60)

    def over(self, name: str) -> None:
        """Remove a thread that makes no more calls."""
        with self._changed:
            self._left.remove(name)
            self._next()


class Taking(StoreWrapper):
    """A store wrapper that waits for its thread's turn before each call."""

    def __init__(self, inner: ByteStore, wait: Callable[[], None]) -> None:
        super().__init__(inner)
        self._wait = wait

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


def both(far: ByteStore, seed: int, source: Run) -> list[str | BaseException]:
    """Copy the newest checkpoint in two threads. Return the id or the error of each."""
    names = ["a", "b"]
    turns, outcomes = Turns(seed, names), dict[str, str | BaseException]()
    Log(far, "run").start()

    def copy(name: str) -> None:
        store = Taking(far, lambda: turns.wait(name))
        try:
            outcomes[name] = copy_one(source.open(source.history().live[-1]), store, Log(store, "run"), None)
        except BaseException as error:
            outcomes[name] = error
        finally:
            turns.over(name)

    threads = [threading.Thread(target=copy, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return [outcomes[name] for name in names]


def check(far: ByteStore, became: list[str | BaseException]) -> None:
    """Check that exactly the returned checkpoints exist, with the right bytes, and no other directory."""
    run = Run(far, "run")
    checkpoints = run.history().live
    assert {checkpoint.id for checkpoint in checkpoints} == {outcome for outcome in became if isinstance(outcome, str)}
    assert checkpoints
    for checkpoint in checkpoints:
        assert not verify_checkpoint(far, run.view(), checkpoint)
    for failed in (outcome for outcome in became if not isinstance(outcome, str)):
        assert isinstance(failed, LeaseHeld), failed
    directories = {entry.name for entry in far.list("run") if entry.name not in ("log", "relight.json")}
    assert directories == {checkpoint.directory_in("run").split("/")[1] for checkpoint in checkpoints}


def test_two_copies_never_write_to_one_directory() -> None:
    """In fifty orders, a directory belongs to the copy that wrote its draft. The other copy uses another name."""
    near = Attempt.begin(MemoryStore(), "run")
    save(near, 3)
    for seed in range(50):
        far = MemoryStore()
        check(far, both(far, seed, Run(near.store, "run")))


def test_two_copies_never_write_to_one_directory_on_a_server(s3: str) -> None:
    """On an object store, where a name does not exclude a second writer, the results are the same."""
    near = Attempt.begin(MemoryStore(), "run")
    save(near, 3)
    for seed in range(6):
        far = open_bytes(f"{s3}/far{seed}")
        check(far, both(far, seed, Run(near.store, "run")))


def test_a_claim_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """A failed claim leaves no directory."""
    near = Attempt.begin(MemoryStore(), "run")
    save(near, 3)
    far = LocalStore(tmp_path)
    Log(far, "run").start()

    class Failing(StoreWrapper):
        def put_once(self, key: str, data: bytes) -> bool:
            if "/draft" in key:
                (tmp_path / key).parent.mkdir()
                raise RelightError("no")
            return self.inner.put_once(key, data)

    source = Run(near.store, "run")
    with pytest.raises(RelightError, match="no"):
        copy_one(source.open(source.history().live[-1]), Failing(far), Log(far, "run"), None)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["log"]
