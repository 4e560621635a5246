"""Which checkpoint is meant: choices over a history, and the event that reports by which metric."""

from __future__ import annotations

import math
from typing import NamedTuple

from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, RelightError
from relight.format.records import Metric
from relight.log import Checkpoint, History, LogView
from relight.observe import emit
from relight.policy.best_by import BEST, MODES, BestBy, best_by, is_best, no_metric

DIGITS_MAX = 30
"""Digits of a step that is looked for: Python converts no text of thousands of digits, and no step has more than 19."""
FAULTS_SAID = 5
"""Records that cannot be read which an error lists."""


def metric_value(value: Metric) -> float:
    """A stored metric as a number."""
    return float(value)


class Chosen(NamedTuple):
    """The checkpoint that a WHICH means; ``by`` is the metric if it is one of the ``best`` selectors."""

    checkpoint: Checkpoint
    by: BestBy | None = None

    @property
    def explanation(self) -> str:
        """How it was chosen, for people: ``best by val_acc (max): 0.93 at step 1200``. Empty if no metric decided."""
        if self.by is None:
            return ""
        value = metric_value(self.checkpoint.body.metrics[self.by.metric])
        return f"best by {self.by}: {value:.6g} at step {self.checkpoint.step}{f', {self.by.why}' if self.by.why else ''}"


def best(checkpoints: list[Checkpoint], metric: str, mode: str) -> Checkpoint | None:
    """Return the checkpoint with the lowest (``min``) or highest (``max``) finite ``metric`` that is not suspect; the newer of equals."""
    if mode not in MODES:
        raise ConfigError(f"mode is 'min' or 'max', not {mode!r}")
    sign = 1.0 if mode == "min" else -1.0
    scored = [
        (sign * metric_value(one.body.metrics[metric]), -one.seq, one)
        for one in checkpoints
        if metric in one.body.metrics and not one.body.suspect
    ]
    finite = [entry for entry in scored if math.isfinite(entry[0])]
    return min(finite, key=lambda entry: entry[:2])[2] if finite else None


def finite_metrics(history: History) -> set[str]:
    """Return the names of the metrics that live checkpoints have finite values of."""
    return {name for one in history.live for name, value in one.body.metrics.items() if math.isfinite(metric_value(value))}


def choose_all(history: History, which: str | int = "latest") -> list[Chosen]:
    """Return what to try, in order: for ``latest`` every live checkpoint, else one.

    ``latest`` has the newest first. Suspect checkpoints, and those that a roll-back set aside, come after all others.
    ``which``: ``latest``, ``best``, ``best:METRIC``, ``best:METRIC:min|max``, a tag, a step (its newest save), an id or its unambiguous
    beginning.
    """
    newest_first = history.live[::-1]
    if which == "latest":
        return [Chosen(one) for one in sorted(newest_first, key=lambda one: (one.id in history.rolled_back_ids, one.body.suspect))]
    return [choose(history, which)]


def candidates(history: History, which: str | int = "latest") -> list[Checkpoint]:
    """Return the checkpoints of ``choose_all``."""
    return [one.checkpoint for one in choose_all(history, which)]


def resolve(history: History, which: str | int) -> Checkpoint:
    """Return the checkpoint of ``choose``."""
    return choose(history, which).checkpoint


def report(chosen: Chosen) -> Checkpoint:
    """Emit by which metric a checkpoint was chosen, if one decided; return the checkpoint."""
    if chosen.by is not None:
        one, (metric, mode, why) = chosen.checkpoint, chosen.by
        value = metric_value(one.body.metrics[metric])
        emit("best.chosen", chosen.explanation, id=one.id, step=one.step, metric=metric, mode=mode, value=value, why=why)
    return chosen.checkpoint


def choose(history: History, which: str | int) -> Chosen:
    """Return the one checkpoint that ``which`` means; ``CheckpointNotFound`` lists what there is."""
    newest_first = history.live[::-1]
    text = str(which)
    if text == "latest" and newest_first:
        return Chosen(min(newest_first, key=lambda one: one.id in history.rolled_back_ids))
    if is_best(text):
        return _best(history, text)
    if text in history.tags:
        tagged = history.find(history.tags[text])
        if tagged:
            return Chosen(tagged)
    if text.isdecimal() and text.isascii() and len(text) <= DIGITS_MAX:
        at_step = [one for one in newest_first if one.step == int(text)]
        if at_step:
            return Chosen(at_step[0])
    matches = [one for one in newest_first if one.id.startswith(text)] if len(text) >= 3 else []
    if len(matches) == 1:
        return Chosen(matches[0])
    if matches:
        raise ConfigError(f"{text!r} begins {len(matches)} ids", hint=", ".join(one.id for one in matches[:5]))
    if text in history.retired:
        raise CheckpointNotFound(f"checkpoint {text} was retired", hint="relight log shows when and why")
    steps = ", ".join(str(one.step) for one in newest_first[:8])
    raise CheckpointNotFound(f"no checkpoint {text!r}", hint=f"there are steps {steps}" if steps else "this run has no checkpoint yet")


def _best(history: History, text: str) -> Chosen:
    newest_first, names = history.live[::-1], finite_metrics(history)
    if not newest_first:
        raise CheckpointNotFound(f"no checkpoint {text!r}", hint="this run has no checkpoint yet")
    if not names and text == BEST and history.best_by is None:
        raise CheckpointNotFound("no checkpoint has a finite metric, so none is the best", hint="pass metrics to ckpt.step(…, name=value)")
    by = best_by(text, history.best_by, names)
    found = best([one for one in newest_first if one.id not in history.rolled_back_ids] or newest_first, by.metric, by.mode)
    if found is not None:
        return Chosen(found, by)
    if by.metric in names:
        raise CheckpointNotFound(f"every checkpoint with a finite metric {by.metric!r} is suspect, or was set aside by a roll-back")
    raise no_metric(by.metric, names)


def nothing_there(view: LogView, run: str, where: str) -> RelightError:
    """Of a run without a live checkpoint: that there is none yet, or that what may be some counts for nothing, which is another thing."""
    return nothing_counts(view, where) if view.faults else CheckpointNotFound(f"run {run!r} has no checkpoint yet", where=where)


def nothing_counts(view: LogView, where: str) -> CorruptCheckpoint:
    """Of a run of which there is nothing but records that are damaged, or signed by somebody who is not trusted here."""
    return CorruptCheckpoint(
        f"this run has no checkpoint that counts, and {len(view.faults)} records of its log that count for nothing",
        where=where,
        details=[f"{fault.file}: {fault.reason}" for fault in view.faults[:FAULTS_SAID]],
        hint="name who has signed them in trust=; relight verify shows all damage; to begin anew, give the run another name",
    )
