"""Coverage: a check that was not made is not counted, and is shown with its reason."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import at_hand
import msgspec
import pytest
from planted_faults import HEALTHY

from relight.doctor import collect, coverage, judge
from relight.doctor.bounded import QUICK
from relight.doctor.coverage import FIELDS
from relight.doctor.facts import Trouble
from relight.store import open_bytes
from relight.supervise.incidents import Incident, RecoveryRecord, once_each, recent_incidents

DOCTOR = Path(__file__).parents[2] / "src" / "relight" / "doctor"
WEEK_S = 7 * 86400.0


def incident(number: int, action: str = "restart", age_s: float = 60.0) -> Incident:
    """Return an incident that ``relight run`` recorded ``age_s`` seconds ago."""
    at_s = time.time() - age_s
    return Incident(
        id=f"{int(at_s * 1000):013d}-{number:06x}", at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_s)), host="node-1", job="job",
        life=number, kind="user", why="ValueError: no such file", rank=0, step=9, durable=9, words="", action=action, reason="same three times",
        delay_s=0.0, settings={}, clues=[], workers=[],
    )  # fmt: skip


def put(runs: Path, record: Incident | RecoveryRecord) -> None:
    """Store an incident's record as the supervisor does."""
    name = f"{record.id}.json" if isinstance(record, Incident) else f"{record.id}.after.json"
    open_bytes(str(runs)).put_once(f"demo/incidents/{name}", msgspec.json.encode(record))


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):  # noqa: ANN201
    """Return a function that calls ``relight doctor`` in this process."""
    return lambda *arguments: at_hand.in_process(monkeypatch, capfd, ["doctor", *map(str, arguments)])


def test_quick_reports_a_run_that_was_given_up(ask: Any, tmp_path: Path) -> None:
    """``--quick`` reads incidents: a job that was given up is a warning, and the exit code is 1."""
    at_hand.fill(tmp_path / "runs")
    put(tmp_path / "runs", incident(1, "stop", age_s=-5.0))
    answer = ask(tmp_path / "runs" / "demo", "--quick")
    assert answer.code == 1 and "relight run gave up the job" in answer.out and "nothing wrong" not in answer.out


def test_quick_counts_only_what_it_checked(ask: Any, tmp_path: Path) -> None:
    """Checks that ``--quick`` skips are named and not counted."""
    at_hand.fill(tmp_path / "runs")
    quick, full = ask(tmp_path / "runs", "--quick", "--json").json, ask(tmp_path / "runs", "--json").json
    assert (
        set(quick["checks_left_out"]) == {"kernel-log", "names", "peers-plane", "slow-writes"}
        and full["checks_left_out"] == {}
    )
    assert quick["checks"] < full["checks"] < full["checks_known"]
    assert quick["checks_in_part"].keys() == {"checkpoint-damaged"}
    line = ask(tmp_path / "runs", "--quick").out.splitlines()[-1]
    assert (
        f"{quick['checks']} of {quick['checks_known']} checks made" in line
        and f"kernel-log, names, slow-writes: {QUICK}" in line
    )


def test_nothing_is_counted_of_what_is_not_there() -> None:
    """Checks without anything to examine do not count: no run, one node, no checkpoint."""
    none = coverage(replace(HEALTHY, runs=()))
    whole = coverage(HEALTHY)
    assert {"stopped", "tier-away", "again", "chain", "memory"} <= set(whole.made) & set(none.idle)
    assert "node-clocks" in whole.idle and "wrong-key" in none.made
    assert whole.known == none.known == len(whole.made) + len(whole.idle) + len(whole.in_part) + len(whole.left_out)


