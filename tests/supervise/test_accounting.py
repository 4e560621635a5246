"""The account of a job's time on each node, and what ended each incarnation."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from relight.errors import StoreUnavailable
from relight.heartbeat import SETTING, Heartbeat, HeartbeatPage
from relight.run_records.incident_sync import DIRECTORY
from relight.settings.supervise_settings import SuperviseSettings
from relight.store import ByteStore, Entry, LocalStore, open_bytes
from relight.store.memory import MemoryStore
from relight.supervise.accounting import ACCOUNT_S, JobAccount
from relight.supervise.facts import Worker
from relight.supervise.goodput import Account
from relight.supervise.incidents import Incident, IncidentLog, read_accounts, read_incidents
from relight.supervise.limits import RankObservation
from relight.supervise.supervisor import Supervisor


def knows_run(node: Supervisor, store: ByteStore) -> None:
    """Have a node write its records to a store, as if a rank had published it."""
    node.recovery.log.at(store, "run")
    node.account.begin_writing()


def test_each_node_knows_what_ended_an_incarnation(tmp_path: Path) -> None:
    """One node fails, another loses its connection, a third sees the membership change.

    The account of each has the failure once, with its kind.
    """
    store = open_bytes(tmp_path / "store")
    nodes = [
        Supervisor(SuperviseSettings(), "job", tmp_path / str(number), group=group)
        for number, group in enumerate("aaab")
    ]
    died, lost, left, other = nodes
    gone = Worker(
        0, 1, error="RuntimeError: Connection closed by peer", tail=("RuntimeError: Connection closed by peer",)
    )

    def failures(node: Supervisor) -> dict[str, int]:
        accounts = tmp_path / "store" / "run" / DIRECTORY
        before = {path.name: path.read_bytes() for path in accounts.glob("*account.json")}
        node.account.write()
        (kept,) = [path for path in accounts.glob("*account.json") if path.name not in before]
        return Account(**msgspec.json.decode(kept.read_bytes())).failures

    try:
        for node in nodes:
            knows_run(node, store)
        for kind in ("killed", "numerical"):
            for node in nodes:
                node.begin([0], {})
                node.started({0: os.getpid()})
            time.sleep(0.01)
            lost.failed([gone])  # a node that lost its connection may notice first
            died.failed(
                [
                    Worker(0, -9, 1.0)
                    if kind == "killed"
                    else Worker(0, 1, 1.0, error="relight.errors.Diverged: the loss is nan at step 3")
                ]
            )
            left.end_for_membership_change()
            time.sleep(0.01)
        for node in (died, lost, left):
            assert failures(node) == {"killed": 1, "numerical": 1}
        other.end_for_membership_change()
        assert failures(other) == {}, "incidents of another job's nodes do not count"
        time.sleep(0.01)
        left.begin([0], {})
        left.end_for_membership_change()
        assert failures(left) == {"killed": 1, "numerical": 1}, "a node that joins is no failure"
    finally:
        for node in nodes:
            node.close()


def test_asked_to_end_between_two_incarnations(tmp_path: Path) -> None:
    """The incarnation before is over and accounted for: no step of it was repeated."""
    now = [1000.0]
    store = open_bytes(tmp_path / "store")
    watched = Supervisor(SuperviseSettings(), "job", tmp_path / "here", lambda: now[0], group="a")
    try:
        knows_run(watched, store)
        environments = watched.begin([0], {})
        watched.started({0: os.getpid()})
        HeartbeatPage(environments[0][SETTING]).write(
            Heartbeat(pid=1, phase="training", step=9, steps=10, restored=-1, first_at=1001.0)
        )
        now[0] += 10
        watched.poll()
        assert watched.failed([Worker(0, -9, 1010.0)]).action == "resume"
        now[0] += 30
        assert watched.ended("SIGTERM").action == "end"
    finally:
        watched.close()
    first, second = read_incidents(store, "run")
    assert (first.kind, first.after, second.kind) == ("killed", None, "preemption")
    (kept,) = [
        Account(**msgspec.json.decode(path.read_bytes()))
        for path in (tmp_path / "store" / "run" / DIRECTORY).glob("*account.json")
    ]
    assert (kept.steps, kept.again, kept.failures) == (10, 0, {"killed": 1})


def test_a_store_that_does_not_answer_delays_no_job(tmp_path: Path) -> None:
    """A thread of its own stores the account. The supervisor monitors ranks meanwhile, and the job ends."""

    class Slow(MemoryStore):
        def put_once(self, key: str, data: bytes) -> bool:
            time.sleep(3)
            return super().put_once(key, data)

    now = [1000.0]
    watched = Supervisor(SuperviseSettings(), "job", tmp_path, lambda: now[0])
    knows_run(watched, Slow())
    environments = watched.begin([0], {})
    watched.started({0: os.getpid()})
    HeartbeatPage(environments[0][SETTING]).write(Heartbeat(pid=1, phase="training", step=5, steps=5, first_at=2.0))
    watched.poll()
    began = time.monotonic()
    for _ in range(5):
        now[0] += 70
        watched.poll()
    assert time.monotonic() - began < 2
    watched.close()
    assert time.monotonic() - began < 15


def test_the_cause_of_an_end_is_read_again_if_the_store_did_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cause of an end is read again if the store did not answer, or if only nodes that lost a connection have
    written: the failed node may be late."""

    class Absent(LocalStore):
        away, lists = False, 0

        def list(self, prefix: str) -> list[Entry]:
            self.lists += 1
            if self.away:
                raise StoreUnavailable("it does not answer")
            return super().list(prefix)

    store = Absent(tmp_path / "store")
    died, lost = nodes = [
        Supervisor(SuperviseSettings(), "job", tmp_path / name, group="a") for name in ("died", "lost")
    ]
    gone = Worker(
        0, 1, error="RuntimeError: Connection closed by peer", tail=("RuntimeError: Connection closed by peer",)
    )

    def causes() -> list[str]:
        lost.account.learn_causes()
        return lost.account.causes

    try:
        for node in nodes:
            knows_run(node, store)
            node.begin([0], {})
            node.started({0: os.getpid()})
        time.sleep(0.01)
        lost.failed([gone])
        assert causes() == ["network"], "no other node has written yet"
        late: list[Incident] = []
        with monkeypatch.context() as patch:
            patch.setattr(died.recovery.log, "write", late.append)
            died.failed([Worker(0, -9, 1.0)])
        time.sleep(0.01)
        lost.begin([0], {})
        assert causes() == ["network"]
        died.recovery.log.write(late[0])
        store.away = True
        assert causes() == ["network"]
        store.away = False
        assert causes() == ["killed"]
        store.lists = 0
        lost.account.learn_causes()
        assert store.lists == 0, "all causes are known, so nothing is read"
    finally:
        for node in nodes:
            node.close()


