"""Judgements of a drill, without starting a job: classification, limits, reports."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relight.drill import REHEARSALS, DrillOptions, DrillReport, RehearsalOutcome
from relight.drill.copies import REHEARSALS as COPIES
from relight.drill.drive import chosen_of, over_limits
from relight.drill.live import MAY, rehearsals_of
from relight.drill.orders import DrillOrder, DrillOrders
from relight.drill.record import drills_of, remember
from relight.drill.rehearsals import RehearsalResult, judged
from relight.drill.report import FAILED, PASSED, SKIPPED, markdown
from relight.drill.stage import Wrong
from relight.drill.target import DrillTarget, target_of
from relight.errors import ConfigError
from relight.heartbeat import Heartbeat
from relight.store import open_bytes
from relight.supervise.incidents import Incident, RecoveryRecord

DOCS = Path(__file__).parents[2] / "docs"


def incident(**changes: Any) -> Incident:
    """Return an incident: a rank was killed at step 12, step 9 was stored, and training continued from there."""
    fields: dict[str, Any] = {
        "id": "1", "at": "", "host": "", "job": "", "life": 1, "kind": "killed", "why": "rank 1 was ended by SIGKILL\nand more", "rank": 1,
        "step": 12, "durable": 9, "words": "", "action": "resume", "reason": "", "delay_s": 0.0, "settings": {}, "clues": [],
        "workers": [{"rank": 0, "durable": 9}, {"rank": 1, "durable": 9}],
        "after": RecoveryRecord("1", 9, 3, {"noticed": 0.1, "decided": 0.2, "all": 4.0}),
    }  # fmt: skip
    return Incident(**fields | changes)


BACK = {0: Heartbeat(first_at=104.5), 1: Heartbeat(first_at=105.0)}
"""Heartbeats of the ranks after the failure: the last rank completed a step at 105."""


def test_an_incident_that_is_what_it_should_be_gives_its_times_from_the_moment_of_the_break() -> None:
    """Times are on one clock, since the drill caused the failure, and not since the supervisor noticed it."""
    shown = judged(REHEARSALS["kill"], incident(), BACK, 1, 100.5)
    assert (shown.noticed_s, shown.decided_s, shown.back_s, shown.steps_lost) == (0.6, 0.8, 4.5, 3)
    assert shown.why == "rank 1 was ended by SIGKILL → resume, from step 9"


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"kind": "network"}, "was classified as network"),
        ({"action": "stop"}, "should have been resume"),
        ({"rank": 0}, "assigned to rank 0, and rank 1 had failed"),
        (
            {"after": RecoveryRecord("1", 4, 8, {"noticed": 0.1, "decided": 0.2, "all": 4.0})},
            "step 9 was stored, and training continued from step 4",
        ),
    ],
    ids=["kind", "action", "rank", "stored"],
)
def test_an_incident_that_is_not_fails(changes: dict[str, Any], pattern: str) -> None:
    """A wrong kind, action or rank, or a continuation from an older step than necessary, is an error."""
    with pytest.raises(Wrong, match=pattern):
        judged(REHEARSALS["kill"], incident(**changes), BACK, 1, 100.0)


def test_rehearsals_expect_the_actions_of_the_page() -> None:
    """The rehearsals expect the first actions of the table in docs/recovery.md."""
    rows = re.findall(
        r"^\| `([a-z ]+)` \| [^|]* \| ([a-z ]+) \|", (DOCS / "recovery.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    actions = {kind: action.strip() for kind, action in rows}
    expected = {rehearsal.kind: rehearsal.action for rehearsal in REHEARSALS.values() if rehearsal.kind}
    assert expected and {kind: actions[kind] for kind in expected} == expected


def test_every_rehearsal_is_on_the_page() -> None:
    """docs/drills.md has a row for each rehearsal of jobs and of copies, and no others."""
    text = (DOCS / "drills.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([a-z]+)` \|", text, re.MULTILINE) == [*REHEARSALS, *COPIES]


def test_limits() -> None:
    """Limits of steps and seconds; an unmeasured value exceeds no limit."""
    shown = RehearsalResult("it resumed", back_s=4.5, steps_lost=3)
    assert not over_limits(shown, DrillOptions()) and not over_limits(
        shown, DrillOptions(max_lost_steps=3, max_seconds=4.5)
    )
    assert "3 steps were lost, and 2 are allowed" in over_limits(shown, DrillOptions(max_lost_steps=2))
    assert "after 4.5 s, and 4 s are allowed" in over_limits(shown, DrillOptions(max_seconds=4))
    assert not over_limits(RehearsalResult("nothing was measured"), DrillOptions(max_lost_steps=0, max_seconds=0))


def test_which_rehearsals_are_chosen() -> None:
    """All or the named rehearsals are chosen, in their order; for a running job only the allowed ones."""
    assert [rehearsal.name for rehearsal in chosen_of([])] == list(REHEARSALS)
    assert [rehearsal.name for rehearsal in chosen_of(["preempt", "kill"])] == ["kill", "preempt"]
    assert [rehearsal.name for rehearsal in rehearsals_of([])] == ["kill"] and set(MAY) <= REHEARSALS.keys()
    for wrong in (chosen_of, rehearsals_of):
        with pytest.raises(ConfigError):
            wrong(["nothing of the kind"])
    with pytest.raises(ConfigError, match="drill a copy"):
        rehearsals_of(["damage"])


def test_a_script_is_found_and_gets_its_store(tmp_path: Path) -> None:
    """The script follows torchrun's flags; {store} in its arguments and in --env is replaced everywhere."""
    target = target_of(
        ["--nproc-per-node", "4", "train.py", "--store={store}/demo", "-n", "3"], "x.toml", ["RUNS={store}"]
    )
    assert (target.flags, target.script[0], target.built_in) == (("--nproc-per-node", "4"), "train.py", False)
    command = target.command(tmp_path, tmp_path / "store", "--more")
    position = command.index("relight.drill.script")
    assert command[position - 1] == "-m" and command[position + 3 :] == [
        "train.py",
        f"--store={tmp_path}/store/demo",
        "-n",
        "3",
    ]
    assert command[command.index("--settings") + 1] == "x.toml" and "--more" in command[:position]
    assert target.environment(tmp_path / "store") == {"RUNS": f"{tmp_path}/store"}
    module = target_of(["-m", "train", "{store}"], "", [])
    assert module.command(tmp_path, tmp_path)[-3:] == ["-m", "train", str(tmp_path)]
    other = target_of(["--no-python", "./train.sh", "{store}"], "", [])
    assert not other.can_be_ordered and "relight.drill.script" not in other.command(tmp_path, tmp_path)


