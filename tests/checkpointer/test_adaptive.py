"""``relight.adaptive()``: what it asks for, what it learns in a run, what stays behind, and what it does when a process is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import relight
from relight.checkpointer.adaptive_schedule import AdaptiveSchedule, attempt_lifetimes, loss_volatility, measured_restarts
from relight.commit import Attempt
from relight.cost_model.schedule_note import TOPIC, decode
from relight.errors import ConfigError
from relight.log import Log, fold
from relight.observe import Event, subscribe
from relight.policy import TriggerInput, adaptive, best, every
from relight.policy.file_defaults import defaults_of
from relight.store import open_bytes


def facts(now_s: float, interval_s: float | None, **more: object) -> TriggerInput:
    """Of a step, with the last save at 0."""
    return TriggerInput(7, now_s, None, 0.0, interval_s=interval_s, **more)  # type: ignore[arg-type]


def test_it_is_due_when_the_interval_is_over_and_never_without_one() -> None:
    """Ranks that do not decide ask for nothing; with others it goes by ``|``."""
    trigger = adaptive()
    assert trigger.due(facts(39, 40)) is None
    assert trigger.due(facts(40, 40)) == "adaptive, every 40 s"
    assert trigger.due(facts(1e9, None)) is None
    assert trigger.by_step(7) is None
    assert (every(steps=8) | trigger).due(facts(0, 40)) == "every 8 steps"
    assert (best("loss") | trigger).adapts is trigger
    assert every(steps=1).adapts is None


def test_a_loss_that_fell_brings_a_save_forward() -> None:
    """By the share that was asked for, below the best saved, and no sooner than after half an interval."""
    trigger = adaptive(loss="loss", drop=0.1)
    fell = {"metrics": {"loss": 0.89}, "best": {"loss:min": 1.0}}
    assert trigger.due(facts(21, 40, **fell)) == "adaptive, loss fell to 0.89"
    assert trigger.due(facts(19, 40, **fell)) is None
    assert trigger.due(facts(21, 40, metrics={"loss": 0.95}, best={"loss:min": 1.0})) is None
    assert trigger.due(facts(21, 40, metrics={"loss": float("nan")}, best={"loss:min": 1.0})) is None
    assert trigger.due(facts(21, 40, metrics={"loss": -1.2}, best={"loss:min": -1.0})) is not None
    assert trigger.due(facts(21, 40, metrics={"loss": 0.5})) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"at_least": "1h", "at_most": "1m"}, {"at_most": 0}, {"at_most": "soon"}, {"overhead": 0}, {"overhead": 1.5}, {"overhead": True}, {"total_steps": 0},
        {"total_steps": 1.5}, {"drop": 0.1}, {"loss": "loss", "drop": 2}, {"loss": 3}, {"risk": 3}, {"bytes_per_second": 0}, {"bytes_per_second": True}, {"mtbf": -1},
    ],
    ids=str,
)  # fmt: skip
def test_what_makes_no_sense_is_refused(wrong: dict) -> None:
    """At once, with what it should have been."""
    with pytest.raises(ConfigError):
        adaptive(**wrong)


def test_a_table_s_settings_are_checked_and_named() -> None:
    """Unknown tables and names, values of the wrong kind: each says where, and what there is. A function cannot stand in a file."""
    told = defaults_of({"adaptive": {"at_most": "5m"}, "every": {"steps": 10}, "keep": {"last": 2}, "background": False}, "here")
    assert told.save is not None
    assert told.save.due(facts(400, 300)) is not None
    assert told.save.by_step(9) == "every 10 steps"
    assert (told.keep.last, told.background, told.peers) == (2, False, None)  # type: ignore[union-attr]
    for wrong in (
        {"sometimes": {}}, {"adaptive": {"at_mots": 1}}, {"adaptive": {"risk": 1}}, {"adaptive": 3}, {"keep": {"last": "x"}}, {"background": 1}, {"every": {}},
        {"limits": {"memory": -1}}, {"compact": {"codecs": "best"}}, {"keep": {"within": []}}, {"peers": {}},
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            defaults_of(wrong, "here")
        assert caught.value.where == "here"
        assert "[checkpoint" in caught.value.what


def test_arguments_beat_the_file_and_the_file_beats_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``keep=`` as the caller says; the rest as ``RELIGHT_SETTINGS`` has it; a file that is named and not there is an error."""
    file = tmp_path / "other.toml"
    file.write_text("[checkpoint]\nbackground = false\n[checkpoint.keep]\nlast = 2\n[checkpoint.every]\nsteps = 1\n")
    monkeypatch.setenv("RELIGHT_SETTINGS", str(file))
    model = torch.nn.Linear(2, 2)
    with relight.Checkpointer(tmp_path / "runs/a", model=model) as ckpt:
        for step in range(5):
            ckpt.step(step)
    assert len(list(relight.open(tmp_path / "runs").checkpoints("a"))) == 2
    with relight.Checkpointer(tmp_path / "runs/b", model=model, keep=relight.keep(last=4)) as ckpt:
        for step in range(5):
            ckpt.step(step)
    assert len(list(relight.open(tmp_path / "runs").checkpoints("b"))) == 4
    monkeypatch.setenv("RELIGHT_SETTINGS", str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match="cannot be read"):
        relight.Checkpointer(tmp_path / "runs/c", model=model)
    for nonsense in (b"\xff\xfe", b"[checkpoint", b"checkpoint = 3", b"[" * 100_000):
        file.write_bytes(nonsense)
        monkeypatch.setenv("RELIGHT_SETTINGS", str(file))
        with pytest.raises(ConfigError):
            relight.Checkpointer(tmp_path / "runs/c", model=model)