@pytest.mark.parametrize("label", sorted(FIELDS))
def test_a_failed_probe_is_never_a_made_check(label: str) -> None:
    """If a probe failed, each check that depends only on its fields is reported as not made."""
    run, part = HEALTHY.runs[0], "machine" if hasattr(HEALTHY.machine, FIELDS[label][0]) else ""
    if label == "settings":
        facts = replace(HEALTHY, config=replace(HEALTHY.config, unseen={label: "no answer within 10 s"}))
    elif part:
        facts = replace(HEALTHY, machine=replace(HEALTHY.machine, unseen={label: "no answer within 10 s"}))
    elif hasattr(HEALTHY.store, FIELDS[label][0]) and label != "leftovers":
        facts = replace(HEALTHY, store=replace(HEALTHY.store, unseen={label: "no answer within 10 s"}))
    else:
        facts = replace(HEALTHY, runs=(replace(run, unseen={label: "no answer within 10 s"}),))
    before, after = coverage(HEALTHY), coverage(facts)
    assert set(after.made) <= set(before.made)
    for name in set(before.made) - set(after.made):
        assert "no answer within 10 s" in (after.left_out | after.in_part).get(name, ""), name
    if label in ("incidents", "kernel's log", "writing", "packages", "time of an answer", "shared memory"):
        assert after.left_out


def test_a_run_that_cannot_be_read_is_checked_for_that_alone() -> None:
    """If a run's log is unreadable, only that is checked; checks of the other run count in part."""
    bad = replace(
        HEALTHY.runs[0],
        name="bad",
        path="/data/runs/bad",
        error=Trouble("corrupt", "its log is damaged"),
        checkpoints=(),
    )
    alone = coverage(replace(HEALTHY, runs=(bad,)))
    assert "run-unreadable" in alone.made and alone.left_out["stopped"] == "its log is damaged"
    both = coverage(replace(HEALTHY, runs=(*HEALTHY.runs, bad)))
    assert both.in_part["stopped"] == "1 of 2 runs could not be examined"


def test_every_probe_has_its_fields() -> None:
    """Each probe's label in ``facts_…`` has its fields in ``FIELDS``, so that a failure of a new probe is counted."""
    text = "".join(path.read_text(encoding="utf-8") for path in DOCTOR.glob("facts_*.py")) + (
        DOCTOR / "collect.py"
    ).read_text(encoding="utf-8")
    labels = set(re.findall(r'(?:seen|probes\.at)\(\s*"([^"{]+)"', text)) | set(
        re.findall(r'unseen\["([^"{]+)"\] =', text)
    )
    assert labels - {"log", "nodes"} <= FIELDS.keys()


def test_incidents_are_cheap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only incidents of the last week, and the newest incident, are read, each with its recovery record."""
    at_hand.fill(tmp_path / "runs")
    for number in range(50):
        put(tmp_path / "runs", incident(number, age_s=90 * 86400.0 - number))
    store, opened = open_bytes(str(tmp_path / "runs")), []
    get = type(store).get
    monkeypatch.setattr(type(store), "get", lambda self, name, most: (opened.append(name), get(self, name, most))[1])
    assert [recent.life for recent in recent_incidents(store, "demo", time.time() - WEEK_S, 200)] == [49] and len(
        opened
    ) == 1
    for number in range(50, 60):
        put(tmp_path / "runs", incident(number, age_s=600 - number))
    put(tmp_path / "runs", RecoveryRecord(id=incident(59, age_s=541.0).id, restored=9, steps_lost=1, seconds={}))
    incidents = recent_incidents(store, "demo", time.time() - WEEK_S, 5)
    assert [recent.life for recent in once_each(incidents)] == [55, 56, 57, 58, 59]
    assert recent_incidents(store, "other", 0.0, 5) == []


def test_the_number_of_checks_depends_on_the_place(tmp_path: Path) -> None:
    """A path without a store has fewer checks than a run with checkpoints."""
    at_hand.fill(tmp_path / "runs")
    assert len(coverage(collect(str(tmp_path / "to-come"))).made) < len(coverage(collect(str(tmp_path / "runs"))).made)
    assert judge(collect(str(tmp_path / "runs"), quick=True)) == []