def test_a_script_without_a_given_store_is_refused() -> None:
    """Otherwise the drill would break the script's real store. {store} in the script's name does not count."""
    for arguments in (["train.py", "--store", "runs"], ["{store}"]):
        with pytest.raises(ConfigError, match="no argument names the drill.s store"):
            target_of(arguments, "", [])
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        target_of(["train.py"], "", ["{store}"])


def test_orders_are_done_once_and_it_is_known_when(tmp_path: Path) -> None:
    """The last order counts, and only one process executes it."""
    orders = DrillOrders(tmp_path / "orders")
    assert orders.read() is None and orders.done() is None
    orders.give(DrillOrder("lock", 7, 1))
    assert orders.read() == DrillOrder("lock", 7, 1)
    assert orders.do() and not DrillOrders(tmp_path / "orders").do()
    done_at = orders.done()
    assert done_at is not None and math.isfinite(done_at)
    orders.give(DrillOrder("poison", 9))
    assert orders.done() is None
    orders.clear()
    assert orders.read() is None
    (tmp_path / "orders").write_bytes(b"[")
    assert orders.read() is None


def report(*verdicts: str) -> DrillReport:
    """Each order has a rehearsal."""
    outcomes = [
        RehearsalOutcome(f"r{n}", "it was broken", verdict, f"because {n}", back_s=1.5, steps_lost=n)
        for n, verdict in enumerate(verdicts)
    ]
    return DrillReport("17-ab", "2026-11-21T07:39:49Z", "node-3", "train.py", outcomes, 61.0)


def test_when_a_drill_is_ok() -> None:
    """A drill is ok if one rehearsal passed and none failed; skipped ones do not count."""
    assert report(PASSED, SKIPPED).ok
    assert not report(PASSED, FAILED).ok and not report(SKIPPED).ok and not report().ok
    assert report(PASSED, FAILED, SKIPPED, PASSED).summary() == "2 passed, 1 failed, 1 skipped; 1 min 1 s"


def test_the_page_for_the_runbook_has_it_all() -> None:
    """The page has time, host and script, a row for each rehearsal, and the reasons of failures."""
    page = markdown(report(PASSED, FAILED, SKIPPED))
    assert "# Drill of 2026-11-21T07:39:49Z" in page and "`train.py` on node-3" in page
    assert "| r0 | passed | – | – | 1.5 s | 0 |" in page and "| r1 | **failed** |" in page and "because 2" in page


def test_drills_are_remembered_with_a_run(tmp_path: Path) -> None:
    """Each drill is a small file in the run; unreadable files are ignored."""
    store = open_bytes(tmp_path)
    assert drills_of(store, "demo") == []
    first, second = report(PASSED), msgspec.structs.replace(report(FAILED), id="18-cd", live=True)
    for drill_report in (second, first):
        remember(store, "demo", drill_report)
    (tmp_path / "demo" / "drills" / "19-ef.json").write_text("{")
    assert drills_of(store, "demo") == [first, second]
    stored = json.loads((tmp_path / "demo" / "drills" / "17-ab.json").read_text())
    assert stored["outcomes"][0]["verdict"] == "passed" and json.loads(json.dumps(first.to_dict()))["ok"] is True


def test_the_built_in_job_is_a_target_like_others(tmp_path: Path) -> None:
    """The built-in job is a target with two ranks, the drill's store and a fixed number of steps."""
    target = DrillTarget()
    assert target.built_in and target.command(tmp_path, tmp_path / "store")[-5:-2] == [
        "relight.drill.job",
        str(tmp_path / "store"),
        "400",
    ]
