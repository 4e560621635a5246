"""A save in the middle of a run, on a disk that fails at one call of it."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from proofs.disk_scenario import ROOT, fresh_disk
from proofs.faults import fail_at, positions
from relight.commit import Attempt
from relight.errors import NoSpace
from relight.log import Log, fold
from relight.store import LocalStore
from relight.testing.disks import QuotaDisk, ShortDisk
from relight.testing.scenario import RUN, Fact, Names, check, examine, perform, prepared, save

TRIALS = list(positions())


@pytest.fixture(scope="module")
def names() -> Iterator[Names]:
    with prepared() as prepared_names:
        yield prepared_names


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS], ids=errno.errorcode.get)
def test_every_call_fails_once(code: int, names: Names) -> None:
    """If any call of a save fails, the error is typed, the previous checkpoint is intact, no partial save is visible,
    its space is released, no fsync is repeated, and the next save works."""
    trials = [
        trial
        for trial in TRIALS
        if trial.errno == code and not trial.forever and not trial.lost_reply and trial.name is None
    ]
    assert len(trials) > 20
    assert {str(trial): wrong for trial in trials if (wrong := fail_at(trial, names))} == {}


def test_every_call_and_all_after_it_fail(names: Names) -> None:
    """The same where the disk does not recover before the save has given up."""
    trials = [trial for trial in TRIALS if trial.forever]
    assert {str(trial): wrong for trial in trials if (wrong := fail_at(trial, names))} == {}


def test_replies_of_links_are_lost(names: Names) -> None:
    """A commit counts if its ``link`` worked but returned an error."""
    trials = [trial for trial in TRIALS if trial.lost_reply]
    assert trials
    assert {str(trial): wrong for trial in trials if (wrong := fail_at(trial, names))} == {}


def test_every_read_fails_once(names: Names) -> None:
    """The same holds if any read of a save's verification fails."""
    trials = [trial for trial in TRIALS if trial.name is not None]
    assert len(trials) > 30
    assert {str(trial): wrong for trial in trials if (wrong := fail_at(trial, names))} == {}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
def test_every_size_of_a_full_disk(code: int, names: Names) -> None:
    """With space for n pages, n = 0, 1, …, a save raises ``NoSpace`` until it fits. A failed save releases all its
    pages."""
    outcomes = []
    for pages in range(40):
        simulated = fresh_disk()
        disk = QuotaDisk(1 << 30, code, inner=simulated)
        names.seed(pages)
        store = LocalStore(ROOT, disk=disk)
        attempt, facts = Attempt.begin(store, RUN), list[Fact]()
        perform(save(attempt, "full/before", 1), facts)
        used = disk.used
        disk.bytes_max = used + pages * 4096
        try:
            perform(save(attempt, "full/struck", 2), facts)
            outcomes.append("fits")
        except NoSpace as error:
            outcomes.append("full")
            assert disk.used == used, "room was not given back"
            assert error.hint
            assert len(fold(attempt.view()).live) == 1
        disk.bytes_max = 1 << 30
        perform(save(attempt, "full/next", 3), facts)
        assert examine(store, Log(store, RUN), facts) == []
        assert check(LocalStore(ROOT, disk=simulated), facts, pages) == []
    assert outcomes[0] == "full"
    assert outcomes[-1] == "fits"
    assert outcomes == sorted(outcomes, key=lambda outcome: outcome == "fits"), "more room never hurts"


@pytest.mark.parametrize("most", [1, 7, 512, 4096])
def test_short_writes_and_reads(most: int, names: Names) -> None:
    """A disk that does only a little a call stores and gives back the same bytes."""
    disk = fresh_disk()
    names.seed(most)
    store = LocalStore(ROOT, disk=ShortDisk(most, disk))
    facts: list[Fact] = []
    perform(save(Attempt.begin(store, RUN), "short/one", 1), facts)
    assert examine(store, Log(store, RUN), facts) == []
    plain = LocalStore(ROOT, disk=disk)
    assert examine(plain, Log(plain, RUN), facts) == []
