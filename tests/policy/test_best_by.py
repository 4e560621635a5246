"""Which metric "best" uses, and what a rule does if no checkpoint has its metric. Pure functions."""

from __future__ import annotations

import math

import pytest

from relight.errors import CheckpointNotFound, ConfigError
from relight.policy import Candidate, Keep, best, decide_keep, every, keep
from relight.policy.best_by import BestBy, best_by, is_best, mode_of, only_metric
from relight.policy.keep import with_recorded


def found(*metrics: dict[str, float]) -> list[Candidate]:
    """Checkpoints at steps 0, 1, …, all known to verify."""
    return [Candidate(f"c{step}", step, step, values, verified=True) for step, values in enumerate(metrics)]


def kept(rules: Keep, *metrics: dict[str, float]) -> list[int]:
    """The steps that stay."""
    return [verdict.step for verdict in decide_keep(rules, found(*metrics)) if verdict.keep]


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("loss", "min"), ("val_loss", "min"), ("valLoss", "min"), ("eval/WER", "min"), ("top5_error", "min"), ("perplexity", "min"),
        ("acc", "max"), ("val_acc@1", "max"), ("Accuracy", "max"), ("f1", "max"), ("macro-f1", "max"), ("rouge1", "max"), ("r2", "max"),
        ("mAP", None), ("lr", None), ("accurate_lossless", None), ("score_loss", None), ("", None),
    ],
)  # fmt: skip
def test_a_mode_is_taken_from_well_known_words_only(name: str, mode: str | None) -> None:
    """A name without a known word, or with two that contradict each other, has no mode."""
    assert mode_of(name) == mode


def test_nothing_is_assumed_of_an_unknown_name() -> None:
    """``keep`` and ``best`` take a well known name's mode, and ask for that of another: the old default was ``min`` for all."""
    assert keep(best=2, metric="val_acc").mode == "max" and keep(best=2, metric="val_acc", mode="min").mode == "min"
    assert best("val_acc").metrics == {("val_acc", "max")} and best("wer").metrics == {("wer", "min")}
    for make in (lambda: keep(best=1, metric="lr"), lambda: best("lr")):
        with pytest.raises(ConfigError, match="whether less or more of 'lr'"):
            make()
    assert keep(last=2, metric="lr").mode is None  # no rule goes by it
    assert keep(best=2).metric is None and keep(best=2).mode is None


def test_selectors() -> None:
    """The recorded metric counts, else the only one, else an error lists all. A name may have colons and slashes."""
    several = {"loss", "val/acc", "lr"}
    assert best_by("best", ("val/acc", "max"), several)[:2] == ("val/acc", "max")
    assert best_by("best", None, {"wer"})[:2] == ("wer", "min")
    assert best_by("best:val/acc", None, several) == BestBy("val/acc", "max")
    assert best_by("best:lr:max", None, several) == BestBy("lr", "max")
    assert best_by("best:lr", ("lr", "max"), several) == BestBy("lr", "max")
    assert best_by("best:a:b:min", None, several) == BestBy("a:b", "min")
    assert best_by("best:loss:max", None, {"loss:max", "loss"}) == BestBy("loss:max", "min")
    with pytest.raises(ConfigError, match=r"the checkpoints have loss, lr, val/acc") as caught:
        best_by("best", None, several)
    assert "best:loss:min" in caught.value.hint
    with pytest.raises(ConfigError, match="mode is missing"):
        best_by("best", None, {"lr"})
    with pytest.raises(ConfigError, match="mode is missing"):
        best_by("best:lr", None, several)
    with pytest.raises(CheckpointNotFound, match="did you mean lr"):
        best_by("best:lrs", None, several)
    assert is_best("best") and is_best("best:x") and not is_best("bestest") and not is_best(3)
    assert only_metric(set()) is None and only_metric({"loss", "acc"}) is None


def test_a_rule_without_any_value_of_its_metric_removes_nothing() -> None:
    """Keep all checkpoints if the metric is misspelt or always NaN. The reason lists the available metrics."""
    values = [{"val_loss": 3.0}, {"val_loss": 1.0}, {"val_loss": 2.0}]
    assert kept(keep(best=1, metric="val_los", mode="min"), *values) == [0, 1, 2]
    assert kept(keep(best=1, metric="val_loss"), *[{"val_loss": math.nan}] * 3) == [0, 1, 2]
    assert kept(keep(best=1, metric="val_loss"), {}, {}, {}) == [0, 1, 2]
    reason = decide_keep(keep(best=1, metric="val_los", mode="min"), found(*values))[0].reason
    assert reason == "best 1: no checkpoint has a finite 'val_los' yet (they have val_loss)"
    assert kept(keep(best=1, metric="val_loss"), {}, {"val_loss": 1.0}, {}, {}) == [1, 3]  # it has come


def test_keep_best_without_a_metric_deletes_by_no_guess() -> None:
    """Use the recorded metric, else the only one. With several metrics, keep all."""
    values = [{"loss": 3.0, "acc": 0.9}, {"loss": 2.0, "acc": 0.1}, {"loss": 1.0, "acc": 0.2}]
    assert kept(keep(best=1), *values) == [0, 1, 2]
    assert kept(with_recorded(keep(best=1), ("acc", "max")), *values) == [0, 2]
    assert kept(keep(best=1, mode="max"), {"x": 1.0}, {"x": 3.0}, {"x": 2.0}) == [1, 2]
    assert kept(keep(best=1), {"x": 1.0}, {"x": 3.0}, {"x": 2.0}) == [0, 1, 2]
    assert kept(keep(best=1), {"acc": 0.9}, {"acc": 0.1}, {"acc": 0.2}) == [0, 2]
    assert with_recorded(keep(best=1, metric="loss"), ("acc", "max")) == keep(best=1, metric="loss")


def test_a_trigger_knows_whether_it_saves_best_values_only() -> None:
    """A trigger of only ``best`` is known as such: without its metric it would save nothing."""
    assert best("loss").only_best and (best("loss") | best("acc")).only_best
    assert not (best("loss") | every(steps=3)).only_best and not every(steps=3).only_best
    assert (best("loss") | every(steps=3)).best_by == {("loss", "min")} and every(steps=3).best_by == frozenset()
