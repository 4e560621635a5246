"""Runs seen from outside: what logs and events amount to, read once and in bounds, whatever the directory has."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from watched import RUN, add_commits, commit, id_of, keep_events, make_run, stamp, values

from relight import monitoring
from relight.errors import StoreUnavailable
from relight.format.records import FenceBody
from relight.format.topics import COPIED, TIER_PACE, TIERS, CopiedNote
from relight.log import Log, fold
from relight.monitoring import RunSeen, Watcher
from relight.monitoring.event_metrics import LABEL_VALUES_MAX
from relight.monitoring.files import EventFiles
from relight.monitoring.loop import AlertLoop
from relight.monitoring.overview import MADE_HERE, OVER_S, recoveries_of
from relight.monitoring.rules import judge, usual_rules
from relight.observe import subscribe
from relight.observe.file import LINE_BYTES_MAX
from relight.observe.metrics import GAUGE, METRICS
from relight.policy.tiers import Tier, encode_tiers
from relight.run_records.verification import checked, record_checked, still_damaged
from relight.store.local import LocalStore
from relight.store.mirror_drives import DriveStatus
from relight.store.mirrored import MirroredStore
from relight.supervise.goodput import Account
from relight.supervise.incidents import Incident, IncidentLog, RecoveryRecord

BEGAN = 1_700_000_000


def test_a_run_is_what_its_log_has(tmp_path: Path) -> None:
    """The log gives the newest checkpoint, its age and sizes, the attempts, and their metrics."""
    url = make_run(tmp_path / "runs", 3)
    (seen,) = Watcher([url], events=tmp_path / "events").poll(BEGAN + 200.0)
    assert (seen.run, seen.checkpoints, seen.step, seen.id, seen.age_s) == (RUN, 3, 300, id_of(2), 80.0)
    assert (seen.good_step, seen.good_age_s, seen.attempts, seen.active) == (300, 80.0, 1, True)
    metrics = values(seen)
    assert metrics["relight_checkpoint_step"] == 300
    assert metrics["relight_checkpoint_good_age_seconds"] == 80
    assert metrics["relight_checkpoint_saved_ratio"] == 4.0
    assert metrics["relight_tier_used_bytes{here}"] == 3000


@pytest.mark.parametrize(("lag_s", "late_s"), [(None, 600.0), (300, 300.0), (3600, 0.0)])
def test_a_tier_is_late_only_after_its_lag(lag_s: int | None, late_s: float, tmp_path: Path) -> None:
    """Scheduled saves that ``lag=`` holds back are not missing yet. A requested save is due at once."""
    url = make_run(tmp_path / "runs", 1)
    log = Log(LocalStore(url), RUN, now=lambda: stamp(BEGAN))
    tiers = [Tier(f"{url}/{RUN}", name="here"), Tier(f"{tmp_path}/far/{RUN}", name="cold")]
    notes = [TIERS.note(encode_tiers(tiers)), COPIED.note(CopiedNote(tier="cold", id=id_of(0)))]
    for note in [*notes, *([TIER_PACE.note({"cold": lag_s})] if lag_s else [])]:
        log.append(lambda view, note=note: (note, 1))
    log.append(lambda view: (replace(commit(1), reason_kind="every"), 1))
    (seen,) = Watcher([url], events=tmp_path / "events").poll(BEGAN + 600.0)
    assert (seen.tiers[1].name, seen.tiers[1].lag) == ("cold", 1)
    assert seen.tiers[1].lag_s == pytest.approx(late_s, abs=1.0)
    log.append(lambda view: (replace(commit(2), reason="asked", reason_kind="user"), 1))
    (seen,) = Watcher([url], events=tmp_path / "events").poll(BEGAN + 600.0)
    assert seen.tiers[1].lag_s == pytest.approx(600.0, abs=1.0)


def test_what_is_suspect_or_known_to_be_damaged_is_not_good(tmp_path: Path) -> None:
    """The newest good checkpoint is the newest without a known fault. The faults of the others are given."""
    url = make_run(tmp_path / "runs", 4, suspect=(3,))
    keep_events(
        tmp_path / "events",
        url,
        {"event": "restore.skipped", "id": id_of(2), "kind": "corrupt", "message": "a flipped bit"},
    )
    (seen,) = Watcher([url], events=tmp_path / "events").poll(BEGAN + 200.0)
    assert (seen.step, seen.good_step, seen.damaged) == (400, 200, 2)
    assert dict(seen.bad)[id_of(2)] == "a flipped bit"
    assert values(seen)["relight_restores_skipped_total{corrupt}"] == 1


def test_without_a_good_checkpoint_its_age_is_that_of_the_attempt(tmp_path: Path) -> None:
    """A run that has saved nothing is unprotected since it began."""
    url = make_run(tmp_path / "runs", 0)
    (seen,) = Watcher([url], events=tmp_path / "events").poll(BEGAN + 50.0)
    assert (seen.step, seen.good_age_s, seen.unprotected_s) == (None, None, 50.0)
    assert values(seen)["relight_checkpoint_good_age_seconds"] == 50.0


def test_a_second_poll_reads_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records and incidents are read once each, events from where the last poll ended."""
    url = make_run(tmp_path / "runs", 50)
    book = IncidentLog(tmp_path / "book")
    book.at(LocalStore(url), RUN)
    book.keep(Account("job", "t", 100.0, {"training": 90.0}, {}, {"killed": 2}, 10, 1))
    events = tmp_path / "events"
    keep_events(events, url, *[{"event": "save.failed", "step": 1, "kind": "x"}] * 20)
    watcher = Watcher([url], events=events)
    watcher.poll(BEGAN + 9999.0)
    reads: list[str] = []
    get = LocalStore.get
    monkeypatch.setattr(LocalStore, "get", lambda self, key, *rest: (reads.append(key), get(self, key, *rest))[1])
    (seen,) = watcher.poll(BEGAN + 9999.0)
    assert [key for key in reads if "/log/" in key or "/incidents/" in key] == []
    assert seen.goodput == 0.9 and seen.checkpoints == 50
    add_commits(url, range(50, 52))
    reads.clear()
    keep_events(
        events, url, {"event": "save.durable", "step": 9, "id": "z", "seconds": 1.0, "blocked_s": 0.1, "bytes": 5}
    )
    (seen,) = watcher.poll(BEGAN + 9999.0)
    assert seen.checkpoints == 52 and seen.saving.saves == 1
    assert len([key for key in reads if f"{RUN}/log/" in key]) <= 3


