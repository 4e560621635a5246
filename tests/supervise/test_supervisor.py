"""One job under watch, without processes: pages are written here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from tests.log.test_log_stale_listings import save

from relight.catalog.incident_sync import DIRECTORY
from relight.commit import Attempt
from relight.errors import StoreUnavailable
from relight.heartbeat import SETTING, Heartbeat, HeartbeatPage
from relight.heartbeat.heartbeat_page import read_beat
from relight.policy.rollback_env import BEFORE, SPLIT
from relight.store import Entry, LocalStore, open_bytes
from relight.store.memory import MemoryStore
from relight.supervise.decide import SuperviseRules
from relight.supervise.facts import Decision, Failure, FailureEvidence, Worker
from relight.supervise.fencing_check import taken_over
from relight.supervise.goodput import Account
from relight.supervise.incidents import Incident, RecoveryRecord, incident_of, incidents_in, once_each, read_incidents
from relight.supervise.limits import HangTimeouts
from relight.supervise.own_memory import MARKER, directories, left_in, sweep_memory
from relight.supervise.supervisor import Supervisor


def test_a_life_that_ended_between_two_looks_went_on_all_the_same(tmp_path: Path) -> None:
    """Its steps are in its pages: the incident before it is over, with what it has cost; the next one is open."""
    watched = Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path)
    try:
        for reached, restored in ((5, -1), (12, 4)):
            told = watched.begin([0, 1], {})
            watched.started({0: os.getpid(), 1: os.getpid()})
            for rank in range(2):
                HeartbeatPage(told[rank][SETTING]).write(
                    Heartbeat(pid=1, phase="training", step=reached, steps=3, restored=restored, first_at=2.0)
                )
            watched.failed([Worker(0, -9, 1.0), Worker(1, stopped=True)])
        first, second = incidents_in(tmp_path)
        assert first.after is not None and (first.after.restored, first.after.steps_lost) == (4, 1)
        assert second.after is None and second.step == 12
    finally:
        watched.close()


def test_what_an_earlier_life_did_counts_when_it_is_asked_whether_all_is_stored(tmp_path: Path) -> None:
    """Asked to end before the new life has come to where the old one was: the steps between are not stored."""
    watched = Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path)
    try:
        for beat, stored in (
            (Heartbeat(pid=1, phase="training", step=9, steps=10, durable=9), True),
            (Heartbeat(pid=2, phase="training", restored=4), False),
            (Heartbeat(pid=3, phase="training", restored=9), True),
            (Heartbeat(pid=4, phase="training", restored=4, step=12, steps=8, durable=12), True),
        ):
            told = watched.begin([0], {})
            watched.started({0: os.getpid()})
            HeartbeatPage(told[0][SETTING]).write(beat)
            watched.poll()
            assert watched.saved() is stored, beat
            watched.failed([Worker(0, -9, 1.0)])
    finally:
        watched.close()


def test_what_ranks_had_not_heard_of_is_stored_all_the_same(tmp_path: Path) -> None:
    """They were ended while they waited, before they were told even that it was sealed: the run's log knows."""
    save(Attempt.begin(LocalStore(tmp_path / "s"), "r"), 12)
    watched = Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path / "incidents")
    try:
        for url, step, stored in (
            ("", 12, False),
            (f"{tmp_path}/not", 12, False),
            (f"{tmp_path}/s", 12, True),
            (f"{tmp_path}/s", 13, False),
        ):
            told = watched.begin([0], {})
            watched.started({0: os.getpid()})
            HeartbeatPage(told[0][SETTING]).write(
                Heartbeat(pid=step, phase="training", step=step, steps=8, sealed=4, durable=4, url=url, run="r")
            )
            watched.poll()
            assert watched.saved() is stored, (url, step)
            watched.failed([Worker(0, -9, 1.0)])
    finally:
        watched.close()


