"""Metrics that are reported after a commit count as the checkpoint's own, once for each evaluation."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.drain.test_drain import begin
from tests.log.test_log_stale_listings import save

import relight
from relight.catalog import Run
from relight.drain import drain
from relight.errors import CheckpointNotFound, ConfigError
from relight.format.topics import RESULT
from relight.log import Log, fold
from relight.log import summary as summaries
from relight.run_records.results import EvaluationResult, record_result, results_of
from relight.store import LocalStore, open_bytes


def made(path: Path, steps: int = 3) -> list[str]:
    """Save checkpoints with a loss, and return their ids."""
    return [
        relight.save(path, {"value": step, "weights": torch.ones(4)}, step=step, metrics={"loss": 1.0 / (step + 1)}).id
        for step in range(steps)
    ]


def test_reported_metrics_count_as_the_checkpoints_own(tmp_path: Path) -> None:
    """``best:METRIC``, retention, and the list of checkpoints use them; a later value replaces an earlier one."""
    ids = made(tmp_path / "s/run", 4)
    store = relight.open(tmp_path / "s/run")
    for step, accuracy in enumerate((0.1, 0.9, 0.5)):
        assert store.report({"accuracy": accuracy, "loss": 7}, step)
    assert store.checkpoints()[1].metrics == {"loss": 7, "accuracy": 0.9}
    assert store.checkpoints()[3].metrics == {"loss": 0.25}
    assert relight.load(tmp_path / "s/run", "best:accuracy")["value"] == 1
    plan = store.plan_prune(relight.keep(last=1, best=1, metric="accuracy"))
    assert plan.going == [ids[0], ids[2]]
    assert store.report({"accuracy": 0.95}, 2)
    assert relight.load(tmp_path / "s/run", "best:accuracy")["value"] == 2


def test_one_result_of_a_name_counts(tmp_path: Path) -> None:
    """Of many writers at once with the same name, one records its result. Another name records another."""
    ids = made(tmp_path / "s/run", 1)
    store, recorded = open_bytes(tmp_path / "s"), []
    barrier = threading.Barrier(6)

    def write(number: int) -> None:
        barrier.wait()
        recorded.append(record_result(store, "run", EvaluationResult(ids[0], "eval", {"accuracy": number})))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(recorded) == [False] * 5 + [True]
    assert len(results_of(Run(store, "run").history(), "eval")) == 1
    assert relight.open(tmp_path / "s/run").report({"accuracy": 0.5}, name="eval") is False
    assert relight.open(tmp_path / "s/run").report({"f1": 0.5}, name="other") is True


@pytest.mark.parametrize(
    "metrics", [[], {"": 1.0}, {"a\n": 1.0}, {1: 1.0}, {"a": "much"}, {"a": None}, {"a": torch.ones(2)}], ids=repr
)
def test_other_metrics_than_numbers_are_refused(metrics: Any, tmp_path: Path) -> None:
    """With a ``ConfigError``; nothing is recorded."""
    made(tmp_path / "s/run", 1)
    with pytest.raises(ConfigError):
        relight.open(tmp_path / "s/run").report(metrics)
    assert results_of(Run(open_bytes(tmp_path / "s"), "run").history()) == []


@pytest.mark.parametrize("name", ["x" * 201, "a\n", 5], ids=["long", "line", "number"])
def test_a_name_that_a_record_cannot_hold_is_refused(name: Any, tmp_path: Path) -> None:
    """A shortened name would not be found again, so each report would be recorded."""
    ids = made(tmp_path / "s/run", 1)
    with pytest.raises(ConfigError):
        relight.open(tmp_path / "s/run").report({"accuracy": 0.5}, name=name)
    store = open_bytes(tmp_path / "s")
    with pytest.raises(ConfigError):
        record_result(store, "run", EvaluationResult(ids[0], name, {}))
    longest = EvaluationResult(ids[0], "x" * 200, {})
    assert record_result(store, "run", longest) and not record_result(store, "run", longest)


def test_numbers_of_every_kind_are_recorded(tmp_path: Path) -> None:
    """Ints, bools, NaN, infinities, tensors of one element. A NaN is never the best."""
    made(tmp_path / "s/run", 2)
    store = relight.open(tmp_path / "s/run")
    store.report({"a": torch.tensor(2.5), "b": True, "c": math.inf, "accuracy": math.nan, "d": 1 << 70}, 0)
    store.report({"accuracy": 0.1}, 1)
    assert store.checkpoints()[0].metrics == {
        "loss": 1.0,
        "a": 2.5,
        "b": 1,
        "c": "inf",
        "accuracy": "nan",
        "d": 2.0**70,
    }
    assert relight.load(tmp_path / "s/run", "best:accuracy")["value"] == 1


def test_results_outlive_summaries_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All results of a live checkpoint are in the log's summary, however many records follow."""
    monkeypatch.setattr(summaries, "SUMMARY_EVERY", 8)
    ids = made(tmp_path / "s/run", 1)
    store = open_bytes(tmp_path / "s")
    for number in range(60):
        record_result(store, "run", EvaluationResult(ids[0], f"eval{number}", {f"m{number}": number}))
    view = Log(store, "run").read()
    assert view.summary is not None and fold(view).live[0].metrics["m0"] == 0
    assert len(results_of(fold(view))) == 60 and not record_result(store, "run", EvaluationResult(ids[0], "eval0", {}))


def test_an_unknown_checkpoint_gets_no_result(tmp_path: Path) -> None:
    """The log must know the id. A NOTE with other metrics than numbers, of a newer Relight, adds none."""
    ids = made(tmp_path / "s/run", 1)
    store = open_bytes(tmp_path / "s")
    with pytest.raises(CheckpointNotFound):
        record_result(store, "run", EvaluationResult("0" * 10, "eval", {}))
    for text in ('{"a":"x"}', "[]", "{", '{"a":{}}'):
        Log(store, "run").append(
            lambda view, text=text: (RESULT.note(RESULT.kind(id=ids[0], metrics=text)), fold(view).epoch)  # type: ignore[misc]
        )
    assert Run(store, "run").history().live[0].metrics == {"loss": 1.0}


def test_results_are_carried_to_further_tiers(tmp_path: Path) -> None:
    """Also those recorded after the copy, each once. A further tier's retention and ``best`` know the metrics then."""
    attempt = begin(tmp_path)
    save(attempt, 0)
    for number in range(2):
        drain(attempt.store, "run")
        (checkpoint,) = attempt.history().live
        record_result(attempt.store, "run", EvaluationResult(checkpoint.id, f"eval{number}", {f"m{number}": number}))
    for _ in range(2):
        drain(attempt.store, "run")
    far = Run(LocalStore(tmp_path / "far"), "run").history()
    assert far.live[0].metrics == attempt.history().live[0].metrics and far.live[0].metrics["m1"] == 1
    assert [result.by for result in results_of(far)] == ["eval0", "eval1"]
