"""Accounts of time, exact to the second, with simulated clocks."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from relight.errors import NoSpace
from relight.store import MemoryStore
from relight.supervise.goodput import Account, Goodput, merged, once_each
from relight.supervise.incidents import IncidentLog, read_accounts


def kept(*observations: tuple[float, str, int, int] | str) -> Account:
    """Return the account of observations and failures. A failure happens at the time of the observation before it."""
    book, now = Goodput(0.0), 0.0
    for observation in observations:
        if isinstance(observation, str):
            book.failed(now, observation)
        else:
            now = observation[0]
            book.update(*observation)
    return book.account("job", "2026-01-01T00:00:00Z")


def test_a_run_without_failures() -> None:
    """A run without failures starts, trains, saves and evaluates."""
    result = kept(
        (10, "starting", -1, 0),
        (20, "training", 4, 5),
        (21, "saving", 4, 5),
        (30, "training", 9, 10),
        (35, "evaluating", 9, 10),
    )
    assert result.spent == {"starting": 10, "training": 19, "saving": 1, "evaluating": 5}
    assert result.goodput == pytest.approx(19 / 35) and not result.lost and result.again == 0


def test_a_failure_has_all_it_costs() -> None:
    """A failure costs the begun step, the time without processes, the start and the repeated steps."""
    result = kept(
        (10, "training", 9, 10), (11.5, "training", 9, 10), "killed", (13, "down", -1, 0), (16, "starting", -1, 0), (17, "restoring", -1, 0),
        (19, "training", 5, 1), (22, "training", 9, 5), (23, "training", 10, 6), (30, "training", 17, 13),
    )  # fmt: skip
    assert result.spent == {"training": 10 + 8}
    assert result.lost == {"killed": {"stuck": 1.5, "down": 1.5, "starting": 3, "restoring": 1, "again": 5}}
    assert (result.steps, result.again, result.failures) == (10 + 8, 5, {"killed": 1})
    assert result.rows()[0] == ("", "training", 18) and result.seconds == 30


def test_a_failure_on_the_way_back_is_that_failures() -> None:
    """The cost of a failure during recovery belongs to the second failure."""
    result = kept(
        (10, "training", 9, 10),
        "hang",
        (12, "down", -1, 0),
        (14, "training", 5, 1),
        "memory",
        (15, "down", -1, 0),
        (20, "training", 9, 4),
        (21, "training", 10, 5),
    )
    assert result.lost["hang"] == {"stuck": 0, "down": 2, "again": 2}
    assert result.lost["memory"] == {"stuck": 0, "down": 1, "again": 5}
    assert result.spent == {"training": 11}


def test_the_time_that_stock_taking_takes_is_counted_once() -> None:
    """A failure that was noticed before the last observation is not counted twice."""
    book = Goodput(0.0)
    book.update(10, "training", 9, 10)
    book.update(14, "training", 9, 10)
    book.failed(12, "killed")
    book.update(20, "down")
    result = book.account("job", "")
    assert (
        result.spent == {"training": 10} and result.lost == {"killed": {"stuck": 4, "down": 6}} and result.seconds == 20
    )


def test_an_incarnation_that_another_node_ended_has_its_own_account() -> None:
    """If another node ended the incarnation, the cost has no cause until the cause is known."""
    book = Goodput(0.0)
    book.update(10, "training", 9, 10)
    number = book.failed(11)
    for observation in (
        (13, "down", -1, 0),
        (14, "training", 5, 1),
        (18, "training", 9, 5),
        (19, "training", 10, 6),
        (25, "training", 16, 12),
    ):
        book.update(*observation)
    result = book.account("job", "")
    assert (result.steps, result.again, result.failures, result.lost) == (10 + 7, 5, {}, {})
    assert result.spent == {"training": 10 + 7, "stuck": 1, "down": 2, "again": 5}
    book.set_kind(number, "killed")
    result = book.account("job", "")
    assert (result.steps, result.again, result.failures) == (10 + 7, 5, {"killed": 1})
    assert result.spent == {"training": 10 + 7} and result.lost == {"killed": {"stuck": 1, "down": 2, "again": 5}}
    assert number != book.failed(26, "killed")
    assert book.account("job", "").failures == {"killed": 2}


@pytest.mark.parametrize("seed", range(50))
def test_no_second_is_lost_or_counted_twice(seed: int) -> None:
    """The sum of all parts equals the elapsed time for any sequence of events."""
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
    result = book.account("job", "")
    parts = sum(result.spent.values()) + sum(sum(seconds_of.values()) for seconds_of in result.lost.values())
    assert parts == pytest.approx(result.seconds, abs=0.1) and result.seconds == pytest.approx(now, abs=0.01)
    assert msgspec.json.decode(msgspec.json.encode(result), type=Account) == result


def test_jobs_of_one_run_are_added_up() -> None:
    """Accounts of several jobs of one run are added."""
    first = kept((10, "training", 9, 10), "killed", (12, "down", -1, 0))
    both = merged([first, kept((5, "starting", -1, 0), (10, "training", 19, 20))])
    assert both.seconds == 22 and both.spent == {"training": 15, "starting": 5}
    assert both.lost == {"killed": {"stuck": 0, "down": 2}} and both.failures == {"killed": 1}


def test_an_account_stays_until_there_is_a_newer_one(tmp_path: Path) -> None:
    """A full store keeps its newest account although it permits deletion. Newer accounts are stored locally, once."""

    class Full(MemoryStore):
        full = False

        def put_once(self, key: str, data: bytes) -> bool:
            if self.full:
                raise NoSpace("full")
            return super().put_once(key, data)

    store, book, goodput = Full(), IncidentLog(tmp_path / "here"), Goodput(0.0)
    book.at(store, "run")
    for number in range(1, 7):
        store.full = 3 <= number <= 5
        goodput.update(60.0 * number, "training", number, number)
        book.keep(goodput.account("job", "2026-01-01T00:00:00Z"))
        assert [account.seconds for account in read_accounts(store, "run")] == [60.0 * (2 if store.full else number)]
        assert len(list(store.list("run/incidents"))) == 1
    assert len(list((tmp_path / "here").iterdir())) <= 1


def test_supervisors_of_one_job_count_as_one() -> None:
    """Of the supervisors of one job on several nodes only the one with the most steps counts."""

    def one(job: str, began: str, seconds: float, steps: int) -> Account:
        return Account(job, f"2026-01-01T{began}Z", seconds, {"training": seconds}, {}, {}, steps, 0)

    first = [
        one("train.py", "10:00:00", 600.0, 99),
        one("train.py", "10:00:02", 597.0, 100),
        one("train.py", "10:05:00", 200.0, 40),
    ]
    later = one("train.py", "10:09:59", 300.0, 50)
    assert once_each([*first, later]) == [first[1], later]
    assert once_each([one("a", "10:00:00", 0.0, 0), one("a", "11:00:00", 0.0, 0)]) != []
    unknown = Account("a", "then", 5.0, {}, {}, {}, 0, 0)
    assert once_each([unknown, unknown]) == [unknown, unknown]