def test_a_failure_that_several_machines_wrote_down_is_one(tmp_path: Path) -> None:
    """Each has seen its own ranks' end; the next life's end is another failure, and so is the next job's."""

    def one(host: str, life: int, job: str = "job") -> Incident:
        failure = Failure("network", "why", 0, 5, 6, "words")
        return incident_of(FailureEvidence(()), failure, Decision("resume", "so"), job=job, host=host, life=life, group="head:29400 j")

    told = [one("a", 1), one("b", 1), one("b", 2), one("a", 2), one("c", 1, "other")]
    assert [(it.host, it.life) for it in once_each(told)] == [("a", 1), ("b", 2), ("c", 1)]
    met = [
        msgspec.structs.replace(it, meeting=meeting) for it, meeting in ((told[0], "x"), (told[1], "x"), (told[2], "y"), (one("d", 1), "y"))
    ]
    assert [(it.host, it.meeting) for it in once_each(met)] == [("a", "x"), ("b", "y")], "a machine that came later counts from 1"


def test_a_job_that_moved_to_another_machine_has_its_own_failures() -> None:
    """A job of one node that fails at the same step on another machine has failed twice: no second machine saw the first failure."""
    facts, failure = FailureEvidence(()), Failure("crash", "why", 0, 5, 6, "words")
    told = [incident_of(facts, failure, Decision("stop", "so"), job="job", host=host, life=1) for host in ("a", "b")]
    assert [it.host for it in once_each(told)] == ["a", "b"]


def test_what_failed_before_the_run_was_known_is_in_its_store_as_well(tmp_path: Path) -> None:
    """A rank dies before any has said where the run is: written down here first, and brought there once that is known."""
    store = open_bytes(tmp_path / "store")
    watched = Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path / "here")
    try:
        watched.begin([0], {})
        watched.started({0: os.getpid()})
        watched.failed([Worker(0, -9, 1.0)])
        assert [one.life for one in incidents_in(tmp_path / "here")] == [1]
        told = watched.begin([0], {})
        watched.started({0: os.getpid()})
        HeartbeatPage(told[0][SETTING]).write(Heartbeat(pid=1, phase="training", step=3, steps=1, url=str(tmp_path / "store"), run="run"))
        watched.poll()
        assert [one.life for one in read_incidents(store, "run")] == [1]
        assert incidents_in(tmp_path / "here") == []
    finally:
        watched.close()


def test_what_is_no_agent_any_more_is_let_be(tmp_path: Path) -> None:
    """An agent that is gone has left its number, and another process has it by now: late saves are not its fault."""
    watched = Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path)
    other = subprocess.Popen(["sleep", "60"])
    try:
        os.kill(other.pid, signal.SIGSTOP)
        os.waitpid(other.pid, os.WUNTRACED)
        told = watched.begin([0], {})
        watched.started({0: os.getpid()})
        asked = time.monotonic() - 1000
        HeartbeatPage(told[0][SETTING]).write(Heartbeat(pid=1, phase="training", step=1, steps=1, save_since=asked, agent=other.pid))
        watched.poll()
        time.sleep(0.1)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
        watched.close()


def test_what_another_supervisor_needs_is_not_swept(tmp_path: Path) -> None:
    """One in another container, whose processes have no numbers here, but whose memory is the same: only what nobody holds is left over."""
    watched = Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path)
    foreign = Path(watched.begin([0], {})[0][SETTING]).parent
    left = foreign.with_name("relight-run-4194303-left0000")
    left.mkdir(0o700)
    (left / MARKER).touch()
    try:
        hidden = foreign.with_name(f"relight-run-4194302-{foreign.name.rpartition('-')[2]}")
        foreign.rename(hidden)  # as if its process had a number that is none here
        Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path).close()
        assert hidden.exists() and not left.exists()
        hidden.rename(foreign)
    finally:
        watched.close()
    assert not foreign.exists()


