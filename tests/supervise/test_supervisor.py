"""The supervisor of one job without processes: the tests write the heartbeat pages themselves."""

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

from relight.commit import Attempt
from relight.errors import StoreUnavailable
from relight.heartbeat import SETTING, Heartbeat, HeartbeatPage
from relight.heartbeat.heartbeat_page import read_beat
from relight.policy.rollback_env import BEFORE, SPLIT
from relight.run_records.incident_sync import DIRECTORY
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


def test_steps_of_an_incarnation_that_ended_between_two_polls_count(tmp_path: Path) -> None:
    """The heartbeat pages have the steps of an incarnation that ended between two polls.

    The incident before it is closed with its cost, and the next one is open.
    """
    watched = Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path)
    try:
        for reached, restored in ((5, -1), (12, 4)):
            environments = watched.begin([0, 1], {})
            watched.started({0: os.getpid(), 1: os.getpid()})
            for rank in range(2):
                HeartbeatPage(environments[rank][SETTING]).write(
                    Heartbeat(pid=1, phase="training", step=reached, steps=3, restored=restored, first_at=2.0)
                )
            watched.failed([Worker(0, -9, 1.0), Worker(1, stopped=True)])
        first, second = incidents_in(tmp_path)
        assert first.after is not None and (first.after.restored, first.after.steps_lost) == (4, 1)
        assert second.after is None and second.step == 12
    finally:
        watched.close()


def test_steps_of_an_earlier_incarnation_count_when_the_job_ends(tmp_path: Path) -> None:
    """If the job must end before the new incarnation has reached the step of the old one, the steps between are not
    stored."""
    watched = Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path)
    try:
        for beat, stored in (
            (Heartbeat(pid=1, phase="training", step=9, steps=10, durable=9), True),
            (Heartbeat(pid=2, phase="training", restored=4), False),
            (Heartbeat(pid=3, phase="training", restored=9), True),
            (Heartbeat(pid=4, phase="training", restored=4, step=12, steps=8, durable=12), True),
        ):
            environments = watched.begin([0], {})
            watched.started({0: os.getpid()})
            HeartbeatPage(environments[0][SETTING]).write(beat)
            watched.poll()
            assert watched.saved() is stored, beat
            watched.failed([Worker(0, -9, 1.0)])
    finally:
        watched.close()


def test_a_save_that_no_rank_saw_complete_counts_as_stored(tmp_path: Path) -> None:
    """Ranks ended before they knew that their save was sealed. The run's log has the checkpoint."""
    save(Attempt.begin(LocalStore(tmp_path / "s"), "r"), 12)
    watched = Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path / "incidents")
    try:
        for url, step, stored in (
            ("", 12, False),
            (f"{tmp_path}/not", 12, False),
            (f"{tmp_path}/s", 12, True),
            (f"{tmp_path}/s", 13, False),
        ):
            environments = watched.begin([0], {})
            watched.started({0: os.getpid()})
            HeartbeatPage(environments[0][SETTING]).write(
                Heartbeat(pid=step, phase="training", step=step, steps=8, sealed=4, durable=4, url=url, run="r")
            )
            watched.poll()
            assert watched.saved() is stored, (url, step)
            watched.failed([Worker(0, -9, 1.0)])
    finally:
        watched.close()


def test_a_failure_that_several_machines_wrote_down_is_one(tmp_path: Path) -> None:
    """Incidents of several machines for one incarnation are one failure. The next incarnation or job has its own."""

    def incident_on(host: str, life: int, job: str = "job") -> Incident:
        failure = Failure("network", "why", 0, 5, 6, "words")
        return incident_of(
            FailureEvidence(()), failure, Decision("resume", "so"), job=job, host=host, life=life, group="head:29400 j"
        )

    incidents = [
        incident_on("a", 1),
        incident_on("b", 1),
        incident_on("b", 2),
        incident_on("a", 2),
        incident_on("c", 1, "other"),
    ]
    assert [(incident.host, incident.life) for incident in once_each(incidents)] == [("a", 1), ("b", 2), ("c", 1)]
    late = incident_on("d", 1)
    meetings = ((incidents[0], "x"), (incidents[1], "x"), (incidents[2], "y"), (late, "y"))
    met = [msgspec.structs.replace(incident, meeting=meeting) for incident, meeting in meetings]
    assert [(incident.host, incident.meeting) for incident in once_each(met)] == [("a", "x"), ("b", "y")], (
        "a machine that came later counts from 1"
    )


