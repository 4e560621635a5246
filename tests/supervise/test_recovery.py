"""The recovery from a failure, without processes: the tests write the heartbeat pages themselves."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from relight.commit import Attempt
from relight.heartbeat import SETTING, Heartbeat, HeartbeatPage
from relight.heartbeat.heartbeat_page import NOT_YET
from relight.policy.rollback_env import BEFORE, SPLIT
from relight.settings.supervise_settings import SuperviseRules, SuperviseSettings
from relight.store import open_bytes
from relight.store.memory import MemoryStore
from relight.supervise.facts import Decision, Failure, FailureEvidence, Worker
from relight.supervise.fencing_check import taken_over
from relight.supervise.incarnation import Incarnation, JobDetectors
from relight.supervise.incidents import (
    Incident,
    IncidentLog,
    RecoveryRecord,
    incident_of,
    incidents_in,
    once_each,
    read_incidents,
)
from relight.supervise.recovery import ELSEWHERE_EVERY_S, Recovery, recovery_record
from relight.supervise.shared_pages import SharedPages
from relight.supervise.supervisor import Supervisor


def stopped_elsewhere(node: Supervisor) -> str:
    """Return why another node has stopped the job, from this node's view."""
    return node.recovery.stopped_elsewhere(node.incarnation.began)


def test_steps_of_an_incarnation_that_ended_between_two_polls_count(tmp_path: Path) -> None:
    """The heartbeat pages have the steps of an incarnation that ended between two polls.

    The incident before it is closed with its cost, and the next one is open.
    """
    watched = Supervisor(SuperviseSettings(), "job", tmp_path)
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
    watched = Supervisor(SuperviseSettings(), "job", tmp_path / "here")
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


def test_invalid_incidents_end_no_job(tmp_path: Path) -> None:
    """An incident with an invalid name or invalid settings is skipped, and the job continues."""
    watched = Supervisor(SuperviseSettings(split=True), "job", tmp_path / "here")
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
        supervisor = Supervisor(SuperviseSettings(), "job", tmp_path / group, lambda: now[0], group=group)
        supervisor.begin([0], {})
        supervisor.started({0: os.getpid()})
        supervisor.recovery.log.at(store, "run")
        return supervisor

    first, second, other = begun("a"), begun("a"), begun("b")
    try:
        fenced = Worker(
            0, 1, 1.0, error="relight.errors.Fenced: gone", tail=("relight.errors.Fenced: another attempt",)
        )
        other.failed([fenced])
        first.failed([Worker(0, -9, 1.0)])
        assert stopped_elsewhere(second) == ""
        assert first.failed([fenced]).action == "stop"
        assert stopped_elsewhere(second) == "", "the store is not read again so soon"
        now[0] += 6.0
        assert stopped_elsewhere(second) == first.recovery.decision.reason  # type: ignore[union-attr]
        now[0] += 6.0
        time.sleep(0.01)
        second.begin([0], {})
        assert stopped_elsewhere(second) == "", "an incarnation that began after the stop ignores it"
    finally:
        for supervisor in (first, second, other):
            supervisor.close()


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

    mine, other = (Supervisor(SuperviseSettings(), "job", tmp_path / name) for name in ("mine", "other"))
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
    watched = Supervisor(SuperviseSettings(split=True), "job", tmp_path)
    try:
        restored(watched, 40)
        watched.failed([Worker(0, 1, 1.0, error="torch.OutOfMemoryError: CUDA out of memory")])
        restored(watched, 40)
        assert watched.failed([NAN]).action == "roll back"
        assert watched.recovery.decision is not None and {BEFORE, SPLIT} <= watched.recovery.decision.settings.keys()
        restored(watched, 0, trains=False)
        watched.end_for_membership_change()
        assert BEFORE in watched.recovery.decision.settings, "no incarnation has restored yet"
        restored(watched, 50_000)
        watched.end_for_membership_change()
        assert watched.recovery.decision.settings == {SPLIT: "2"}
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


