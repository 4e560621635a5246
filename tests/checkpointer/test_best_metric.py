"""A run's own metric, which its attempts record, and what "best" selects later."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import relight
from relight.agent import SaveOutcome, SaveResult
from relight.catalog import Run
from relight.checkpointer import awaited
from relight.checkpointer.best_so_far import BestSoFar
from relight.checkpointer.hooks import CommittedSave
from relight.checkpointer.inflight import InflightSaves
from relight.checkpointer.save_handle import Save
from relight.errors import StoreUnavailable
from relight.format.records import NoteBody
from relight.format.topics import BEST_BY
from relight.log import Log, fold
from relight.observe import Event, subscribe
from relight.policy.best_by import meant
from relight.run_records.best_by import record_best_by
from relight.save_reason import ASKED
from relight.store import open_bytes
from relight.transfer import execute_copy, plan_copy
from relight.versions.branching import branch

ACC = [0.1, 0.9, 0.5, 0.4]
"""The best is step 1; the lowest loss is that of the last step."""


@pytest.fixture
def events() -> Iterator[list[Event]]:
    """Return the emitted events."""
    received: list[Event] = []
    undo = subscribe(received.append)
    yield received
    undo()


def train(path: object, values: list[float], first: int = 0, **options: object) -> relight.Checkpointer:
    """Train steps with a falling loss and the given accuracies."""
    options.setdefault("save", relight.every(steps=1))
    ckpt = relight.Checkpointer(path, x=torch.zeros(3), signals=False, background=False, **options)  # type: ignore[arg-type]
    ckpt.restore()
    for step, value in enumerate(values, first):
        ckpt.step(step, loss=10.0 - step, acc=value)
    ckpt.close(save=False)
    return ckpt


def restored(path: object, which: str) -> int:
    """Return the step that ``restore`` takes."""
    ckpt = relight.Checkpointer(path, x=torch.zeros(3), signals=False, background=False)  # type: ignore[arg-type]
    start = ckpt.restore(which)
    ckpt.close(save=False)
    return start - 1


def recorded(path: Path) -> list[tuple[str, str]]:
    """Return the metric of each NOTE in the run's log."""
    notes = [note.body for note in Run(open_bytes(path.parent), path.name).history().notes]
    return [
        (str(note.data["metric"]), str(note.data["mode"]))
        for note in notes
        if isinstance(note, NoteBody) and note.topic == BEST_BY.name
    ]


@pytest.mark.parametrize("options", [{"keep": relight.keep(last=9, best=1, metric="acc", mode="max")}, {"save": relight.every(steps=1) | relight.best("acc")}])  # fmt: skip
def test_best_is_by_the_metric_that_the_run_names(
    tmp_path: Path, options: dict[str, object], events: list[Event]
) -> None:
    """Select by the metric that ``keep`` or ``best(…)`` names in restore and load, and emit an event."""
    run = tmp_path / "runs" / "demo"
    train(run, ACC, **options)
    assert restored(run, "best") == 1
    assert [checkpoint.step for checkpoint, _ in relight.open(run).verify("best")] == [1]
    relight.load(run, "best")
    shown = [event.fields for event in events if event.name == "best.chosen"]
    assert [(fields["step"], fields["metric"], fields["mode"], fields["value"]) for fields in shown] == [
        (1, "acc", "max", 0.9)
    ] * 3
    assert shown[0]["message"] == "best by acc (max): 0.9 at step 1, the metric that the run records"
    relight.open(run).tag("top", "best")
    assert restored(run, "top") == 1


def test_selectors_name_any_metric(tmp_path: Path) -> None:
    """Select by ``best:NAME`` and ``best:NAME:MODE``, whatever the run records. Without a record, several metrics are
    an error that lists them."""
    run = tmp_path / "runs" / "demo"
    train(run, ACC)
    assert restored(run, "best:acc") == 1 and restored(run, "best:acc:min") == 0 and restored(run, "best:loss") == 3
    with pytest.raises(relight.ConfigError, match="the checkpoints have acc, loss"):
        restored(run, "best")
    with pytest.raises(relight.ConfigError, match="the checkpoints have acc, loss"):
        relight.load(run, "best")
    with pytest.raises(relight.CheckpointNotFound, match="did you mean acc"):
        restored(run, "best:accc:max")


