"""Two nodes that copy the same checkpoint to the same tier, with their store calls interleaved in random orders."""

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
from relight.commit import Attempt
from relight.commit.attempt import take_over
from relight.drain import drain
from relight.errors import LeaseHeld, RelightError
from relight.log import Log
from relight.reader.verify import verify_checkpoint
from relight.store import ByteStore, Entry, LocalStore, MemoryStore, Writer, open_bytes
from relight.store.wrapper import StoreWrapper
from relight.transfer.copying import Claimed, copy_one


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


def both(far: ByteStore, seed: int, source: Run, *, in_charge: bool, gives_way: bool) -> list[str | BaseException]:
    """Copy the newest checkpoint in two threads. Return the id or the error of each."""
    names = ["a", "b"]
    turns, outcomes = Turns(seed, names), dict[str, str | BaseException]()
    Log(far, "run").start()
    charge = take_over(Log(far, "run"), source.history().attempts[-1], []) if in_charge else None

    def copy(name: str) -> None:
        store = Taking(far, lambda: turns.wait(name))
        try:
            outcomes[name] = copy_one(
                source.open(source.history().live[-1]), store, Log(store, "run"), None, charge, gives_way=gives_way
            )
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


def check(far: ByteStore, became: list[str | BaseException], *, in_charge: bool) -> None:
    """Check that exactly the returned checkpoints exist, with the right bytes, and no other directory."""
    run = Run(far, "run")
    checkpoints = run.history().live
    assert {checkpoint.id for checkpoint in checkpoints} == {outcome for outcome in became if isinstance(outcome, str)}
    assert len(checkpoints) == 1 if in_charge else len(checkpoints) >= 1
    for checkpoint in checkpoints:
        assert not verify_checkpoint(far, run.view(), checkpoint)
    for failed in (outcome for outcome in became if not isinstance(outcome, str)):
        assert isinstance(failed, LeaseHeld), failed
    directories = {entry.name for entry in far.list("run") if entry.name not in ("log", "relight.json")}
    assert directories == {checkpoint.directory_in("run").split("/")[1] for checkpoint in checkpoints}


@pytest.mark.parametrize("gives_way", [False, True])
@pytest.mark.parametrize("in_charge", [False, True])
def test_two_copies_never_write_to_one_directory(in_charge: bool, gives_way: bool) -> None:
    """In fifty orders, a directory belongs to the copy that wrote its first part.

    The other copy uses another name, or gives way.
    """
    near = Attempt.begin(MemoryStore(), "run")
    save(near, 3)
    gave = 0
    for seed in range(50):
        far = MemoryStore()
        became = both(far, seed, Run(near.store, "run"), in_charge=in_charge, gives_way=gives_way)
        check(far, became, in_charge=in_charge)
        gave += any(isinstance(outcome, Claimed) for outcome in became)
    assert (gave > 0) == gives_way


def test_two_copies_never_write_to_one_directory_on_a_server(s3: str) -> None:
    """On an object store, where a name does not exclude a second writer, the results are the same."""
    near = Attempt.begin(MemoryStore(), "run")
    save(near, 3)
    for seed in range(6):
        far = open_bytes(f"{s3}/far{seed}")
        check(far, both(far, seed, Run(near.store, "run"), in_charge=True, gives_way=False), in_charge=True)


def test_a_drain_waits_for_the_one_that_was_quicker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain waits for a copy that another node has begun.

    It reports the finished copy, and copies a stalled one itself.
    """
    attempt = begin(tmp_path)
    first = save(attempt, 0)
    assert drain(attempt.store, "run").copied
    second = save(attempt, 1)
    far = LocalStore(tmp_path / "far")
    begun = f"run/0000000001-{second}-e1"
    assert far.put_once(f"{begun}/part-00000.msgpack", b"begun")
    waits, events = [], []

    def finished(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            far.delete(f"{begun}/part-00000.msgpack")
            far.delete_dir(begun)
            copy_one(
                Run(attempt.store, "run").open(Run(attempt.store, "run").history().live[-1]),
                far,
                Log(far, "run"),
                None,
                1,
            )

    monkeypatch.setattr(outwards.time, "sleep", finished)
    report = drain(attempt.store, "run", notify=lambda name, message, fields: events.append((name, fields["id"])))
    assert not report.errors and not report.copied and len(waits) == 2
    assert events == [("drain.found", first), ("drain.found", second)]
    third = save(attempt, 2)
    assert far.put_once(f"run/0000000002-{third}-e1/part-00000.msgpack", b"begun")
    monkeypatch.setattr(outwards, "ABANDONED_AFTER_S", 0.2)
    monkeypatch.undo()
    monkeypatch.setattr(outwards, "ABANDONED_AFTER_S", 0.2)
    report = drain(attempt.store, "run")
    assert (
        not report.errors and [id_ for _, id_, _, _ in report.copied] == [third] and live(tmp_path, "far") == [0, 1, 2]
    )


def test_a_quicker_copy_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another node commits its copy during ours, ours is dropped without a reported failure."""
    attempt = begin(tmp_path)
    save(attempt, 0)
    source = Run(attempt.store, "run")
    inner, events = outwards.copy_one, []

    def slower(opened, store, log, *given, **named):  # type: ignore[no-untyped-def]
        far = LocalStore(tmp_path / "far")
        inner(source.open(source.history().live[-1]), far, Log(far, "run"), *given)
        raise LeaseHeld("another process has copied it there meanwhile", where=log.run)

    monkeypatch.setattr(outwards, "copy_one", slower)
    report = drain(attempt.store, "run", notify=lambda name, message, fields: events.append(name))
    assert not report.errors and events == ["drain.found"] and live(tmp_path, "far") == [0]


def test_a_claim_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """A failed claim leaves no directory."""
    near = Attempt.begin(MemoryStore(), "run")
    save(near, 3)
    far = LocalStore(tmp_path)
    Log(far, "run").start()

    class Failing(StoreWrapper):
        def put_once(self, key: str, data: bytes) -> bool:
            if "/part-" in key:
                (tmp_path / key).parent.mkdir()
                raise RelightError("no")
            return self.inner.put_once(key, data)

    source = Run(near.store, "run")
    with pytest.raises(RelightError, match="no"):
        copy_one(source.open(source.history().live[-1]), Failing(far), Log(far, "run"), None)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["log"]
