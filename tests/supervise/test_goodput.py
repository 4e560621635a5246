"""Where the time went: to the second, on clocks that are made up."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from relight.errors import NoSpace
from relight.store import MemoryStore
from relight.supervise.goodput import Account, Goodput, merged, once_each
from relight.supervise.incidents import IncidentLog, read_accounts


def kept(*looks: tuple[float, str, int, int] | str) -> Account:
    """Looks, and kinds of failures that happen at the time of the look before."""
    book, now = Goodput(0.0), 0.0
    for one in looks:
        if isinstance(one, str):
            book.failed(now, one)
        else:
            now = one[0]
            book.update(*one)
    return book.account("job", "2026-01-01T00:00:00Z")


def test_a_run_without_failures() -> None:
    """It starts, trains, saves, evaluates."""
    found = kept((10, "starting", -1, 0), (20, "training", 4, 5), (21, "saving", 4, 5), (30, "training", 9, 10), (35, "evaluating", 9, 10))
    assert found.spent == {"starting": 10, "training": 19, "saving": 1, "evaluating": 5}
    assert found.goodput == pytest.approx(19 / 35) and not found.lost and found.again == 0


def test_a_failure_has_all_it_costs() -> None:
    """The step that was begun, the time without processes, the start, the steps done again; then training counts again."""
    found = kept(
        (10, "training", 9, 10), (11.5, "training", 9, 10), "killed", (13, "down", -1, 0), (16, "starting", -1, 0), (17, "restoring", -1, 0),
        (19, "training", 5, 1), (22, "training", 9, 5), (23, "training", 10, 6), (30, "training", 17, 13),
    )  # fmt: skip
    assert found.spent == {"training": 10 + 8}
    assert found.lost == {"killed": {"stuck": 1.5, "down": 1.5, "starting": 3, "restoring": 1, "again": 5}}
    assert (found.steps, found.again, found.failures) == (10 + 8, 5, {"killed": 1})
    assert found.rows()[0] == ("", "training", 18) and found.seconds == 30


def test_a_failure_on_the_way_back_is_that_failures() -> None:
    """What the second costs is not the first one's."""
    found = kept(
        (10, "training", 9, 10),
        "hang",
        (12, "down", -1, 0),
        (14, "training", 5, 1),
        "memory",
        (15, "down", -1, 0),
        (20, "training", 9, 4),
        (21, "training", 10, 5),
    )
    assert found.lost["hang"] == {"stuck": 0, "down": 2, "again": 2}
    assert found.lost["memory"] == {"stuck": 0, "down": 1, "again": 5}
    assert found.spent == {"training": 11}


def test_the_time_that_stock_taking_takes_is_counted_once() -> None:
    """The failure was noticed in front of the last look."""
    book = Goodput(0.0)
    book.update(10, "training", 9, 10)
    book.update(14, "training", 9, 10)
    book.failed(12, "killed")
    book.update(20, "down")
    found = book.account("job", "")
    assert found.spent == {"training": 10} and found.lost == {"killed": {"stuck": 4, "down": 6}} and found.seconds == 20


def test_a_life_that_others_ended_is_counted_anew() -> None:
    """Its steps are done again, and then more; what that cost is nobody's, until it is known whose."""
    book = Goodput(0.0)
    book.update(10, "training", 9, 10)
    number = book.failed(11)
    for look in ((13, "down", -1, 0), (14, "training", 5, 1), (18, "training", 9, 5), (19, "training", 10, 6), (25, "training", 16, 12)):
        book.update(*look)
    found = book.account("job", "")
    assert (found.steps, found.again, found.failures, found.lost) == (10 + 7, 5, {}, {})
    assert found.spent == {"training": 10 + 7, "stuck": 1, "down": 2, "again": 5}
    book.set_kind(number, "killed")
    found = book.account("job", "")
    assert (found.steps, found.again, found.failures) == (10 + 7, 5, {"killed": 1})
    assert found.spent == {"training": 10 + 7} and found.lost == {"killed": {"stuck": 1, "down": 2, "again": 5}}
    assert number != book.failed(26, "killed")
    assert book.account("job", "").failures == {"killed": 2}


@pytest.mark.parametrize("seed", range(50))
def test_no_second_is_lost_or_counted_twice(seed: int) -> None:
    """Whatever happens: the parts are the whole."""
    rng = random.Random(seed)
    book, now, step, ended = Goodput(0.0), 0.0, -1, 0
    for _ in range(300):
        now += rng.random()
        if rng.random() < 0.1:
            book.failed(now, rng.choice(["killed", "hang", "memory"]))
            step, ended = -1, 0
        else:
            phase = rng.choice(["training"] * 5 + ["saving", "restoring", "down"])
            if phase == "training":
                more = rng.randrange(3)
                step, ended = (step + more if step >= 0 else rng.randrange(60)), ended + more
            book.update(now, phase, step, ended)
    found = book.account("job", "")
    parts = sum(found.spent.values()) + sum(sum(one.values()) for one in found.lost.values())
    assert parts == pytest.approx(found.seconds, abs=0.1) and found.seconds == pytest.approx(now, abs=0.01)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Account) == found


def test_jobs_of_one_run_are_added_up() -> None:
    """A job that was started again by somebody else goes on with the same run."""
    one = kept((10, "training", 9, 10), "killed", (12, "down", -1, 0))
    both = merged([one, kept((5, "starting", -1, 0), (10, "training", 19, 20))])
    assert both.seconds == 22 and both.spent == {"training": 15, "starting": 5}
    assert both.lost == {"killed": {"stuck": 0, "down": 2}} and both.failures == {"killed": 1}


def test_an_account_stays_until_there_is_a_newer_one(tmp_path: Path) -> None:
    """A store that takes nothing more, but lets things be deleted: what is there is the newest there is; the rest lies here, once."""

    class Full(MemoryStore):
        full = False

        def put_once(self, key: str, data: bytes) -> bool:
            if self.full:
                raise NoSpace("full")
            return super().put_once(key, data)

    store, book, goodput = Full(), IncidentLog(tmp_path / "here"), Goodput(0.0)
    book.at(store, "run")
    for at in range(1, 7):
        store.full = 3 <= at <= 5
        goodput.update(60.0 * at, "training", at, at)
        book.keep(goodput.account("job", "2026-01-01T00:00:00Z"))
        assert [one.seconds for one in read_accounts(store, "run")] == [60.0 * (2 if store.full else at)]
        assert len(list(store.list("run/incidents"))) == 1
    assert len(list((tmp_path / "here").iterdir())) <= 1


def test_supervisors_of_one_job_count_as_one() -> None:
    """A job on several nodes has a supervisor on each: of what ran at the same time one counts, the one that saw most steps end."""

    def one(job: str, began: str, seconds: float, steps: int) -> Account:
        return Account(job, f"2026-01-01T{began}Z", seconds, {"training": seconds}, {}, {}, steps, 0)

    first = [one("train.py", "10:00:00", 600.0, 99), one("train.py", "10:00:02", 597.0, 100), one("train.py", "10:05:00", 200.0, 40)]
    later = one("train.py", "10:09:59", 300.0, 50)
    assert once_each([*first, later]) == [first[1], later]
    assert once_each([one("a", "10:00:00", 0.0, 0), one("a", "11:00:00", 0.0, 0)]) != []
    unknown = Account("a", "then", 5.0, {}, {}, {}, 0, 0)
    assert once_each([unknown, unknown]) == [unknown, unknown]