def test_the_record_is_made_once_and_changes_with_the_script(tmp_path: Path) -> None:
    """Record nothing if a restart names the same metric or none. Another metric replaces it."""
    run = tmp_path / "runs" / "demo"
    rules = relight.keep(last=9, best=1, metric="acc")
    train(run, ACC[:2], keep=rules)
    train(run, ACC[2:3], 2, keep=rules)
    train(run, ACC[3:], 3)
    assert recorded(run) == [("acc", "max")] and restored(run, "best") == 1
    train(run, [0.3], 4, keep=relight.keep(last=9, best=1, metric="loss"))
    assert recorded(run) == [("acc", "max"), ("loss", "min")] and restored(run, "best") == 4


def test_keep_best_goes_by_the_trigger_if_it_names_no_metric(tmp_path: Path) -> None:
    """Use the trigger's metric for ``keep(best=1)``. Two metrics in the trigger are an error."""
    run = tmp_path / "runs" / "demo"
    train(run, ACC, save=relight.every(steps=1) | relight.best("acc"), keep=relight.keep(best=1))
    assert [checkpoint.step for checkpoint in relight.open(run).checkpoints()] == [1, 3]
    with pytest.raises(relight.ConfigError, match="names no metric, and save= goes by acc, loss"):
        train(run, [], save=relight.best("acc") | relight.best("loss"), keep=relight.keep(best=1))


def test_a_superseded_attempt_renames_nothing(tmp_path: Path) -> None:
    """Ignore a NOTE of a superseded attempt, and an invalid one."""
    run = tmp_path / "runs" / "demo"
    train(run, ACC, keep=relight.keep(last=9, best=1, metric="acc"))
    train(run, [0.2], 4)
    log = Log(open_bytes(run.parent), "demo")
    epoch = fold(log.read()).epoch
    record_best_by(log, ("loss", "min"), epoch - 1)
    for data in ({"metric": "loss", "mode": "min"},):
        log.append(lambda view: (NoteBody(topic=BEST_BY.name, data=data), epoch - 1))  # noqa: B023
    for odd in (
        {},
        {"metric": "loss"},
        {"metric": 3, "mode": "min"},
        {"metric": "loss", "mode": "less"},
        {"metric": "", "mode": "min"},
    ):
        log.append(lambda view: (NoteBody(topic=BEST_BY.name, data=odd), epoch))  # type: ignore[arg-type] # noqa: B023
    assert fold(log.read()).best_by == ("acc", "max") and restored(run, "best") == 1


def test_copies_branches_and_tiers_know_it(tmp_path: Path) -> None:
    """Use the same metric in a copy, a branch and a further tier, also when the nearest tier is lost."""
    near, far = tmp_path / "near", tmp_path / "far"
    tiers = relight.Tiers(
        near=str(near / "demo"), far=relight.tier(str(far / "demo"), keep=relight.keep(last=9, best=1, metric="acc"))
    )
    with relight.Checkpointer(
        tiers, x=torch.zeros(3), signals=False, background=False, save=relight.every(steps=1)
    ) as ckpt:
        ckpt.restore()
        for step, value in enumerate(ACC):
            save = ckpt.step(step, loss=10.0 - step, acc=value)
            assert save is not None and save.wait(60, until="drained")
    assert restored(near / "demo", "best") == 1
    assert restored(far / "demo", "best") == 1
    source = Run(open_bytes(near), "demo")
    execute_copy(plan_copy(source, source.history().live, open_bytes(tmp_path / "other"), "copy"))
    assert restored(tmp_path / "other" / "copy", "best") == 1
    branch(source, source.history().live[-1], "twig")
    assert recorded(near / "twig") == [("acc", "max")]
    ckpt = relight.Checkpointer(tiers, x=torch.zeros(3), signals=False, background=False)
    assert ckpt.restore("best") == 2
    ckpt.close(save=False)


def test_a_misspelt_metric_of_keep_warns_at_the_first_save_and_deletes_nothing(
    tmp_path: Path, events: list[Event]
) -> None:
    """Warn with the received metrics and the nearest name, and delete nothing."""
    run = tmp_path / "runs" / "demo"
    train(run, ACC, keep=relight.keep(best=2, metric="acct", mode="max"))
    shown = [event.fields for event in events if event.name == "metric.missing"]
    assert len(shown) == 1 and shown[0]["seen"] == ["acc", "loss"]
    assert "no step has given 'acct' yet; did you mean acc? (given so far: acc, loss)" in shown[0]["message"]
    assert [checkpoint.step for checkpoint in relight.open(run).checkpoints()] == [0, 1, 2, 3]
    events.clear()
    train(run, [math.nan, 0.7], 4, keep=relight.keep(last=9, best=2, metric="acc"))
    assert not [event for event in events if event.name == "metric.missing"]  # earlier checkpoints have the metric


