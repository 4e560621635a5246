"""``relight doctor --ready``: lines are graded by measurements, weights add up, and unmeasured lines earn nothing and are reported."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import at_hand
import pytest
from msgspec.structs import replace as replaced
from planted_faults import FAULTS, HEALTHY, NOW, RUN, config, run, store, stored

from relight.doctor import DoctorFacts, Readiness, ReadinessLine, grade, judge
from relight.doctor.facts import ConfigFacts, Drilled, KeyFile, MeasuredRestore, Proven, RunFacts, StoreKey, TierFacts
from relight.doctor.ready import PARTS, grade_of
from relight.drill.made_of import MadeOf, made_of, of_script, why_not
from relight.drill.record import remember
from relight.drill.report import DrillReport, RehearsalOutcome
from relight.drill.target import DrillTarget
from relight.log.identity import now_text
from relight.store import open_bytes

MEASURED = MeasuredRestore(2 * 10**9, 2.0, True)
PROVEN = Proven("prove", NOW - 86400, True, "3 steps of train.py after a resume equal the straight run's")
DRILLED = Drilled(NOW - 86400, True, "12 passed; 240 s", "train.py")


def verified(checkpoint_id: str, days: float, damage: str = "") -> Proven:
    """Return a proof of a full read ``days`` days ago."""
    return Proven("verify", NOW - days * 86400, not damage, "1 checkpoint read", ((checkpoint_id, 7, damage),))


def listed(facts: DoctorFacts) -> dict[str, ReadinessLine]:
    """Return the lines by name."""
    return {line.name: line for line in grade(facts, judge(facts)).lines}


def excellent() -> DoctorFacts:
    """Return facts with full marks in every line."""
    facts = run(measured=MEASURED, drills=(DRILLED,), proofs=(PROVEN,))
    keys = (StoreKey("a", 7.0, True), StoreKey("b", 7.0, True))
    set_up = ConfigFacts(
        settings=frozenset({"RELIGHT_KEY", "RELIGHT_TRUST", "RELIGHT_ANCHOR"}),
        key_files=(KeyFile("/k", 0o600, False),),
        grace=True,
    )
    set_up = replace(set_up, assigned=frozenset({"alerts.to", "environment.audit"}), roles={"admin": 1, "viewer": 4})
    limits = {"open files": 65536, "memlock": 1 << 40}
    return replace(
        facts,
        store=replace(facts.store, encrypted=True, keys=keys),
        config=set_up,
        machine=replace(facts.machine, limits=limits),
    )


def test_an_excellent_set_up_gets_an_a_in_every_part() -> None:
    """Every line has full marks, and no line has a command."""
    readiness = grade(excellent(), judge(excellent()))
    assert [line.name for line in readiness.lines if line.score != 1.0] == []
    assert readiness.grade() == "A" and readiness.score() == 1.0 and {readiness.grade(part) for part in PARTS} == {"A"}
    assert not any(line.command for line in readiness.lines)
    assert len(readiness.lines) >= 25


LOWERED: list[tuple[str, DoctorFacts, float | None]] = [
    ("restore of the newest checkpoint", run(), 0.75),
    ("restore of the newest checkpoint", run(measured=MeasuredRestore(10**9, 1.0, False)), 0.9),
    ("restore of the newest checkpoint", run(measured=MeasuredRestore(10**9, 1.0, True, ("pack: chunk 3",))), 0.0),
    ("restore of the newest checkpoint", run(checkpoints=(stored(5, damage=None),)), None),
    ("restore of the newest checkpoint", run(proofs=(verified(RUN.newest.id, 1),)), 1.0),
    ("restore of the newest checkpoint", run(proofs=(verified(RUN.newest.id, 60),)), 0.875),
    ("restore of the newest checkpoint", run(proofs=(verified(RUN.newest.id, 1000),)), 0.75),
    ("restore of the newest checkpoint", run(proofs=(verified(RUN.newest.id, 1, "pack: chunk 3"),)), 0.0),
    ("restore of the newest checkpoint", run(proofs=(verified("another", 1, "pack: chunk 3"),)), 0.75),
    ("proof of an exact resume", run(), 0.0),
    ("proof of an exact resume", run(proofs=(PROVEN._replace(time_s=NOW - 100 * 86400),)), 0.5),
    ("proof of an exact resume", run(proofs=(PROVEN, PROVEN._replace(ok=False, summary="x differs"))), 0.0),
    ("proof of an exact resume", replace(HEALTHY, runs=()), None),
    ("older checkpoints to fall back on", run(checkpoints=(stored(5),)), 0.0),
    ("copies in further tiers", run(tiers=()), 0.0),
    ("copies in further tiers", run(tiers=(TierFacts("cold", "s3://b/r", None, 2, 60.0),)), 0.5),
    ("rehearsal of recovery", run(), 0.0),
    ("rehearsal of recovery", run(drills=(DRILLED._replace(time_s=NOW - 100 * 86400),)), 0.5),
    ("rehearsal of recovery", run(drills=(DRILLED._replace(ok=False),)), 0.0),
    (
        "rehearsal of recovery",
        run(drills=(DRILLED._replace(script="", why_not=("no", "it drilled the drill's own job")),)),
        0.0,
    ),
    ("rehearsal of recovery", run(drills=(DRILLED._replace(script="eval.py"),)), 0.0),
    ("rehearsal of recovery", run(drills=(DRILLED._replace(why_not=("no", "train.py has changed since")),)), 0.0),
    ("rehearsal of recovery", run(drills=(DRILLED._replace(why_not=("unknown", "it cannot be read here")),)), 0.5),
    ("rehearsal of recovery", run(drills=(DRILLED,), environment={}), 0.5),
    (
        "rehearsal of recovery",
        run(drills=(DRILLED, DRILLED._replace(why_not=("no", "of other settings"), ok=False))),
        1.0,
    ),
    (
        "a copy off this disk",
        run(tiers=(TierFacts("cold", "/data/cold/demo", same_device=True),)),
        0.0,
    ),
    ("restore of an older version", run(checkpoints=(stored(5),)), 0.0),
    ("restore of an older version", run(checkpoints=(stored(4), stored(5))), 0.5),
    ("restore of an older version", run(checkpoints=(stored(5),), pinned=1), 1.0),
    ("training time that saves take", run(environment={"background": False}), 0.0),
    ("training time that saves take", run(environment={}), None),
    ("receiver of alerts", config(), 0.0),
    ("audit log of actions", config(), 0.0),
    ("roles of dashboard tokens", config(), None),
    ("roles of dashboard tokens", config(roles={"admin": 3}), 0.5),
    ("training lost by a failure", run(checkpoints=(stored(5),)), None),
    (
        "training lost by a failure",
        run(checkpoints=tuple(stored(n, time_s=NOW - 7200 * (6 - n)) for n in range(6))),
        0.25,
    ),
    ("exclusive commits", store(exclusive=False), 0.0),
    ("exclusive commits", store(exclusive=None), None),
    ("durability in a power cut", store(fsync_s=1e-6), 0.0),
    ("durability in a power cut", store(fsync_s=None), None),
    ("integrity of the log", FAULTS["a record is damaged"][0](), 0.0),
    ("supervision by relight run", run(supervised=False), 0.0),
    ("encryption of checkpoints", store(), 0.0),
    ("a second key", store(encrypted=True, keys=(StoreKey("a", 1.0, True),)), 0.0),
    ("rotation of keys", store(encrypted=True, keys=(StoreKey("a", 900.0, True),)), 0.25),
    ("access to key files", config(key_files=(KeyFile("/k", 0o644, False),)), 0.0),
    ("write access to the store", store(mode=0o775), 0.75),
    ("write access to the store", store(mode=0o777), 0.0),
    ("TLS of connections", FAULTS["in the clear"][0](), 0.0),
    ("memory for two copies of the state", FAULTS["no memory for a copy"][0](), 0.243),
    ("time until a save is durable", store(write_bps=2.5e6), 0.0),
    ("time until a save is durable", store(write_bps=None), None),
    ("time of a restore", run(measured=MeasuredRestore(10**9, 200.0, False)), 0.5),
    ("time of a restore", run(), None),
    ("response time of the store", store(answer_s=0.7), 0.5),
    ("space for more checkpoints", store(free_bytes=10 * 10**9), 0.5),
    ("deletion of old checkpoints", FAULTS["full by tonight"][0](), 0.0),
    ("limit of open files", FAULTS["few open files"][0](), 0.0),
    ("limit of locked memory", FAULTS["memlock with a fabric"][0](), 0.0),
    ("findings of relight doctor", FAULTS["the next does not fit"][0](), 0.0),
    ("versions of packages", FAULTS["a package is old"][0](), 0.0),
    ("validity of settings", FAULTS["an unknown variable"][0](), 0.0),
    ("length of the grace period", HEALTHY, 0.0),
    ("leftovers of earlier saves", FAULTS["leftovers"][0](), 0.5),
    ("agreement of clocks", FAULTS["a record of tomorrow"][0](), 0.0),
    ("failures within a week", FAULTS["fails again and again"][0](), 0.5),
]


@pytest.mark.parametrize(("name", "facts", "score"), LOWERED, ids=range(len(LOWERED)))
def test_a_line_is_graded_by_what_was_seen(name: str, facts: DoctorFacts, score: float | None) -> None:
    """Each lowered line has the expected score, evidence, and a command that would raise it."""
    line = listed(facts)[name]
    assert line.score == (score if score is None else pytest.approx(score, abs=0.01))
    assert (line.command or score == 1.0) and line.evidence
    assert line.grade == ("–" if score is None else grade_of(score))


def test_an_unmeasured_line_scores_nothing() -> None:
    """Unmeasured lines earn nothing, and a part without measured lines has no grade."""
    lines = (
        ReadinessLine("security", "a", 3, 1.0, "seen", ""),
        ReadinessLine("security", "b", 1, None, "not seen", "check it"),
        ReadinessLine("operations", "c", 4, None, "", ""),
    )
    readiness = Readiness(lines)
    assert readiness.score("security") == 0.75 and readiness.grade("security") == "B"
    assert readiness.grade("operations") == "–" and readiness.score() == 0.375 and readiness.grade() == "D"
    assert readiness.to_dict()["not_measurable"] == 2


def test_a_store_without_a_run_is_graded_as_far_as_it_can_be() -> None:
    """Without a checkpoint, its lines are unmeasured."""
    for facts in (replace(HEALTHY, runs=()), replace(HEALTHY, runs=(RunFacts(name="demo", path="p"),))):
        assert listed(facts)["restore of the newest checkpoint"].score is None
        assert grade(facts, judge(facts)).grade() != "A"


@pytest.mark.parametrize(
    ("score", "letter"), [(1.0, "A"), (0.9, "A"), (0.89, "B"), (0.75, "B"), (0.5, "C"), (0.25, "D"), (0.0, "F")]
)
def test_letters(score: float, letter: str) -> None:
    """Grades begin at 90, 75, 50 and 25 %."""
    assert grade_of(score) == letter


def drill(ok: bool) -> DrillReport:
    """Return a drill report."""
    outcome = RehearsalOutcome("kill", "a rank is killed", "passed" if ok else "failed", "it resumed")
    return DrillReport(f"{int(time.time() * 1000):013d}-a", now_text(), "node-1", "train.py", [outcome], 12.0)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """``relight doctor --ready`` on a real store measures the restore's rate, uses a recorded drill, and exits by grade."""
    at_hand.fill(tmp_path / "runs")
    path = str(tmp_path / "runs" / "demo")

    def ready(*more: str) -> at_hand.Answer:
        return at_hand.in_process(monkeypatch, capfd, ["doctor", "--ready", path, *more])

    def line(answer: Any, name: str) -> Any:
        (row,) = [row for row in answer.json["list"] if row["name"] == name]
        return row

    before = ready("--json")
    assert before.code == (0 if before.json["grade"] in "ABC" else 1)
    assert line(before, "rehearsal of recovery")["score"] == 0.0
    assert line(before, "time of a restore")["score"] is None and before.json["not_measurable"] >= 1
    remember(open_bytes(tmp_path / "runs"), "demo", drill(ok=True))
    assert "older than the recording of scripts" in line(ready("--json"), "rehearsal of recovery")["evidence"]
    remember(open_bytes(tmp_path / "runs"), "demo", replaced(drill(ok=True), made_of=of_script([__file__], Path.cwd())))
    after = ready("--json", "--measure")
    assert "does not record its script" in line(after, "rehearsal of recovery")["evidence"]
    assert (
        line(after, "rehearsal of recovery")["score"] == 0.5
        and "1 passed" in line(after, "rehearsal of recovery")["evidence"]
    )
    assert "4.38 kB in " in line(after, "time of a restore")["evidence"]
    assert after.json["score"] > before.json["score"]
    of_store = at_hand.in_process(monkeypatch, capfd, ["doctor", "--ready", str(tmp_path / "runs"), "--json"])
    assert of_store.json["run"] in (path, str(tmp_path / "runs" / "baseline"))  # saved within a second
    shown = ready("--measure").out
    assert all(f"  {part}\n" in shown for part in PARTS) and "with nothing to do" in shown
    assert max(len(text) for text in shown.splitlines() if path not in text and str(tmp_path) not in text) <= 84
    assert len(ready("--all").out.splitlines()) > len(shown.splitlines()) - 2
    for number in range(4):
        (pack,) = at_hand.directory(tmp_path / "runs", number).glob("pack-*")
        pack.unlink()
    broken = ready("--json")
    assert line(broken, "restore of the newest checkpoint")["grade"] == "F"
    assert broken.json["score"] < before.json["score"]