@pytest.mark.parametrize("ahead_s", [-1800.0, 1800.0])
def test_nodes_with_different_clocks_know_what_ended_an_incarnation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    """The nodes agree on a name for each incarnation, so an incident that seems to be half an hour old, or half an hour
    ahead, is assigned to the right one."""
    store = open_bytes(tmp_path / "store")
    died, left = nodes = [
        Supervisor(SuperviseSettings(), "job", tmp_path / name, group="a") for name in ("died", "left")
    ]
    try:
        for life in range(3):
            for node in nodes:
                knows_run(node, store)
                node.begin([0], {}, f"life {life}")
                node.started({0: os.getpid()})
            if life == 1:
                with monkeypatch.context() as patch:
                    patch.setattr(
                        "relight.supervise.incidents.time", SimpleNamespace(time=lambda: time.time() + ahead_s)
                    )
                    died.failed([Worker(0, -9, 1.0)])
            else:
                died.end_for_membership_change()
            left.end_for_membership_change()
            time.sleep(0.01)
        left.account.learn_causes()
        assert left.account.causes == ["", "killed", ""]
    finally:
        for node in nodes:
            node.close()


def observed(phase: str, steps: int, step: int) -> dict[int, RankObservation]:
    """Return an observation of one rank."""
    return {0: RankObservation(Heartbeat(pid=1, phase=phase, steps=steps, step=step))}


class Clock:
    """A clock that the test sets."""

    now = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def test_time_is_charged_to_phases_and_failures(tmp_path: Path) -> None:
    """The start, the training, the time after a failure, and the steps done again."""
    clock = Clock()
    account = JobAccount("job", IncidentLog(tmp_path), clock=clock)

    def after(seconds: float, phase: str, steps: int, step: int) -> None:
        clock.now += seconds
        account.update(observed(phase, steps, step))

    account.begun()
    clock.now += 5
    account.started(after_failure=False)
    after(10, "training", 10, 9)
    account.ended(clock.now, 15.0, "killed")
    account.begun()
    clock.now += 3
    account.started(after_failure=True)
    after(4, "training", 5, 9)
    after(1, "training", 6, 10)
    account.update({})
    present = account.present()
    assert (present.spent["starting"], present.spent["training"]) == (5, 11)
    assert present.lost == {"killed": {"stuck": 0.0, "down": 3, "again": 4}}
    assert (present.steps, present.again, present.failures) == (11, 5, {"killed": 1})
    assert (account.reached, account.causes) == (10, ["killed"])
    account.close()
    assert not list(tmp_path.iterdir()), "no account is written before the run is known"


def test_the_account_is_written_once_a_minute_and_at_the_end(tmp_path: Path) -> None:
    """Each account replaces the one before."""
    clock, store = Clock(), MemoryStore()
    log = IncidentLog(tmp_path)
    log.at(store, "run")
    account = JobAccount("job", log, clock=clock)
    account.begin_writing()

    def steps() -> list[int]:
        return [kept.steps for kept in read_accounts(store, "run")]

    account.update(observed("training", 1, 0))
    assert steps() == []
    clock.now += ACCOUNT_S
    account.update(observed("training", 2, 1))
    until = time.monotonic() + 10
    while steps() != [2] and time.monotonic() < until:
        time.sleep(0.01)
    clock.now += 1
    account.update(observed("training", 3, 2))
    assert steps() == [2]
    account.close()
    assert steps() == [3]


def test_a_refused_thread_does_not_cost_the_last_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last account waited for a thread that the system had refused, and was not written."""
    clock, store = Clock(), MemoryStore()
    log = IncidentLog(tmp_path)
    log.at(store, "run")
    account = JobAccount("job", log, clock=clock)
    account.begin_writing()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    clock.now += ACCOUNT_S
    with monkeypatch.context() as patch:
        patch.setattr("relight.comm.new_threads.start_thread", refuse)
        account.update(observed("training", 2, 1))
    account.close()
    assert [kept.steps for kept in read_accounts(store, "run")] == [2]