def test_a_job_that_moved_to_another_machine_has_its_own_failures() -> None:
    """A job of one node that fails at the same step on another machine has failed twice: no second machine saw the
    first failure."""
    facts, failure = FailureEvidence(()), Failure("crash", "why", 0, 5, 6, "words")
    incidents = [
        incident_of(facts, failure, Decision("stop", "so"), job="job", host=host, life=1) for host in ("a", "b")
    ]
    assert [incident.host for incident in once_each(incidents)] == ["a", "b"]


def test_what_failed_before_the_run_was_known_is_in_its_store_as_well(tmp_path: Path) -> None:
    """A rank dies before any rank has reported where the run is.

    The incident is stored locally first, and moved to the run's store once that is known.
    """
    store = open_bytes(tmp_path / "store")
    watched = Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path / "here")
    try:
        watched.begin([0], {})
        watched.started({0: os.getpid()})
        watched.failed([Worker(0, -9, 1.0)])
        assert [incident.life for incident in incidents_in(tmp_path / "here")] == [1]
        environments = watched.begin([0], {})
        watched.started({0: os.getpid()})
        HeartbeatPage(environments[0][SETTING]).write(
            Heartbeat(pid=1, phase="training", step=3, steps=1, url=str(tmp_path / "store"), run="run")
        )
        watched.poll()
        assert [incident.life for incident in read_incidents(store, "run")] == [1]
        assert incidents_in(tmp_path / "here") == []
    finally:
        watched.close()


def test_another_process_with_an_agent_s_id_is_left_alone(tmp_path: Path) -> None:
    """If another process has the process id of an ended agent, it is left alone although saves are late."""
    watched = Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path)
    process = subprocess.Popen(["sleep", "60"])
    try:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        environments = watched.begin([0], {})
        watched.started({0: os.getpid()})
        asked = time.monotonic() - 1000
        HeartbeatPage(environments[0][SETTING]).write(
            Heartbeat(pid=1, phase="training", step=1, steps=1, save_since=asked, agent=process.pid)
        )
        watched.poll()
        time.sleep(0.1)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
        watched.close()


def test_what_another_supervisor_needs_is_not_swept(tmp_path: Path) -> None:
    """Another container shares the memory directory, but its process ids are unknown here.

    Only directories that no supervisor has locked are removed.
    """
    watched = Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path)
    foreign = Path(watched.begin([0], {})[0][SETTING]).parent
    left = foreign.with_name("relight-run-4194303-left0000")
    left.mkdir(0o700)
    (left / MARKER).touch()
    try:
        hidden = foreign.with_name(f"relight-run-4194302-{foreign.name.rpartition('-')[2]}")
        foreign.rename(hidden)  # as if its process id were unknown here
        Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path).close()
        assert hidden.exists() and not left.exists()
        hidden.rename(foreign)
    finally:
        watched.close()
    assert not foreign.exists()