def test_a_diary_that_somebody_else_wrote_in_ends_no_job(tmp_path: Path) -> None:
    """An incident whose name is no time, settings that are no numbers: what cannot be understood is left out."""
    watched = Supervisor(SuperviseRules(split=True), HangTimeouts(), "job", tmp_path / "here")
    try:
        told = watched.begin([0], {})
        watched.started({0: os.getpid()})
        watched.failed([Worker(0, -9, 1.0)])
        (one,) = incidents_in(tmp_path / "here")
        diary = tmp_path / "store" / "run" / "incidents"
        diary.mkdir(parents=True)
        for name, settings in (("notes", {}), (f"{int(time.time() * 1000):013d}-ffffff", {SPLIT: "much", "LD_PRELOAD": "evil.so"})):
            data = msgspec.structs.replace(one, id=name, settings=settings, action="smaller batch")
            (diary / f"{name}.json").write_bytes(msgspec.json.encode(data))
        HeartbeatPage(told[0][SETTING]).write(
            Heartbeat(pid=1, phase="training", step=3, steps=3, url=str(tmp_path / "store"), run="run", agent=0)
        )
        assert watched.poll() == ""
        assert not watched.failed([Worker(0, -9, 1.0)]).settings, "nor is what a store says set in the environment of ranks"
        memory = Worker(0, 1, 1.0, "torch.OutOfMemoryError: CUDA out of memory")
        assert watched.failed([memory]).action == "smaller batch"
    finally:
        watched.close()


def test_a_node_that_meets_nobody_any_more_hears_that_the_job_was_stopped(tmp_path: Path) -> None:
    """By what another node of the same group has written since: not by an older stop, another group's, or a decision to go on."""
    now = [1000.0]
    store = open_bytes(tmp_path / "store")

    def of(group: str) -> Supervisor:
        made = Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path / group, lambda: now[0], group=group)
        made.begin([0], {})
        made.started({0: os.getpid()})
        made._book.at(store, "run")
        return made

    first, second, other = of("a"), of("a"), of("b")
    try:
        fenced = Worker(0, 1, 1.0, error="relight.errors.Fenced: gone", tail=("relight.errors.Fenced: another attempt",))
        other.failed([fenced])
        first.failed([Worker(0, -9, 1.0)])
        assert second.ended_elsewhere() == ""
        assert first.failed([fenced]).action == "stop"
        assert second.ended_elsewhere() == "", "not asked again so soon"
        now[0] += 6.0
        assert second.ended_elsewhere() == first.decision.reason  # type: ignore[union-attr]
        now[0] += 6.0
        time.sleep(0.01)
        second._began = now[0]
        assert second.ended_elsewhere() == "", "a life that began behind it knows nothing of it"
    finally:
        for one in (first, second, other):
            one.close()


def test_each_node_knows_what_ended_a_life(tmp_path: Path) -> None:
    """One of them: the others lost it, or saw it come and go. Whoever's account is shown has the failure by its name, once."""
    store = open_bytes(tmp_path / "store")
    nodes = [
        Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path / str(number), group=group) for number, group in enumerate("aaab")
    ]
    died, lost, left, other = nodes
    gone = Worker(0, 1, error="RuntimeError: Connection closed by peer", tail=("RuntimeError: Connection closed by peer",))

    def failures(one: Supervisor) -> dict[str, int]:
        one._keep_account()
        (kept,) = [
            Account(**msgspec.json.decode(path.read_bytes()))
            for path in (tmp_path / "store" / "run" / DIRECTORY).glob(f"{one._book._number}*")
        ]
        return kept.failures

    try:
        for one in nodes:
            one._known = True
            one._book.at(store, "run")
        for kind in ("killed", "numerical"):
            for one in nodes:
                one.begin([0], {})
                one.started({0: os.getpid()})
            time.sleep(0.01)
            lost.failed([gone])  # it may be the first to notice
            died.failed(
                [Worker(0, -9, 1.0) if kind == "killed" else Worker(0, 1, 1.0, error="relight.errors.Diverged: the loss is nan at step 3")]
            )
            left.end_for_membership_change()
            time.sleep(0.01)
        for one in (died, lost, left):
            assert failures(one) == {"killed": 1, "numerical": 1}
        other.end_for_membership_change()
        assert failures(other) == {}, "what another job's nodes wrote is not its"
        time.sleep(0.01)
        left.begin([0], {})
        left.end_for_membership_change()
        assert failures(left) == {"killed": 1, "numerical": 1}, "a node that joins is no failure"
    finally:
        for one in nodes:
            one.close()