def test_a_metric_that_comes_later_is_not_taken_for_a_misspelling(tmp_path: Path, events: list[Event]) -> None:
    """Suggest no other metric if ``keep`` waits for an epoch's ``val_loss`` and the steps give ``loss`` alone."""
    train(tmp_path / "demo", [0.5, 0.4], keep=relight.keep(best=1, metric="val_loss"))
    message = next(event for event in events if event.name == "metric.missing").fields["message"]
    assert message == (
        "keep(best=1, metric=\"val_loss\"): no step has given 'val_loss' yet (given so far: acc, loss); "
        "that rule keeps every checkpoint until one has it"
    )
    assert meant("val_los", ["val_loss"]) == "; did you mean val_loss?"
    assert meant("val_loss", ["loss", "train_loss"]) == meant("top1", ["top5"]) == ""


def test_a_metric_that_is_nan_each_time_deletes_nothing(tmp_path: Path, events: list[Event]) -> None:
    """Delete nothing and warn if every value is NaN. After a saved NaN, a finite value counts as better."""
    run = tmp_path / "runs" / "demo"
    train(run, [math.nan] * 3, keep=relight.keep(best=1, metric="acc"))
    assert [checkpoint.step for checkpoint in relight.open(run).checkpoints()] == [0, 1, 2]
    assert (
        "no finite value of 'acc' was given yet"
        in next(event for event in events if event.name == "metric.missing").fields["message"]
    )
    ckpt = relight.Checkpointer(
        tmp_path / "runs" / "other", state={"x": 1}, signals=False, background=False, save=relight.best("acc")
    )
    ckpt.restore()
    ckpt.save(0, metrics={"acc": math.nan})
    assert ckpt.step(1, acc=0.3) is not None
    ckpt.close(save=False)