def test_polls_remember_between_calls(tmp_path: Path) -> None:
    """The function does what a Watcher does, and keeps it."""
    url = make_run(tmp_path / "runs", 1)
    assert monitoring.poll_runs([url], BEGAN + 1.0)[0].step == 100
    add_commits(url, range(1, 2))
    assert monitoring.poll_runs([url], BEGAN + 100.0)[0].step == 200


def test_a_store_that_is_not_there_hides_no_other(tmp_path: Path) -> None:
    """A missing store has an error and the others are unchanged. A store that goes away keeps what was seen of it."""
    url = make_run(tmp_path / "runs", 2)
    watcher = Watcher([url, str(tmp_path / "none")], events=tmp_path / "events")
    nowhere, seen = sorted(watcher.poll(BEGAN + 100.0), key=lambda one: one.run)
    assert nowhere.error and not nowhere.run and seen.step == 200 and not seen.error
    os.rename(url, tmp_path / "elsewhere")
    gone = [run for run in watcher.poll(BEGAN + 100.0) if run.run][0]
    assert gone.error and gone.step == 200 and values(gone)["relight_store_up"] == 0


def test_a_run_that_reported_its_end_or_is_silent_for_a_day_is_over(tmp_path: Path) -> None:
    """Such a run is not active. A run that starts again is."""
    url = make_run(tmp_path / "runs", 1)
    events = tmp_path / "events"
    watcher = Watcher([url], events=events)
    assert watcher.poll(BEGAN + OVER_S - 1)[0].active
    assert not watcher.poll(BEGAN + OVER_S + 1)[0].active
    keep_events(events, url, {"event": "attempt.ended", "time": BEGAN + 5.0})
    assert not watcher.poll(BEGAN + 10)[0].active
    keep_events(events, url, {"event": "attempt.started", "time": BEGAN + 6.0})
    assert watcher.poll(BEGAN + 10)[0].active