def test_a_job_that_was_taken_over_is_not_started_again_whatever_it_failed_of(tmp_path: Path) -> None:
    """Its own processes took charge, one life after the other; then somebody else's did. Who never was in charge knows nothing of it."""
    store = open_bytes(tmp_path / "store")

    def life(watched: Supervisor, number: int) -> Decision:
        told = watched.begin([0], {})
        watched.started({0: os.getpid() if number else 1})
        HeartbeatPage(told[0][SETTING]).write(
            Heartbeat(pid=1, phase="training", step=10 * number + 3, steps=number + 1, url=str(tmp_path / "store"), run="run")
        )
        watched.poll()
        return watched.failed([Worker(0, -9, 1.0)])

    mine, nobody = (Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path / name) for name in ("mine", "nobody"))
    try:
        Attempt.begin(store, "run")  # by this process, which is rank 0 of the second life
        assert life(mine, 0).action == "resume" and life(mine, 1).action == "resume"
        script = "import sys; from relight.store import open_bytes; from relight.commit import Attempt; Attempt.begin(open_bytes(sys.argv[1]), 'run')"
        subprocess.run([sys.executable, "-c", script, str(tmp_path / "store")], check=True)
        found = life(mine, 2)
        assert found.action == "stop" and "taken this run over" in found.reason and "SIGKILL" in found.reason
        assert life(nobody, 0).action == "resume"
        (tmp_path / "store" / "relight.json").rename(tmp_path / "away")
        assert life(mine, 3).action != "end"
    finally:
        mine.close()
        nobody.close()


def test_a_log_that_cannot_be_read_in_time_holds_nobody_up() -> None:
    """Nor one that cannot be read at all: the job goes on as if nobody had asked."""

    class Slow(MemoryStore):
        def get(self, key: str, limit: int) -> bytes:
            time.sleep(5)
            return super().get(key, limit)

    began = time.monotonic()
    assert not taken_over(Slow(), "run", {"a:1"}, 0.2) and time.monotonic() - began < 3
    assert not taken_over(MemoryStore(), "run", {"a:1"})


NAN = Worker(0, 1, 1.0, error="relight.errors.Diverged: the loss is nan at step 40")


def restored(watched: Supervisor, step: int, *, goes_on: bool = True) -> None:
    """A life begins; if it ``goes_on`` it restores, and ends steps."""
    told = watched.begin([0], {})
    watched.started({0: os.getpid()})
    if goes_on:
        HeartbeatPage(told[0][SETTING]).write(Heartbeat(pid=1, phase="training", step=step, steps=5, restored=step - 5, first_at=2.0))
        watched.poll()


def test_nobody_goes_back_twice(tmp_path: Path) -> None:
    """A life went back and trained on; then others came. What the next one is told, whether it restores or not, is not to go back once more."""
    watched = Supervisor(SuperviseRules(split=True), HangTimeouts(), "job", tmp_path)
    try:
        restored(watched, 40)
        watched.failed([Worker(0, 1, 1.0, error="torch.OutOfMemoryError: CUDA out of memory")])
        restored(watched, 40)
        assert watched.failed([NAN]).action == "roll back"
        assert watched.decision is not None and {BEFORE, SPLIT} <= watched.decision.settings.keys()
        restored(watched, 0, goes_on=False)
        watched.end_for_membership_change()
        assert BEFORE in watched.decision.settings, "none has restored yet"
        restored(watched, 50_000)
        watched.end_for_membership_change()
        assert watched.decision.settings == {SPLIT: "2"}
        restored(watched, 0, goes_on=False)
        assert watched.failed([Worker(0, -9, 1.0)]).settings == {SPLIT: "2"}
    finally:
        watched.close()


def test_the_next_job_does_not_go_back_either(tmp_path: Path) -> None:
    """What went back, and was followed up, is over; what nobody has followed up may not have been done."""
    failure = Failure("numerical", "why", 0, 40, 41, "words")
    told = {BEFORE: "10", SPLIT: "2"}
    one = incident_of(FailureEvidence(()), failure, Decision("roll back", "so", 0.0, told), job="job", host="a", life=1)
    assert one.past("a")[1].settings == told
    done = msgspec.structs.replace(one, after=RecoveryRecord(one.id, 9, 31, {}))
    assert done.past("a")[1].settings == {SPLIT: "2"}