def test_invalid_incidents_end_no_job(tmp_path: Path) -> None:
    """An incident with an invalid name or invalid settings is skipped, and the job continues."""
    watched = Supervisor(SuperviseRules(split=True), HangTimeouts(), "job", tmp_path / "here")
    try:
        environments = watched.begin([0], {})
        watched.started({0: os.getpid()})
        watched.failed([Worker(0, -9, 1.0)])
        (incident,) = incidents_in(tmp_path / "here")
        diary = tmp_path / "store" / "run" / "incidents"
        diary.mkdir(parents=True)
        for name, settings in (
            ("notes", {}),
            (f"{int(time.time() * 1000):013d}-ffffff", {SPLIT: "much", "LD_PRELOAD": "evil.so"}),
        ):
            data = msgspec.structs.replace(incident, id=name, settings=settings, action="smaller batch")
            (diary / f"{name}.json").write_bytes(msgspec.json.encode(data))
        HeartbeatPage(environments[0][SETTING]).write(
            Heartbeat(pid=1, phase="training", step=3, steps=3, url=str(tmp_path / "store"), run="run", agent=0)
        )
        assert watched.poll() == ""
        assert not watched.failed([Worker(0, -9, 1.0)]).settings, (
            "settings from a store are not set in the environment of ranks"
        )
        memory = Worker(0, 1, 1.0, "torch.OutOfMemoryError: CUDA out of memory")
        assert watched.failed([memory]).action == "smaller batch"
    finally:
        watched.close()


def test_a_node_that_meets_no_other_learns_that_the_job_was_stopped(tmp_path: Path) -> None:
    """A node learns of a stop from an incident that another node of its group has written since it began.

    An older stop, another group's stop and a decision to continue do not count.
    """
    now = [1000.0]
    store = open_bytes(tmp_path / "store")

    def begun(group: str) -> Supervisor:
        supervisor = Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path / group, lambda: now[0], group=group)
        supervisor.begin([0], {})
        supervisor.started({0: os.getpid()})
        supervisor._book.at(store, "run")
        return supervisor

    first, second, other = begun("a"), begun("a"), begun("b")
    try:
        fenced = Worker(
            0, 1, 1.0, error="relight.errors.Fenced: gone", tail=("relight.errors.Fenced: another attempt",)
        )
        other.failed([fenced])
        first.failed([Worker(0, -9, 1.0)])
        assert second.ended_elsewhere() == ""
        assert first.failed([fenced]).action == "stop"
        assert second.ended_elsewhere() == "", "the store is not read again so soon"
        now[0] += 6.0
        assert second.ended_elsewhere() == first.decision.reason  # type: ignore[union-attr]
        now[0] += 6.0
        time.sleep(0.01)
        second._began = now[0]
        assert second.ended_elsewhere() == "", "an incarnation that began after the stop ignores it"
    finally:
        for supervisor in (first, second, other):
            supervisor.close()


def test_each_node_knows_what_ended_an_incarnation(tmp_path: Path) -> None:
    """One node fails, another loses its connection, a third sees the membership change.

    The account of each has the failure once, with its kind.
    """
    store = open_bytes(tmp_path / "store")
    nodes = [
        Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path / str(number), group=group)
        for number, group in enumerate("aaab")
    ]
    died, lost, left, other = nodes
    gone = Worker(
        0, 1, error="RuntimeError: Connection closed by peer", tail=("RuntimeError: Connection closed by peer",)
    )

    def failures(node: Supervisor) -> dict[str, int]:
        node._keep_account()
        (kept,) = [
            Account(**msgspec.json.decode(path.read_bytes()))
            for path in (tmp_path / "store" / "run" / DIRECTORY).glob(f"{node._book._number}*")
        ]
        return kept.failures

    try:
        for node in nodes:
            node._known = True
            node._book.at(store, "run")
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