def test_a_stop_of_the_job_before_is_not_one_of_this(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop of the previous job has a time in the future, because its clock was ahead.

    It does not count. A stop of this job counts, although its clock is late.
    """
    store = open_bytes(tmp_path / "store")
    fenced = Worker(0, 1, 1.0, error="relight.errors.Fenced: gone", tail=("relight.errors.Fenced: another attempt",))

    def stops(ahead_s: float) -> str:
        other = Supervisor(SuperviseSettings(), "job", tmp_path / "other", group="a")
        try:
            other.begin([0], {})
            other.recovery.log.at(store, "run")
            with monkeypatch.context() as patch:
                patch.setattr("relight.supervise.incidents.time", SimpleNamespace(time=lambda: time.time() + ahead_s))
                return other.failed([fenced]).reason
        finally:
            other.close()

    stops(60.0)
    now = [time.monotonic()]
    mine = Supervisor(SuperviseSettings(), "job", tmp_path / "mine", lambda: now[0], group="a")
    try:
        environments = mine.begin([0], {})
        mine.started({0: os.getpid()})
        HeartbeatPage(environments[0][SETTING]).write(
            Heartbeat(pid=1, phase="training", step=3, steps=3, url=str(tmp_path / "store"), run="run")
        )
        mine.poll()
        assert stopped_elsewhere(mine) == ""
        reason = stops(-60.0)
        now[0] += ELSEWHERE_EVERY_S
        assert stopped_elsewhere(mine) == reason
    finally:
        mine.close()


INCIDENT = incident_of(
    FailureEvidence(()),
    Failure("killed", "why", 0, 12, 8, "words"),
    Decision("resume", "so"),
    job="job",
    host="a",
    life=1,
)


def test_a_recovery_is_timed_stage_by_stage() -> None:
    """The stages add up to the time from the failure to the first step of the last rank."""
    marks = {"died": 10.0, "noticed": 11.0, "decided": 13.0, "waited": 17.0, "started": 18.0}
    beats = [
        Heartbeat(pid=1, restored=9, restored_at=30.0, restore_s=4.0, first_at=31.0),
        Heartbeat(pid=2, restored=9, restored_at=29.0, restore_s=1.0, first_at=33.0),
    ]
    record = recovery_record(INCIDENT, marks, beats)
    stages = {"noticed": 1, "decided": 2, "waited": 4, "started": 1, "began": 8, "restored": 4, "stepped": 3}
    assert record.seconds == {**stages, "all": 23} and sum(stages.values()) == 23
    assert (record.id, record.restored, record.steps_lost) == (INCIDENT.id, 9, 3)


@pytest.mark.parametrize(("restored_step", "lost"), [(NOT_YET, 0), (-1, 13), (12, 0), (20, 0)])
def test_steps_are_lost_only_if_a_checkpoint_was_restored(restored_step: int, lost: int) -> None:
    """A rank that has not restored took the state over. −1: it began from scratch."""
    beats = [Heartbeat(pid=1, restored=restored_step, first_at=20.0)]
    record = recovery_record(INCIDENT, {"died": 10.0, "noticed": 10.0, "decided": 10.0}, beats)
    assert record.steps_lost == lost and record.seconds["began"] == record.seconds["stepped"] == 0


def test_an_end_before_the_first_incarnation_is_not_recorded(tmp_path: Path) -> None:
    """A node that was never part of the job has nothing to record about it."""
    pages = SharedPages(tmp_path)
    recovery = Recovery(SuperviseRules(), "job", IncidentLog(tmp_path / "log"))
    try:
        for number, written in ((0, 0), (1, 1)):
            incarnation = Incarnation(pages, JobDetectors.starting(SuperviseSettings()), number=number, meeting="m")
            recovery.end_without_failure(incarnation, "exclude_node", "cut off")
            assert len(incidents_in(tmp_path / "log")) == written
        (incident,) = incidents_in(tmp_path / "log")
        assert (incident.action, incident.reason, incident.meeting) == ("exclude_node", "cut off", "m ended")
    finally:
        pages.close()


def test_each_failure_has_only_new_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OOM kills and drivers' lines that an earlier failure has counted are no evidence of a later one."""
    kills, lines = [3], [["xid 79"], []]
    monkeypatch.setattr("relight.supervise.recovery.oom_kills", lambda: kills[0])
    pages = SharedPages(tmp_path)
    try:
        recovery = Recovery(SuperviseRules(), "job", IncidentLog(tmp_path / "log"))
        recovery.devices = lambda: lines.pop(0)
        incarnation = Incarnation(pages, JobDetectors.starting(SuperviseSettings()), number=1)
        kills[0] = 5
        first = recovery.evidence(incarnation, [Worker(0, -9, 1.0)])
        second = recovery.evidence(incarnation, [Worker(0, -9, 1.0)])
        assert (first.oom_kills, second.oom_kills) == (2, 0)
        assert "xid 79" in first.kernel and "xid 79" not in second.kernel
    finally:
        pages.close()