def test_asked_to_end_between_two_lives(tmp_path: Path) -> None:
    """The life before is over, and accounted for: nothing was trained again, nothing of it is done once more."""
    now = [1000.0]
    store = open_bytes(tmp_path / "store")
    watched = Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path / "here", lambda: now[0], group="a")
    try:
        watched._known = True
        watched._book.at(store, "run")
        told = watched.begin([0], {})
        watched.started({0: os.getpid()})
        HeartbeatPage(told[0][SETTING]).write(Heartbeat(pid=1, phase="training", step=9, steps=10, restored=-1, first_at=1001.0))
        now[0] += 10
        watched.poll()
        assert watched.failed([Worker(0, -9, 1010.0)]).action == "resume"
        now[0] += 30
        assert watched.ended("SIGTERM").action == "end"
    finally:
        watched.close()
    first, second = read_incidents(store, "run")
    assert (first.kind, first.after, second.kind) == ("killed", None, "preemption")
    (kept,) = [Account(**msgspec.json.decode(path.read_bytes())) for path in (tmp_path / "store" / "run" / DIRECTORY).glob("*account.json")]
    assert (kept.steps, kept.again, kept.failures) == (10, 0, {"killed": 1})


def test_a_store_that_does_not_answer_holds_nobody_up(tmp_path: Path) -> None:
    """Where the time went is written down by a thread of its own: ranks are looked after meanwhile, and the job comes to its end."""

    class Slow(MemoryStore):
        def put_once(self, key: str, data: bytes) -> bool:
            time.sleep(3)
            return super().put_once(key, data)

    now = [1000.0]
    watched = Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path, lambda: now[0])
    watched._known = True
    watched._book.at(Slow(), "run")
    restored(watched, 5)
    began = time.monotonic()
    for _ in range(5):
        now[0] += 70
        watched.poll()
    assert time.monotonic() - began < 2
    watched.close()
    assert time.monotonic() - began < 15


def test_what_ended_a_life_is_asked_again_where_the_store_did_not_answer(tmp_path: Path) -> None:
    """Or where only those have written that lost it: whoever failed may be late."""

    class Absent(LocalStore):
        away = False

        def list(self, prefix: str) -> list[Entry]:
            if self.away:
                raise StoreUnavailable("it does not answer")
            return super().list(prefix)

    store = Absent(tmp_path / "store")
    died, lost = nodes = [Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path / name, group="a") for name in ("died", "lost")]
    gone = Worker(0, 1, error="RuntimeError: Connection closed by peer", tail=("RuntimeError: Connection closed by peer",))

    def causes(learns: bool = True) -> list[str]:
        if learns:
            lost._endings.learn(lost._goodput, lost._book)
        return lost._goodput._causes

    try:
        for one in nodes:
            one._known = True
            one._book.at(store, "run")
            one.begin([0], {})
            one.started({0: os.getpid()})
        time.sleep(0.01)
        lost.failed([gone])
        assert causes() == ["", "network"], "nobody else has written yet"
        incident = died._book.write
        late: list[Incident] = []
        died._book.write = late.append  # type: ignore[assignment, method-assign]
        died.failed([Worker(0, -9, 1.0)])
        time.sleep(0.01)
        lost.begin([0], {})
        assert causes() == ["", "network"]
        incident(late[0])
        store.away = True
        assert causes() == ["", "network"]
        store.away = False
        assert causes() == ["", "killed"]
        assert not lost._endings._unsure
    finally:
        for one in nodes:
            one.close()


@pytest.mark.parametrize("ahead_s", [-1800.0, 1800.0])
def test_nodes_whose_clocks_differ_know_what_ended_a_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float) -> None:
    """They have agreed on a name for each: what one wrote down half an hour ago, or will in half an hour, was of this one."""
    store = open_bytes(tmp_path / "store")
    died, left = nodes = [Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path / name, group="a") for name in ("died", "left")]
    try:
        for life in range(3):
            for one in nodes:
                one._known = True
                one._book.at(store, "run")
                one.begin([0], {}, f"life {life}")
                one.started({0: os.getpid()})
            if life == 1:
                with monkeypatch.context() as patch:
                    patch.setattr("relight.supervise.incidents.time", SimpleNamespace(time=lambda: time.time() + ahead_s))
                    died.failed([Worker(0, -9, 1.0)])
            else:
                died.end_for_membership_change()
            left.end_for_membership_change()
            time.sleep(0.01)
        left._endings.learn(left._goodput, left._book)
        assert left._goodput._causes == ["", "", "killed", ""]
    finally:
        for one in nodes:
            one.close()