def test_a_job_that_was_taken_over_is_not_started_again_whatever_it_failed_of(tmp_path: Path) -> None:
    """If another job has taken over the run, the job stops, whatever its rank failed of.

    A job that never held the run resumes.
    """
    store = open_bytes(tmp_path / "store")

    def life(watched: Supervisor, number: int) -> Decision:
        environments = watched.begin([0], {})
        watched.started({0: os.getpid() if number else 1})
        HeartbeatPage(environments[0][SETTING]).write(
            Heartbeat(
                pid=1, phase="training", step=10 * number + 3, steps=number + 1, url=str(tmp_path / "store"), run="run"
            )
        )
        watched.poll()
        return watched.failed([Worker(0, -9, 1.0)])

    mine, other = (Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path / name) for name in ("mine", "other"))
    try:
        Attempt.begin(store, "run")  # by this process, which is rank 0 of the second incarnation
        assert life(mine, 0).action == "resume" and life(mine, 1).action == "resume"
        script = "import sys; from relight.store import open_bytes; from relight.commit import Attempt; Attempt.begin(open_bytes(sys.argv[1]), 'run')"
        subprocess.run([sys.executable, "-c", script, str(tmp_path / "store")], check=True)
        decision = life(mine, 2)
        assert decision.action == "stop" and "taken this run over" in decision.reason and "SIGKILL" in decision.reason
        assert life(other, 0).action == "resume"
        (tmp_path / "store" / "relight.json").rename(tmp_path / "away")
        assert life(mine, 3).action != "end"
    finally:
        mine.close()
        other.close()


def test_a_log_that_cannot_be_read_in_time_delays_no_job() -> None:
    """If the log cannot be read, or not in time, the job continues as if it had not been checked."""

    class Slow(MemoryStore):
        def get(self, key: str, limit: int) -> bytes:
            time.sleep(5)
            return super().get(key, limit)

    began = time.monotonic()
    assert not taken_over(Slow(), "run", {"a:1"}, 0.2) and time.monotonic() - began < 3
    assert not taken_over(MemoryStore(), "run", {"a:1"})


NAN = Worker(0, 1, 1.0, error="relight.errors.Diverged: the loss is nan at step 40")


def restored(watched: Supervisor, step: int, *, trains: bool = True) -> None:
    """Begin an incarnation. If it ``trains``, it restores and completes steps."""
    environments = watched.begin([0], {})
    watched.started({0: os.getpid()})
    if trains:
        HeartbeatPage(environments[0][SETTING]).write(
            Heartbeat(pid=1, phase="training", step=step, steps=5, restored=step - 5, first_at=2.0)
        )
        watched.poll()


def test_no_incarnation_rolls_back_twice(tmp_path: Path) -> None:
    """An incarnation rolled back and trained; then nodes joined.

    The incarnations after it get no setting to roll back again, whether they restore or not.
    """
    watched = Supervisor(SuperviseRules(split=True), HangTimeouts(), "job", tmp_path)
    try:
        restored(watched, 40)
        watched.failed([Worker(0, 1, 1.0, error="torch.OutOfMemoryError: CUDA out of memory")])
        restored(watched, 40)
        assert watched.failed([NAN]).action == "roll back"
        assert watched.decision is not None and {BEFORE, SPLIT} <= watched.decision.settings.keys()
        restored(watched, 0, trains=False)
        watched.end_for_membership_change()
        assert BEFORE in watched.decision.settings, "no incarnation has restored yet"
        restored(watched, 50_000)
        watched.end_for_membership_change()
        assert watched.decision.settings == {SPLIT: "2"}
        restored(watched, 0, trains=False)
        assert watched.failed([Worker(0, -9, 1.0)]).settings == {SPLIT: "2"}
    finally:
        watched.close()


def test_the_next_job_does_not_go_back_either(tmp_path: Path) -> None:
    """A rollback after which an incarnation restored is over. Without a recovery record it may not have been done."""
    failure = Failure("numerical", "why", 0, 40, 41, "words")
    settings = {BEFORE: "10", SPLIT: "2"}
    incident = incident_of(
        FailureEvidence(()), failure, Decision("roll back", "so", 0.0, settings), job="job", host="a", life=1
    )
    assert incident.past("a")[1].settings == settings
    done = msgspec.structs.replace(incident, after=RecoveryRecord(incident.id, 9, 31, {}))
    assert done.past("a")[1].settings == {SPLIT: "2"}


