"""Alerts about a run's incidents: given up, a node excluded, rolled back, broken hardware; and the last decision."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
from watched import RUN, make_run, stamp

from relight.cli import cli
from relight.format.records import FenceBody, NoteBody
from relight.format.topics import ROLLED_BACK, RollbackNote
from relight.log import Log
from relight.monitoring import Watcher
from relight.monitoring.rules import judge, usual_rules
from relight.run_records.incident_sync import DIRECTORY
from relight.store import open_bytes
from relight.supervise.decide import ACTIONS, FENCED
from relight.supervise.incidents import Incident

NOW = float(int(time.time()))
WATCHED = ("job_given_up", "node_excluded", "rolled_back", "hardware_failure")


def incident(ago_s: float, kind: str, action: str, host: str = "n7") -> Incident:
    """One that was written so many seconds ago."""
    return Incident(
        f"{int((NOW - ago_s) * 1000):013d}-abcdef", "", host, "train.py", 1, kind, f"{kind} failed", 0, 40, 40, "", action, f"why {action}",
        0.0, {}, [], [],
    )  # fmt: skip


def fired(folder: Path) -> dict[str, str]:
    """Return the firing rules about decisions, with their reasons."""
    rules = [rule._replace(for_s=0.0) for rule in usual_rules()]
    alerts = judge(rules, Watcher([str(folder)]).poll(NOW), NOW, {}).state.values()
    return {alert.kind: alert.reason for alert in alerts if alert.kind in WATCHED}


def write(folder: Path, *incidents: Incident) -> None:
    """Write incidents to the run, as supervisors do."""
    store = open_bytes(folder)
    for record in incidents:
        store.put_once(f"{RUN}/{DIRECTORY}/{record.id}.json", msgspec.json.encode(record))


def append(folder: Path, body: FenceBody | NoteBody, ago_s: float, epoch: int = 1) -> None:
    """Append a record to the run's log with a time of so many seconds ago."""
    log = Log(open_bytes(folder), RUN, now=lambda: stamp(NOW - ago_s))
    log.start()
    log.append(lambda view: (body, epoch))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Make a run with a checkpoint and a job that began three hours ago."""
    make_run(tmp_path, 1, began=int(NOW) - 10800)
    return tmp_path


def test_a_job_that_was_given_up_is_an_alert_until_it_begins_again(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``alerts check`` fails with the reason once ``relight run`` has stopped. A new attempt ends the alert."""
    write(run, incident(7200, "crash", "resume"))
    assert fired(run) == {}
    write(run, incident(3600, "crash", "stop"))
    assert fired(run) == {
        "job_given_up": "relight run stopped the job 1 h ago, and no attempt has begun since: why stop"
    }
    # by the whole command: a group called by itself would keep its help option without -h
    assert (
        cli.main(["metrics", "alerts", "check", str(run)], standalone_mode=False) == 1
        and "job_given_up" in capsys.readouterr().out
    )
    append(run, FenceBody(attempt="second", reason="resumed"), 60, epoch=2)
    assert fired(run) == {}


def test_a_job_that_another_has_taken_over_was_not_given_up(run: Path) -> None:
    """A superseded supervisor stops, and the run continues in another job. An old stop is no alert."""
    write(
        run,
        incident(3600, "fenced", "stop"),
        msgspec.structs.replace(incident(3500, "network", "stop"), reason=f"{FENCED}, since"),
    )
    assert fired(run) == {}
    old = run.with_name("old")
    make_run(old, 1, began=int(NOW) - 2_000_000)
    write(old, incident(8 * 86400, "crash", "stop"))
    assert fired(old) == {}


def test_nodes_that_leave_hardware_and_roll_backs_are_alerts_for_a_day(run: Path) -> None:
    """Each alert has the node or the reason. Incidents older than a day raise none."""
    write(run, incident(90000, "hardware", "exclude_node", "n1"), incident(89000, "numerical", "roll back"))
    append(run, ROLLED_BACK.note(RollbackNote(before=41)), 89000)
    assert fired(run) == {}
    write(
        run,
        incident(7000, "hardware", "resume"),
        incident(6000, "hardware", "exclude_node"),
        incident(500, "numerical", "roll back"),
    )
    assert fired(run) == {
        "node_excluded": "1 node has left the job within a day; the last: n7: why exclude_node",
        "hardware_failure": "2 hardware failures within a day; the last: n7: hardware failed",
        "rolled_back": "the run was rolled back once within a day: why roll back",
    }


def test_a_run_that_went_back_without_a_supervisor_is_an_alert(run: Path) -> None:
    """The run's log has the roll-back, with or without ``relight run``."""
    append(run, ROLLED_BACK.note(RollbackNote(before=41)), 500)
    assert fired(run) == {"rolled_back": "the run was rolled back once within a day"}


def test_the_last_decision_is_a_metric(run: Path) -> None:
    """The metric of the last action is 1, those of other actions are 0. Without an incident there is none."""
    (seen,) = Watcher([str(run)]).poll(NOW)
    assert not [sample for sample in seen.samples if sample.metric.name.startswith("relight_last_decision")]
    write(run, incident(7000, "killed", "resume"), incident(60, "user", "stop"))
    (seen,) = Watcher([str(run)]).poll(NOW)
    values = {sample.labels: sample.value for sample in seen.samples if sample.metric.name == "relight_last_decision"}
    assert values == {(action,): float(action == "stop") for action in ACTIONS}
    (decided_at,) = [
        sample.value for sample in seen.samples if sample.metric.name == "relight_last_decision_time_seconds"
    ]
    assert decided_at == pytest.approx(NOW - 60, abs=0.01)