def test_a_stop_of_the_job_before_is_not_one_of_this(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was written by a clock that is ahead, so it looks like one that is to come; a stop of this job, by one that is behind, counts."""
    store = open_bytes(tmp_path / "store")
    fenced = Worker(0, 1, 1.0, error="relight.errors.Fenced: gone", tail=("relight.errors.Fenced: another attempt",))

    def stops(ahead_s: float) -> str:
        other = Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path / "other", group="a")
        try:
            other.begin([0], {})
            other._book.at(store, "run")
            with monkeypatch.context() as patch:
                patch.setattr("relight.supervise.incidents.time", SimpleNamespace(time=lambda: time.time() + ahead_s))
                return other.failed([fenced]).reason
        finally:
            other.close()

    stops(60.0)
    mine = Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path / "mine", group="a")
    try:
        told = mine.begin([0], {})
        mine.started({0: os.getpid()})
        HeartbeatPage(told[0][SETTING]).write(Heartbeat(pid=1, phase="training", step=3, steps=3, url=str(tmp_path / "store"), run="run"))
        mine.poll()
        mine._looked_elsewhere = 0.0
        assert mine.ended_elsewhere() == ""
        reason = stops(-60.0)
        mine._looked_elsewhere = 0.0
        assert mine.ended_elsewhere() == reason
    finally:
        mine.close()


def test_only_directories_of_own_supervisors_are_removed(tmp_path: Path) -> None:
    """A sweep removes what a killed supervisor made, and nothing else that has such a name: no store, link, or directory of others."""
    kept = [
        "relight-run-20261126",
        "relight-run-424242-lr0.1",
        "relight-run-42-baseline",
        "relight-run-4194303-٣٤٥٦abcd",
        "relight-run-٤٢-abcdefgh",
    ]
    for name in kept:
        (tmp_path / name).mkdir(0o700)
        (tmp_path / name / "data").write_bytes(b"x")
    for name, mode, marked in (("relight-run-4194303-openopen", 0o755, True), ("relight-run-4194303-unmarked", 0o700, False)):
        (tmp_path / name).mkdir(mode)
        (tmp_path / name).chmod(mode)
        if marked:
            (tmp_path / name / MARKER).touch()
    (tmp_path / "target").mkdir(0o700)
    (tmp_path / "target" / MARKER).touch()
    (tmp_path / "relight-run-4194303-linklink").symlink_to(tmp_path / "target")
    (tmp_path / "relight-run-4194303-deaddead").mkdir(0o700)
    (tmp_path / "relight-run-4194303-deaddead" / MARKER).touch()
    before = {path.name for path in tmp_path.iterdir()}
    assert [path.name for path in left_in(tmp_path)] == ["relight-run-4194303-deaddead"]
    assert [path.name for path in sweep_memory(tmp_path)] == ["relight-run-4194303-deaddead"]
    assert {path.name for path in tmp_path.iterdir()} == before - {"relight-run-4194303-deaddead"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory of another user")
def test_a_directory_of_another_user_is_neither_removed_nor_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's directory stands for no supervisor, dead or alive."""
    monkeypatch.setattr("relight.supervise.own_memory.MEMORY", str(tmp_path))
    for pid in (4194303, os.getpid()):
        folder = tmp_path / f"relight-run-{pid}-othersdi"
        folder.mkdir(0o700)
        (folder / MARKER).touch()
        os.chown(folder, 65534, 65534)
    assert sweep_memory(tmp_path) == [] and os.getpid() not in directories()


def test_a_page_that_is_no_file_has_no_beat(tmp_path: Path) -> None:
    """A page that is a pipe or a device is not read: it might have no end."""
    os.mkfifo(tmp_path / "pulse-0")
    (tmp_path / "pulse-1").symlink_to("/dev/zero")
    assert read_beat(tmp_path / "pulse-0") is None and read_beat(tmp_path / "pulse-1") is None