class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """What it shows."""
        return self.now


def test_it_learns_what_a_save_takes_from_the_steps() -> None:
    """Steps beside a save that take longer than usual are the save's, also where ``step()`` did not wait; the interval follows."""
    clock = Clock()
    schedule = AdaptiveSchedule(adaptive(at_most="1d", overhead=0.5), 0, 8, clock)
    for step in range(20):
        schedule.interval(step, {}, False)
        clock.now += 1.0
    before = schedule.decision
    for step in range(20, 24):
        schedule.interval(step, {}, True)
        clock.now += 1.5
    schedule.interval(24, {}, True)
    schedule.learn({"blocked": 0.1, "copy": 1.0, "total": 5.0}, 10**6, False)
    schedule.interval(25, {}, False)
    assert before is not None
    assert schedule.decision is not None
    assert schedule.decision.numbers["stall_s"] == pytest.approx(2.0, abs=0.01)
    assert schedule.decision.numbers["durable_s"] == pytest.approx(6.1)
    assert schedule.decision.interval_s == pytest.approx(2 * before.interval_s)


def test_only_rank_0_decides() -> None:
    """The others have no interval; nor has anybody without ``adaptive()``."""
    assert AdaptiveSchedule(adaptive(), 1, 8).interval(0, {}, False) is None
    assert AdaptiveSchedule(every(steps=2), 0, 8).interval(0, {}, False) is None
    assert AdaptiveSchedule(None, 0, 8).interval(0, {}, False) is None
    assert AdaptiveSchedule(every(steps=2) | adaptive(), 0, 8).interval(0, {}, False) is not None


def test_risk_and_a_restless_loss_count_at_once() -> None:
    """A function that says 25 times the usual makes the interval a fifth; one that talks nonsense counts as usual; a loss that
    begins to jump is noticed between two saves."""
    usual, risky, nonsense = (
        AdaptiveSchedule(adaptive(at_most="30d", overhead=0.9, risk=say), 0, 8) for say in (lambda: 1.0, lambda: 25.0, lambda: "high")
    )
    found = [one.interval(0, {}, False) for one in (usual, risky, nonsense)]
    assert found[0] / found[1] == pytest.approx(5, rel=0.01)  # type: ignore[operator]
    assert found[2] == pytest.approx(found[0])
    calm = [1.0 + 0.01 * (step % 2) for step in range(200)]
    assert loss_volatility(calm) == pytest.approx(1.0, abs=0.05)
    assert loss_volatility(calm + [1.0 + 0.3 * (step % 2) for step in range(30)]) > 5
    assert loss_volatility([float("nan")] * 100) == loss_volatility([]) == 1.0
    schedule = AdaptiveSchedule(adaptive(at_most="30d", loss="loss"), 0, 8)
    for step, loss in enumerate(calm):
        first = schedule.interval(step, {"loss": loss}, False)
    for step in range(200, 230):
        then = schedule.interval(step, {"loss": 1.0 + 0.3 * (step % 2)}, False)
    assert then <= first / 2  # type: ignore[operator]


