"""Incidents and accounts of a run are on every tier: they outlive the near disk (test_tiers_in_training: and come
back)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.drain.test_drain import begin
from tests.log.test_log_stale_listings import save

from relight.drain import drain
from relight.errors import StoreUnavailable
from relight.run_records.incident_sync import DIRECTORY, sync_incidents
from relight.store import LocalStore
from relight.supervise.goodput import Account
from relight.supervise.incidents import IncidentLog, read_accounts


def account(seconds: float) -> Account:
    """Return the account of a job that trained for some time."""
    return Account("train.py", "2026-01-01T10:00:00Z", seconds, {"training": seconds}, {}, {}, 7, 0)


def names(store: LocalStore, run: str = "run") -> set[str]:
    """Return the names of the diary's files."""
    return {entry.name for entry in store.list(f"{run}/{DIRECTORY}")}


def test_incidents_and_accounts_survive_the_near_disk(tmp_path: Path) -> None:
    """Incidents are drained with the saves, and of an account only the newest version."""
    attempt = begin(tmp_path)
    book = IncidentLog(tmp_path / "elsewhere")
    book.at(attempt.store, "run")
    attempt.store.put_once(f"run/{DIRECTORY}/0000000000001-abc.json", b"{}")
    far = LocalStore(tmp_path / "far")
    for step in range(3):
        book.keep(account(60.0 * (step + 1)))
        save(attempt, step)
        drain(attempt.store, "run")
        assert names(far) == names(attempt.store) and len(names(far)) == 2, "the account before is gone there too"
    assert [account_read.seconds for account_read in read_accounts(far, "run")] == [180.0]


def test_a_diary_that_cannot_be_written_keeps_no_checkpoint_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the diary cannot be copied, the save is copied and reported. The diary follows with the next."""
    attempt = begin(tmp_path)
    attempt.store.put_once(f"run/{DIRECTORY}/0000000000001-abc.json", b"{}")
    save(attempt, 0)
    real = LocalStore.put_once

    def put_once(self: LocalStore, key: str, data: bytes) -> bool:
        if DIRECTORY in key:
            raise StoreUnavailable("no room", where=key)
        return real(self, key, data)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "put_once", put_once)
        report = drain(attempt.store, "run")
    assert len(report.copied) == 1 and not report.errors
    drain(attempt.store, "run")
    assert names(LocalStore(tmp_path / "far")) == {"0000000000001-abc.json"}


def test_a_stopped_drain_writes_nothing_more(tmp_path: Path) -> None:
    """A drain that outlived its job may find another near disk with other keys."""
    stores = [LocalStore(tmp_path / name) for name in ("near", "far")]
    for number in range(5):
        stores[1].put_once(f"run/{DIRECTORY}/{number:013d}-abc.json", b"{}")
    stops = iter([False, False, True])
    assert sync_incidents(stores[0], "run", stores[1], "run", lambda: next(stops)) == 2
    assert len(names(stores[0])) == 2


@pytest.mark.parametrize("seed", range(30))
def test_both_have_the_union_and_only_the_newest_accounts(tmp_path: Path, seed: int) -> None:
    """Both diaries are equal afterwards, whatever they had before. A second call writes nothing."""
    rng = random.Random(seed)
    stores = [LocalStore(tmp_path / name) for name in ("a", "b")]
    incidents, newest = set(), {}
    runs = ("run", "elsewhere")
    written: list[set[str]] = []
    for store, run in zip(stores, runs, strict=True):
        written.append(set())
        for number in rng.sample(range(9), rng.randrange(5)):
            name = f"{number:013d}-abc.json"
            incidents.add(name)
            written[-1].add(name)
            store.put_once(f"{run}/{DIRECTORY}/{name}", b"{}")
        for number in rng.sample(range(4), rng.randrange(4)):
            count = rng.randrange(1, 5)
            name = f"{number:013d}-def.{count:06d}.account.json"
            newest[number] = max(newest.get(number, ""), name)
            written[-1].add(name)
            store.put_once(f"{run}/{DIRECTORY}/{name}", b"{}")
    expected = incidents | set(newest.values())
    assert sync_incidents(stores[0], "run", stores[1], "elsewhere") == 2 * len(expected) - sum(
        len(expected & present) for present in written
    )
    for store, run in zip(stores, runs, strict=True):
        assert (names(store, run) if incidents or newest else set()) == expected
    assert sync_incidents(stores[0], "run", stores[1], "elsewhere") == 0