def test_the_healthy_values_are_graded_as_the_doctor_sees_them() -> None:
    """A finding of the doctor lowers the grade."""
    base = grade(HEALTHY, judge(HEALTHY)).score()
    assert RUN in HEALTHY.runs
    for name in ("two jobs", "NFS soft", "an unknown key", "eatmydata", "the store is away"):
        facts = FAULTS[name][0]()
        assert grade(facts, judge(facts)).score() < base, name


def test_a_drill_counts_for_the_script_and_settings_that_it_was_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drills of a changed script, of other settings or of the drill's own job do not count; comments in settings do not matter."""
    monkeypatch.chdir(tmp_path)
    for name in ("RELIGHT_SUPERVISE__SAME", "RELIGHT_SETTINGS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "relight.toml").write_text("[supervise]\nsame = 4\n")
    made = made_of(DrillTarget(script=("train.py", "--token=abc")))
    assert why_not(made) == ("", "") and "abc" not in str(made)
    (tmp_path / "relight.toml").write_text("# four\n[supervise]\nsame = 4\n[alerts]\ngroup_s = 5\n")
    assert why_not(made) == ("", "")
    (tmp_path / "relight.toml").write_text("[supervise]\nsame = 5\n")
    assert why_not(made) == ("no", "it ran with another value of supervise.same")
    (tmp_path / "relight.toml").unlink()
    assert why_not(made)[0] == "no"
    monkeypatch.setenv("RELIGHT_SUPERVISE__SAME", "4")
    assert why_not(made) == ("", ""), "a variable sets the same"
    (tmp_path / "train.py").write_text("print(2)\n")
    assert why_not(made) == ("no", "train.py has changed since")
    (tmp_path / "train.py").unlink()
    assert why_not(made)[0] == "unknown"
    assert why_not(made_of(DrillTarget()))[0] == why_not(None)[0] == why_not(MadeOf())[0] == "no"