def train(path: Path, steps: int, **options: object) -> list[Event]:
    """Some steps with an adaptive schedule; what was heard of it."""
    heard: list[Event] = []
    undo = subscribe(heard.append)
    try:
        model = torch.nn.Linear(4, 4)
        save = adaptive(at_most=0.2, overhead=0.9)
        with relight.Checkpointer(path, model=model, save=save, background=False, **options) as ckpt:  # type: ignore[arg-type]
            for step in range(ckpt.restore(), steps):
                time.sleep(0.005)
                ckpt.step(step)
    finally:
        undo()
    return heard


def test_a_run_saves_by_it_and_its_log_keeps_why(tmp_path: Path) -> None:
    """Saves come by themselves; each change is an event, and a note that is there when the run has ended."""
    heard = train(tmp_path / "runs/demo", 120)
    changed = [one for one in heard if one.name == "schedule.changed"]
    reasons = [one.fields["reason"] for one in heard if one.name == "save.durable"]
    assert sum(one.startswith("adaptive, every") for one in reasons) >= 2
    notes = [one.body for one in fold(Log(open_bytes(str(tmp_path / "runs")), "demo").read()).notes]
    told = [decode(one.data) for one in notes if one.topic == TOPIC]  # type: ignore[union-attr]
    assert [one.step for one in told if one is not None] == [one.fields["step"] for one in changed]
    assert told[0] is not None
    assert told[0].reason == changed[0].fields["reason"]
    assert told[0].numbers["young_s"] > 0


SCRIPT = """
import sys, time, torch, relight
model = torch.nn.Linear(4, 4)
with relight.Checkpointer(sys.argv[1], model=model, save=relight.adaptive(at_most=0.2, overhead=0.9), background=False) as ckpt:
    for step in range(ckpt.restore(), 10**6):
        time.sleep(0.005)
        ckpt.step(step)
        print(step, flush=True)
"""


@pytest.mark.crash
def test_what_was_killed_counts_as_a_failure_and_what_ended_does_not(tmp_path: Path) -> None:
    """A process that dies by SIGKILL behind some saves is one failure for the next one's schedule; a run that ended by itself is none."""
    path = tmp_path / "runs/demo"
    child = subprocess.Popen([sys.executable, "-c", SCRIPT, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for line in child.stdout:
        if int(line) >= 100:
            break
    child.send_signal(signal.SIGKILL)
    child.communicate()
    first = [one.fields["reason"] for one in train(path, 220) if one.name == "schedule.changed"]
    assert "1 failure in" in first[0]
    second = [one.fields["reason"] for one in train(path, 240) if one.name == "schedule.changed"]
    assert "1 failure in" in second[0]
    lives, seconds = attempt_lifetimes(fold(Log(open_bytes(str(path.parent)), "demo").read()), 10**6)
    assert len(lives) == 1
    assert seconds >= lives[0] >= 0


def test_restarts_are_read_from_incidents_and_nonsense_is_passed_over(tmp_path: Path) -> None:
    """``relight run``'s times from failure to step; files that are damaged, or of another kind, count for nothing."""
    store = open_bytes(str(tmp_path / "runs"))
    attempt = Attempt.begin(store, "demo", reason="fresh")
    assert measured_restarts(attempt) == ()
    for number, data in enumerate(
        (
            b'{"seconds": {"all": 12.5}}',
            b"{",
            b"[]",
            b'{"seconds": 3}',
            b'{"seconds": {"all": -1}}',
            b'{"seconds": {"all": "x"}}',
            b"\xff" * 100,
        )
    ):
        store.put_once(f"demo/incidents/{number:013d}-abc.after.json", data)
    store.put_once("demo/incidents/0000000000009-abc.json", b'{"seconds": {"all": 99}}')
    assert measured_restarts(attempt) == (12.5,)
