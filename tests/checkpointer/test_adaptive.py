"""``relight.adaptive()``: when it asks for saves, what it learns in a run, what a run records, and what follows when a
process is killed."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch
from tests.scripts import Script

import relight
from relight.checkpointer.adaptive_schedule import (
    AdaptiveSchedule,
    attempt_lifetimes,
    loss_volatility,
    measured_restarts,
)
from relight.commit import Attempt
from relight.cost_model.schedule_note import decode
from relight.errors import ConfigError
from relight.format.topics import SCHEDULE
from relight.log import Log, fold
from relight.observe import Event, subscribe
from relight.policy import TriggerInput, adaptive, adaptive_part, best, every
from relight.policy.file_defaults import defaults_of
from relight.store import open_bytes


def facts(now_s: float, interval_s: float | None, **more: object) -> TriggerInput:
    """Return the facts of a step, with the last save at second 0."""
    return TriggerInput(7, now_s, None, 0.0, interval_s=interval_s, **more)  # type: ignore[arg-type]


def test_a_save_is_due_after_the_interval_and_never_without_one() -> None:
    """Ask for nothing on ranks without an interval. Combine with other triggers by ``|``."""
    trigger = adaptive()
    assert trigger.due(facts(39, 40)) is None
    assert trigger.due(facts(40, 40)) == "adaptive, every 40 s"
    assert trigger.due(facts(1e9, None)) is None
    assert trigger.by_step(7) is None
    assert (every(steps=8) | trigger).due(facts(0, 40)) == "every 8 steps"
    assert adaptive_part(best("loss") | trigger) is trigger
    assert adaptive_part(every(steps=1)) is None is adaptive_part(None)


def test_a_loss_that_fell_brings_a_save_forward() -> None:
    """Bring a save forward when the loss falls below the best saved by the given share, but not before half an
    interval."""
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
def test_invalid_settings_are_refused(wrong: dict) -> None:
    """Raise ConfigError for invalid arguments at construction."""
    with pytest.raises(ConfigError):
        adaptive(**wrong)


def test_a_table_s_settings_are_checked_and_named() -> None:
    """Refuse unknown tables, unknown names and values of the wrong kind. The error names the place and the valid names.
    A function cannot be set in a file."""
    settings = defaults_of(
        {"adaptive": {"at_most": "5m"}, "every": {"steps": 10}, "keep": {"last": 2}, "background": False}, "here"
    )
    assert settings.save is not None
    assert settings.save.due(facts(400, 300)) is not None
    assert settings.save.by_step(9) == "every 10 steps"
    assert (settings.keep.last, settings.background, settings.peers) == (2, False, None)  # type: ignore[union-attr]
    for wrong in (
        {"sometimes": {}}, {"adaptive": {"at_mots": 1}}, {"adaptive": {"risk": 1}}, {"adaptive": 3}, {"keep": {"last": "x"}}, {"background": 1}, {"every": {}},
        {"limits": {"memory": -1}}, {"compact": {"codecs": "best"}}, {"keep": {"within": []}}, {"peers": {}},
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            defaults_of(wrong, "here")
        assert caught.value.where == "here"
        assert "[checkpoint" in caught.value.what


def test_arguments_beat_the_file_and_the_file_beats_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefer the argument ``keep=`` to the file of ``RELIGHT_SETTINGS``. A missing file is an error."""
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
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """Return the set time."""
        return self.now


def test_the_cost_of_a_save_is_learned_from_the_steps() -> None:
    """Count the extra time of steps during a save as the save's stall, also if ``step()`` did not block. The interval
    grows with it."""
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
    """Return no interval on other ranks, nor without ``adaptive()``."""
    assert AdaptiveSchedule(adaptive(), 1, 8).interval(0, {}, False) is None
    assert AdaptiveSchedule(every(steps=2), 0, 8).interval(0, {}, False) is None
    assert AdaptiveSchedule(None, 0, 8).interval(0, {}, False) is None
    assert AdaptiveSchedule(every(steps=2) | adaptive(), 0, 8).interval(0, {}, False) is not None


def test_risk_and_a_restless_loss_count_at_once() -> None:
    """Divide the interval by five for a risk of 25. An invalid risk counts as 1. A loss that starts to jump shortens
    the interval between two saves."""
    usual, risky, nonsense = (
        AdaptiveSchedule(adaptive(at_most="30d", overhead=0.9, risk=risk), 0, 8)
        for risk in (lambda: 1.0, lambda: 25.0, lambda: "high")
    )
    intervals = [schedule.interval(0, {}, False) for schedule in (usual, risky, nonsense)]
    assert intervals[0] / intervals[1] == pytest.approx(5, rel=0.01)  # type: ignore[operator]
    assert intervals[2] == pytest.approx(intervals[0])
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
    """Train some steps with an adaptive schedule, and return all events."""
    events: list[Event] = []
    undo = subscribe(events.append)
    try:
        model = torch.nn.Linear(4, 4)
        save = adaptive(at_most=0.2, overhead=0.9)
        with relight.Checkpointer(path, model=model, save=save, background=False, **options) as ckpt:  # type: ignore[arg-type]
            for step in range(ckpt.restore(), steps):
                time.sleep(0.005)
                ckpt.step(step)
    finally:
        undo()
    return events


def test_a_run_saves_by_it_and_its_log_keeps_why(tmp_path: Path) -> None:
    """Save on the adaptive schedule. Each change is an event, and a note in the log after the run's end."""
    events = train(tmp_path / "runs/demo", 120)
    changed = [event for event in events if event.name == "schedule.changed"]
    reasons = [event.fields["reason"] for event in events if event.name == "save.durable"]
    assert sum(reason.startswith("adaptive, every") for reason in reasons) >= 2
    notes = [note.body for note in fold(Log(open_bytes(str(tmp_path / "runs")), "demo").read()).notes]
    decisions = [decode(note.data) for note in notes if note.topic == SCHEDULE.name]  # type: ignore[union-attr]
    assert [decision.step for decision in decisions if decision is not None] == [
        decision.fields["step"] for decision in changed
    ]
    assert decisions[0] is not None
    assert decisions[0].reason == changed[0].fields["reason"]
    assert decisions[0].numbers["young_s"] > 0


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
def test_a_killed_attempt_counts_as_a_failure_and_an_ended_one_does_not(tmp_path: Path) -> None:
    """Count a process that dies by SIGKILL after some saves as one failure in the next attempt's schedule. A run that
    ended normally is no failure."""
    path = tmp_path / "runs/demo"
    child = Script(SCRIPT, str(path))
    for line in child.stdout:
        if int(line) >= 100:
            break
    child.send_signal(signal.SIGKILL)
    child.communicate()
    first = [event.fields["reason"] for event in train(path, 220) if event.name == "schedule.changed"]
    assert "1 failure in" in first[0]
    second = [event.fields["reason"] for event in train(path, 240) if event.name == "schedule.changed"]
    assert "1 failure in" in second[0]
    lives, seconds = attempt_lifetimes(fold(Log(open_bytes(str(path.parent)), "demo").read()), 10**6)
    assert len(lives) == 1
    assert seconds >= lives[0] >= 0


def test_restarts_are_read_from_incidents_and_invalid_files_are_skipped(tmp_path: Path) -> None:
    """Read the seconds from failure to step that ``relight run`` recorded. Skip damaged files and files of another
    kind."""
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