def test_an_end_here_hides_no_later_attempt_on_another_machine(tmp_path: Path) -> None:
    """The run ended normally here, and trains on another machine now: only the log shows that. Its alerts fire."""
    url = make_run(tmp_path / "runs", 1)
    keep_events(tmp_path / "events", url, {"event": "attempt.ended", "time": BEGAN + 5.0})
    watcher = Watcher([url], events=tmp_path / "events")
    assert not watcher.poll(BEGAN + 10)[0].active
    log = Log(LocalStore(url), RUN, now=lambda: stamp(BEGAN + 6))
    log.append(lambda view: (FenceBody(attempt="second", reason="resumed"), 2))
    seen = watcher.poll(BEGAN + 7000)
    assert seen[0].active
    firing = judge(usual_rules(), seen, BEGAN + 7000, {}).changes
    assert [alert.kind for alert in firing] == ["no_good_checkpoint"]


def test_a_checkpoint_from_another_machine_ends_a_row_of_failed_saves(tmp_path: Path) -> None:
    """Saves failed here, and the job saves on another machine now: only the log shows that."""
    url = make_run(tmp_path / "runs", 1)
    failed = [{"event": "save.failed", "step": 200 + number, "time": BEGAN + 10.0 + number} for number in range(3)]
    keep_events(tmp_path / "events", url, *failed)
    watcher = Watcher([url], events=tmp_path / "events")
    assert watcher.poll(BEGAN + 20)[0].saving.failed_in_a_row == 3
    add_commits(url, range(1, 2))
    assert watcher.poll(BEGAN + 70)[0].saving.failed_in_a_row == 0


def test_a_run_that_saved_its_end_is_over(tmp_path: Path) -> None:
    """A watcher that sees only the store knows such an end, until another attempt begins: no alert reports that the run no longer saves."""
    url = make_run(tmp_path / "runs", 1)
    watcher, log = Watcher([url], events=tmp_path / "events"), Log(LocalStore(url), RUN, now=lambda: stamp(BEGAN + 5))
    assert watcher.poll(BEGAN + 10)[0].active
    log.append(lambda view: (replace(commit(1), reason="end", reason_kind="end"), 1))
    assert not watcher.poll(BEGAN + 10)[0].active
    log.append(lambda view: (FenceBody(attempt="second", reason="resumed"), 2))
    assert watcher.poll(BEGAN + 10)[0].active


def test_every_metric_has_a_source(tmp_path: Path) -> None:
    """Every defined metric is produced: by a poll, or by the event that it counts."""
    url = make_run(tmp_path / "runs", 2)
    book = IncidentLog(tmp_path / "book")
    book.at(LocalStore(url), RUN)
    book.keep(Account("job", "t", 100.0, {"training": 90.0}, {"killed": {"again": 4.0}}, {"killed": 2}, 10, 1))
    failed = Incident(
        "0000000000001-aaaaaa", "t", "host", "job", 1, "killed", "why", 0, 1, 1, "", "restart", "reason", 0.0, {}, [], [],
    )  # fmt: skip
    book.write(failed)
    book.write(RecoveryRecord(failed.id, 1, 0, {}))
    incident = Incident("1700000000000-a", "", "h", "job", 1, "killed", "", 0, 1, 1, "", "resume", "", 0.0, {}, [], [])
    book.write(incident)
    made = []
    for metric in METRICS:
        if metric.made is not None:
            texts = (*metric.made.once, *(metric.field_of(label) for label in metric.labels))
            fields: dict[str, Any] = dict.fromkeys(texts, "x")
            fields |= {metric.made.field: 2.0} if metric.made.field else {}
            fields |= {metric.made.less: 1.0} if metric.made.less else {}
            made.append({"event": metric.made.event, **fields})
    keep_events(tmp_path / "events", url, *made)
    (seen,) = Watcher([url], events=tmp_path / "events").poll(BEGAN + 100.0)
    mirrored = "relight_mirror_drives_degraded"  # of mirrored stores only: tests/store/test_mirrored_training.py
    assert {sample.metric.name for sample in seen.samples} | {mirrored} == {metric.name for metric in METRICS}
    assert {metric.name for metric in METRICS if metric.kind == GAUGE} <= MADE_HERE


def test_recovery_success_counts_failures_after_which_training_continued() -> None:
    """Recovered, failed again, stopped and left are separate outcomes.

    A requested end is not a failure, and the newest incident may still be open.
    """

    def incident(number: int, action: str, after: bool = False) -> Incident:
        name = f"{number:013d}-aaaaaa"
        return Incident(
            name, "t", "host", "job", number, "killed", "why", 0, 1, 1, "", action, "reason", 0.0, {}, [], [],
            after=RecoveryRecord(name, 1, 0, {}) if after else None,
        )  # fmt: skip

    incidents = [
        incident(1, "restart", True), incident(2, "restart"), incident(3, "exclude_node"), incident(4, "end"), incident(5, "restart", True),
        incident(6, "stop"), incident(7, "restart"),
    ]  # fmt: skip
    assert recoveries_of(incidents) == {"recovered": 2, "failed again": 1, "stopped": 1, "left": 1}
    assert recoveries_of([]) == {"recovered": 0, "failed again": 0, "stopped": 0, "left": 0}