def test_asked_to_end_between_two_incarnations(tmp_path: Path) -> None:
    """The incarnation before is over and accounted for: no step of it was repeated."""
    now = [1000.0]
    store = open_bytes(tmp_path / "store")
    watched = Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path / "here", lambda: now[0], group="a")
    try:
        watched._known = True
        watched._book.at(store, "run")
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


def test_the_cause_of_an_end_is_read_again_if_the_store_did_not_answer(tmp_path: Path) -> None:
    """The cause of an end is read again if the store did not answer, or if only nodes that lost a connection have
    written: the failed node may be late."""

    class Absent(LocalStore):
        away = False

        def list(self, prefix: str) -> list[Entry]:
            if self.away:
                raise StoreUnavailable("it does not answer")
            return super().list(prefix)

    store = Absent(tmp_path / "store")
    died, lost = nodes = [
        Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path / name, group="a") for name in ("died", "lost")
    ]
    gone = Worker(
        0, 1, error="RuntimeError: Connection closed by peer", tail=("RuntimeError: Connection closed by peer",)
    )

    def causes(learns: bool = True) -> list[str]:
        if learns:
            lost._endings.learn(lost._goodput, lost._book)
        return lost._goodput._causes

    try:
        for node in nodes:
            node._known = True
            node._book.at(store, "run")
            node.begin([0], {})
            node.started({0: os.getpid()})
        time.sleep(0.01)
        lost.failed([gone])
        assert causes() == ["", "network"], "no other node has written yet"
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
        assert not lost._endings._cause_pending
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
        Supervisor(SuperviseRules(), HangTimeouts(), "job", tmp_path / name, group="a") for name in ("died", "left")
    ]
    try:
        for life in range(3):
            for node in nodes:
                node._known = True
                node._book.at(store, "run")
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
        left._endings.learn(left._goodput, left._book)
        assert left._goodput._causes == ["", "", "killed", ""]
    finally:
        for node in nodes:
            node.close()


def test_a_stop_of_the_job_before_is_not_one_of_this(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop of the previous job has a time in the future, because its clock was ahead.

    It does not count. A stop of this job counts, although its clock is late.
    """
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
        environments = mine.begin([0], {})
        mine.started({0: os.getpid()})
        HeartbeatPage(environments[0][SETTING]).write(
            Heartbeat(pid=1, phase="training", step=3, steps=3, url=str(tmp_path / "store"), run="run")
        )
        mine.poll()
        mine._checked_elsewhere = 0.0
        assert mine.ended_elsewhere() == ""
        reason = stops(-60.0)
        mine._checked_elsewhere = 0.0
        assert mine.ended_elsewhere() == reason
    finally:
        mine.close()


def test_only_directories_of_own_supervisors_are_removed(tmp_path: Path) -> None:
    """A sweep removes the directory of a killed supervisor, and no store, link or foreign directory of a similar
    name."""
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
    for name, mode, marked in (
        ("relight-run-4194303-openopen", 0o755, True),
        ("relight-run-4194303-unmarked", 0o700, False),
    ):
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
def test_a_directory_of_another_user_is_neither_removed_nor_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's directory counts as no supervisor's, dead or alive."""
    monkeypatch.setattr("relight.supervise.own_memory.MEMORY", str(tmp_path))
    for pid in (4194303, os.getpid()):
        folder = tmp_path / f"relight-run-{pid}-othersdi"
        folder.mkdir(0o700)
        (folder / MARKER).touch()
        os.chown(folder, 65534, 65534)
    assert sweep_memory(tmp_path) == [] and os.getpid() not in directories()


def test_a_page_that_is_not_a_regular_file_has_no_heartbeat(tmp_path: Path) -> None:
    """A heartbeat page that is a pipe or a device is not read, because it might have no end."""
    os.mkfifo(tmp_path / "heartbeat-0")
    (tmp_path / "heartbeat-1").symlink_to("/dev/zero")
    assert read_beat(tmp_path / "heartbeat-0") is None and read_beat(tmp_path / "heartbeat-1") is None