def test_a_trigger_without_its_metric_warns_then_saves_and_raises(
    tmp_path: Path, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warn after some steps if ``save=best("val_loss")`` never gets its metric. Later raise an error and save the
    state."""
    monkeypatch.setattr(awaited, "NEVER_STEPS", 30)
    run = tmp_path / "runs" / "demo"
    ckpt = relight.Checkpointer(run, x=torch.zeros(3), signals=False, background=False, save=relight.best("val_loss"))
    ckpt.restore()
    for step in range(29):
        assert ckpt.step(step, lr=0.1) is None
        warned = [event for event in events if event.name == "metric.missing"]
        assert len(warned) == (step >= awaited.WARN_STEPS - 1)
    assert "save=best(\"val_loss\"): no step has given 'val_loss' yet (given so far: lr)" in warned[0].fields["message"]
    with pytest.raises(relight.ConfigError, match=r"never took effect in 30 steps") as caught:
        ckpt.step(29, lr=0.1)
    assert "ckpt.step(step, val_loss=value)" in caught.value.hint
    ckpt.close(save=False)
    assert [checkpoint.step for checkpoint in relight.open(run).checkpoints()] == [29]


def test_a_name_nearly_the_same_warns_at_once_and_raises_earlier(
    tmp_path: Path, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Treat ``val_los`` for ``val_loss`` as a typing error, not as a rare evaluation."""
    monkeypatch.setattr(awaited, "TYPO_STEPS", 5)
    ckpt = relight.Checkpointer(
        tmp_path / "demo", state={"x": 1}, signals=False, background=False, save=relight.best("val_los", "min")
    )
    ckpt.restore()
    ckpt.step(0, val_loss=1.0)
    assert (
        "did you mean val_loss?" in next(event for event in events if event.name == "metric.missing").fields["message"]
    )
    with pytest.raises(relight.ConfigError, match="never took effect"):
        for step in range(1, 9):
            ckpt.step(step, val_loss=1.0)
    ckpt.close(save=False)


def test_rare_evaluations_and_other_triggers_are_let_be(
    tmp_path: Path, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Continue training with one evaluation in 10,000 steps. If another trigger saves, no missing metric ends it. The
    first value ends the check."""
    assert awaited.TYPO_STEPS > 10_000 and awaited.NEVER_STEPS >= 100_000
    monkeypatch.setattr(awaited, "NEVER_STEPS", 20)
    save = relight.every(steps=1000) | relight.best("val_loss")
    ckpt = relight.Checkpointer(tmp_path / "a", state={"x": 1}, signals=False, background=False, save=save)
    ckpt.restore()
    for step in range(60):
        ckpt.step(step, lr=1.0)
    ckpt.close(save=False)
    second = relight.Checkpointer(
        tmp_path / "b", state={"x": 1}, signals=False, background=False, save=relight.best("val_loss")
    )
    second.restore()
    for step in range(60):
        second.step(step, lr=1.0, **({"val_loss": 1.0} if step == 15 else {}))
    second.close(save=False)
    assert [checkpoint.step for checkpoint in relight.open(tmp_path / "b").checkpoints()] == [15]


@pytest.mark.parametrize(
    ("save", "keep"),
    [
        (relight.every(steps=40), relight.keep(last=2, best=1, metric="val_loss")),
        (relight.best("val_loss") | relight.best("acc"), relight.keep(last=9)),
    ],
)
def test_a_metric_that_comes_late_ends_no_job_that_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Any, keep: Any
) -> None:
    """Keep everything until retention's metric arrives, and continue if another metric of the trigger saves. Neither
    ends a healthy job."""
    monkeypatch.setattr(awaited, "NEVER_STEPS", 50)
    ckpt = relight.Checkpointer(
        tmp_path / "demo", state={"x": 1}, signals=False, background=False, save=save, keep=keep
    )
    ckpt.restore()
    for step in range(150):
        ckpt.step(step, **({"val_loss": 1.0} if step == 119 else {"acc": 0.5} if step == 5 else {}))
    ckpt.close()


def test_micro_steps_are_no_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count steps, not micro-batches, while waiting for a rare evaluation."""
    monkeypatch.setattr(awaited, "NEVER_STEPS", 50)
    ckpt = relight.Checkpointer(
        tmp_path / "demo", state={"x": 1}, signals=False, background=False, save=relight.best("val_loss")
    )
    ckpt.restore()
    for step in range(40):
        for micro in range(4):
            ckpt.step(step, micro_step=micro)
        ckpt.step(step, **({"val_loss": 1.0} if step == 39 else {}))
    ckpt.close()


def test_an_unnamed_rule_among_several_metrics_warns_and_keeps_all(tmp_path: Path, events: list[Event]) -> None:
    """Guess no metric for ``keep(best=1)`` if each checkpoint has several."""
    run = tmp_path / "runs" / "demo"
    train(run, ACC, keep=relight.keep(best=1))
    shown = [event.fields["message"] for event in events if event.name == "metric.missing"]
    assert shown == [
        "keep(best=1) names no metric, and this save has acc, loss: it keeps every checkpoint until one is named"
    ]
    assert [checkpoint.step for checkpoint in relight.open(run).checkpoints()] == [0, 1, 2, 3]
    plan = relight.open(run).plan_prune(relight.keep(best=1, metric="wer"))
    assert plan.going == [] and "no checkpoint has a finite 'wer' yet (they have acc, loss)" in plan.verdicts[0].reason


def durable(loss: float) -> CommittedSave:
    """Return a checkpoint of step 0 with that loss."""
    save = Save(0, ASKED)
    return CommittedSave(save, SaveResult(1, "a"), {"loss": loss}, {}, before=None, waits=False)


def test_a_save_that_fails_is_not_the_best(tmp_path: Path) -> None:
    """While a save is written, its value counts as the best. If the save fails or is dropped, a later value can be the
    best."""
    under_way: list[dict[str, float]] = []
    best = BestSoFar(relight.best("loss"), under_way=lambda: under_way)
    best.on_durable(durable(0.7))
    under_way.append({"loss": 0.5})
    best.on_start(durable(0.5).save, {"loss": 0.5})
    assert best.values == {"loss:min": 0.5}
    best.note({"loss": 0.6})
    assert best.due({}) == {}
    under_way.clear()
    assert best.values == {"loss:min": 0.7}
    best.note({"loss": 0.6})
    assert best.due({}) == {"loss": 0.6}
    best.on_durable(durable(math.nan))
    assert best.values == {"loss:min": 0.7}


def test_after_a_failed_save_the_next_better_value_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent reports that the best value's save failed. A later value that is better than those of all checkpoints is saved."""
    on_done, fails = InflightSaves.on_done, [False, True, False]

    def report(self: InflightSaves, done: SaveOutcome) -> None:
        on_done(
            self, replace(done, error=StoreUnavailable("no store", retryable=False)) if fails and fails.pop(0) else done
        )

    monkeypatch.setattr(InflightSaves, "on_done", report)
    with relight.Checkpointer(
        tmp_path / "s" / "r",
        x=torch.zeros(3),
        signals=False,
        background=True,
        save=relight.best("loss"),
        limits=relight.Limits(when_busy="queue"),
    ) as ckpt:
        ckpt.restore()
        saved = []
        for step, loss in enumerate([0.7, 0.5, 0.6, 0.65]):
            save = ckpt.step(step, loss=loss)
            if save is not None:
                with contextlib.suppress(StoreUnavailable):
                    save.wait(60)
            saved.append(bool(save and save.done))
    assert saved == [True, False, True, False]