def test_what_all_ranks_report_counts_once(tmp_path: Path) -> None:
    """A checkpoint of four ranks is one save. Each rank's wait is counted, so there are four."""
    url = make_run(tmp_path / "runs", 1)
    for rank in range(4):
        saved = {"event": "save.durable", "step": 1, "id": "a", "seconds": 2.0, "blocked_s": 0.5, "bytes": 10}
        keep_events(tmp_path / "events", url, saved, name=f"{rank}", rank=rank)
    (seen,) = Watcher([url], events=tmp_path / "events").poll(BEGAN + 100.0)
    metrics = values(seen)
    assert (metrics["relight_saves_total"], metrics["relight_saved_bytes_total"]) == (1, 10)
    assert metrics["relight_save_blocked_seconds"] == 2.0
    assert (
        sum(next(sample for sample in seen.samples if sample.metric.name == "relight_save_blocked_seconds").counts) == 4
    )
    assert (seen.saving.saves, seen.saving.last_s, seen.saving.blocked_s) == (1, 2.0, 0.5)


def test_values_of_a_label_have_an_end(tmp_path: Path) -> None:
    """Beyond so many they are one."""
    url = make_run(tmp_path / "runs", 1)
    keep_events(tmp_path / "events", url, *({"event": "save.failed", "kind": f"k{number}"} for number in range(200)))
    (seen,) = Watcher([url], events=tmp_path / "events").poll(BEGAN + 100.0)
    kinds = {
        sample.labels: sample.value for sample in seen.samples if sample.metric.name == "relight_saves_failed_total"
    }
    assert len(kinds) == LABEL_VALUES_MAX + 1
    assert kinds[("other",)] == 200 - LABEL_VALUES_MAX


def test_invalid_lines_are_skipped(tmp_path: Path) -> None:
    """Half lines, invalid JSON, other JSON and invalid numbers raise nothing. Good lines around them count, half a line
    waits."""
    url = make_run(tmp_path / "runs", 1)
    good = {"event": "save.failed", "kind": "x"}
    path = keep_events(tmp_path / "events", url, good)
    bad = [
        b"{", b"[]", b"1", b'"x"', b"null", b"\xff\xfe", b"{}", b'{"event": 1}', b'{"event": "save.durable", "time": "x"}', b"[" * 5000,
        b'{"relight": "events"}', b'{"relight": "events", "store": 1, "run": {}, "rank": "x"}', b"x" * (3 * LINE_BYTES_MAX),
        b'{"event": "save.durable", "time": 1, "bytes": NaN, "seconds": -1e999, "blocked_s": "a", "id": {}, "step": []}',
        b'{"event": "save.span", "time": 1, "start": 5, "end": 1, "span": "x"}',
    ]  # fmt: skip
    with path.open("ab") as file:
        file.write(b"\n".join(bad) + b"\n")
        file.write(json.dumps({"time": 2.0, **good}).encode() + b"\n" + b'{"event": "save.failed", ')
    watcher = Watcher([url], events=tmp_path / "events")
    assert values(watcher.poll(BEGAN + 1.0)[0])["relight_saves_failed_total{x}"] == 2
    with path.open("ab") as file:
        file.write(b'"time": 3, "kind": "x"}\n')
    assert values(watcher.poll(BEGAN + 1.0)[0])["relight_saves_failed_total{x}"] == 3


def test_random_bytes_do_not_stop_a_read(tmp_path: Path) -> None:
    """Each of two hundred mutations of a file of events is read to its end."""
    url = make_run(tmp_path / "runs", 1)
    path = keep_events(
        tmp_path / "events", url, *[{"event": "save.span", "span": "write", "id": "a", "start": 1.0, "end": 2.0}] * 5
    )
    whole, chance = path.read_bytes(), random.Random(5)
    for _ in range(200):
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 8)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(data)
        list(EventFiles(tmp_path / "events").new())
    assert len(list(EventFiles(tmp_path / "events").new())) <= 5


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """A pipe, a directory or a link in the directory of events are skipped."""
    events = tmp_path / "events"
    events.mkdir(mode=0o700)
    os.mkfifo(events / "a.jsonl")
    (events / "b.jsonl").mkdir()
    (events / "c.jsonl").symlink_to("/dev/zero")
    assert list(EventFiles(events).new()) == []


def test_each_log_is_read_once_a_poll(tmp_path: Path) -> None:
    """A poll reads a run's log once, however much is computed from it."""
    for number in range(8):
        make_run(tmp_path / "runs", 1, run=f"run{number:02d}")
    watcher = Watcher([str(tmp_path / "runs")], events=tmp_path / "events")
    assert len(watcher.poll(BEGAN)) == 8
    log = Log.read
    calls = []
    Log.read = lambda self: (calls.append(1), log(self))[1]
    try:
        watcher.poll(BEGAN)
    finally:
        Log.read = log
    assert len(calls) == 8


def test_an_incident_that_could_not_be_read_once_is_read_at_the_next_poll(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that fails is no result: the next poll has the incident, and then reads it no more."""
    url = make_run(tmp_path / "runs", 2)
    book = IncidentLog(tmp_path / "book")
    book.at(LocalStore(url), RUN)
    book.write(Incident("1700000000000-a", "", "h", "job", 1, "killed", "", 0, 1, 1, "", "resume", "", 0.0, {}, [], []))
    read, tries = LocalStore.get, list[str]()

    def get(store: LocalStore, key: str, limit: int | None = None) -> bytes:
        if key.endswith("1700000000000-a.json"):
            tries.append(key)
            if len(tries) == 1:
                raise StoreUnavailable("no answer", where=key)
        return read(store, key, limit)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalStore, "get", get)
    watcher = Watcher([url], events=tmp_path / "events")
    incidents = [len(watcher.poll(BEGAN + 200.0 + number)[0].incidents) for number in range(3)]
    assert incidents == [0, 1, 1] and len(tries) == 2


def test_a_mirrored_store_that_does_not_answer_has_unknown_drives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of the drives cannot be read: the poll has the run nevertheless."""
    url = f"stripe:mirrors=2,{tmp_path}/n0,{tmp_path}/n1,/runs"
    make_run(url, 1)  # type: ignore[arg-type]

    def fails(store: MirroredStore) -> list[DriveStatus]:
        raise StoreUnavailable("no answer", where=url)

    monkeypatch.setattr(MirroredStore, "statuses", fails)
    (seen,) = Watcher([url], events=tmp_path / "events").poll(BEGAN + 200.0)
    assert (seen.step, seen.drives) == (100, None)


def test_a_poll_that_fails_ends_no_later_poll(tmp_path: Path) -> None:
    """An unexpected error is reported once; the thread polls again."""
    url, events = make_run(tmp_path / "runs", 1), list[str]()

    class Failing(Watcher):
        polls = 0

        def poll(self, now: float) -> list[RunSeen]:
            self.polls += 1
            if self.polls < 4:
                raise ZeroDivisionError("a fault")
            return super().poll(now)

    undo = subscribe(lambda event: events.append(event.name))
    loop = AlertLoop(Failing([url], events=tmp_path / "events"), every_s=0.02, clock=lambda: BEGAN + 200.0)
    try:
        until = time.monotonic() + 20.0
        while not loop.seen and time.monotonic() < until:
            time.sleep(0.02)
        assert [seen.run for seen in loop.seen] == [RUN]
    finally:
        loop.stop()
        undo()
    assert events.count("alert.unsent") == 1


def test_damage_that_an_event_reported_ends_with_a_later_result(tmp_path: Path) -> None:
    """``verify --repair`` records the checkpoint as whole: the event from before counts no more. A later event counts."""
    url = make_run(tmp_path / "runs", 2)
    keep_events(tmp_path / "events", url, {"event": "restore.skipped", "id": id_of(1), "message": "a hash differs"})
    watcher = Watcher([url], events=tmp_path / "events")
    (seen,) = watcher.poll(BEGAN + 200.0)
    assert seen.damaged == 1 and seen.good_step == 100
    record_checked(LocalStore(url), RUN, {id_of(1): ""}, "relight verify --repair")
    (seen,) = watcher.poll(BEGAN + 215.0)
    assert seen.damaged == 0 and seen.good_step == 200
    history = fold(Log(LocalStore(url), RUN).read())
    assert still_damaged({id_of(1): ("a hash differs", time.time() + 60.0)}, checked(history)) == {
        id_of(1): "a hash differs"
    }
