"""Choose a checkpoint of a history by step, tag, id, metric or age, and emit the event that reports the deciding metric."""

from __future__ import annotations

import math
from difflib import get_close_matches
from typing import NamedTuple

from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, RelightError
from relight.format.names import BRANCH_TAGS
from relight.format.records import Metric
from relight.log import Checkpoint, History, LogView
from relight.observe import emit
from relight.policy.best_by import BEST, MODES, BestBy, best_by, is_best, no_metric

STEP = "step="
"""Beginning of the selector of a step: ``step=400``. A bare number is accepted, too."""
DIGITS_MAX = 30
"""Largest number of digits of a requested step: Python refuses to convert thousands of digits, and no step has more than 19."""
FAULTS_SHOWN = 5
"""Largest number of unreadable records that an error lists."""


def metric_value(value: Metric) -> float:
    """Return a stored metric as a number."""
    return float(value)


class Chosen(NamedTuple):
    """Checkpoint that a WHICH means. ``by``: the metric, if WHICH is a ``best`` selector."""

    checkpoint: Checkpoint
    by: BestBy | None = None

    @property
    def explanation(self) -> str:
        """Text for people on how it was chosen: ``best by val_acc (max): 0.93 at step 1200``. Empty if no metric decided."""
        if self.by is None:
            return ""
        value = metric_value(self.checkpoint.metrics[self.by.metric])
        return (
            f"best by {self.by}: {value:.6g} at step {self.checkpoint.step}{f', {self.by.why}' if self.by.why else ''}"
        )


def best(checkpoints: list[Checkpoint], metric: str, mode: str) -> Checkpoint | None:
    """Return the checkpoint, not suspect, with the lowest (``min``) or highest (``max``) finite ``metric``. Of equal ones, the newest."""
    if mode not in MODES:
        raise ConfigError(f"mode must be 'min' or 'max', not {mode!r}")
    sign = 1.0 if mode == "min" else -1.0
    scored = [
        (sign * metric_value(checkpoint.metrics[metric]), -checkpoint.seq, checkpoint)
        for checkpoint in checkpoints
        if metric in checkpoint.metrics and not checkpoint.body.suspect
    ]
    finite = [entry for entry in scored if math.isfinite(entry[0])]
    return min(finite, key=lambda entry: entry[:2])[2] if finite else None


def finite_metrics(history: History) -> set[str]:
    """Return the names of the metrics with a finite value in some live checkpoint."""
    return {
        name
        for checkpoint in history.live
        for name, value in checkpoint.metrics.items()
        if math.isfinite(metric_value(value))
    }


def choose_all(history: History, which: str | int = "latest") -> list[Chosen]:
    """Return the checkpoints to try, in order: for ``latest`` every live checkpoint, otherwise one.

    ``latest`` has the newest first. Suspect checkpoints come after all others, and last those that were rolled back, the oldest first.
    ``which``: ``latest``, ``best``, ``best:METRIC``, ``best:METRIC:min|max``, ``step=N`` or N (the step's newest save), a tag, an id or its
    unambiguous beginning.
    """
    newest_first = history.live[::-1]
    if which == "latest":
        return [
            Chosen(checkpoint) for checkpoint in sorted(newest_first, key=lambda checkpoint: _turn(history, checkpoint))
        ]
    return [choose(history, which)]


def _turn(history: History, checkpoint: Checkpoint) -> tuple[bool, bool, int]:
    """Return the key by which ``latest`` orders checkpoints."""
    rolled_back = checkpoint.id in history.rolled_back_ids
    return rolled_back, checkpoint.body.suspect, checkpoint.seq if rolled_back else -checkpoint.seq


def candidates(history: History, which: str | int = "latest") -> list[Checkpoint]:
    """Return the checkpoints of ``choose_all``."""
    return [chosen.checkpoint for chosen in choose_all(history, which)]


def resolve(history: History, which: str | int) -> Checkpoint:
    """Return the checkpoint of ``choose``."""
    return choose(history, which).checkpoint


def report(chosen: Chosen) -> Checkpoint:
    """Emit ``best.chosen`` if a metric decided. Return the checkpoint."""
    if chosen.by is not None:
        checkpoint, (metric, mode, why) = chosen.checkpoint, chosen.by
        value = metric_value(checkpoint.metrics[metric])
        emit(
            "best.chosen",
            chosen.explanation,
            id=checkpoint.id,
            step=checkpoint.step,
            metric=metric,
            mode=mode,
            value=value,
            why=why,
        )
    return chosen.checkpoint


def choose(history: History, which: str | int) -> Chosen:
    """Return the one checkpoint that ``which`` means. ``CheckpointNotFound`` lists the existing ones."""
    newest_first = history.live[::-1]
    text = str(which)
    if text == "latest" and newest_first:
        return Chosen(min(newest_first, key=lambda checkpoint: checkpoint.id in history.rolled_back_ids))
    if is_best(text):
        return _best(history, text)
    if text.startswith(STEP):  # no tag begins so: a tag has no equals sign
        digits = text.removeprefix(STEP)
        if digits and not is_step(digits):
            raise ConfigError(
                f"{text[:80]!r} names no step", hint=f"write {STEP}N with a whole number, such as {STEP}400"
            )
        at_step = [checkpoint for checkpoint in newest_first if digits and checkpoint.step == int(digits)]
        if at_step:
            return Chosen(at_step[0])
        raise _not_found(history, text)
    if text in history.tags:
        tagged = history.find(history.tags[text])
        if tagged:
            return Chosen(tagged)
    if is_step(text):
        at_step = [checkpoint for checkpoint in newest_first if checkpoint.step == int(text)]
        if at_step:
            return Chosen(at_step[0])
    # digits are a step: one that does not exist must not mean another checkpoint
    is_id = len(text) >= 3 and (not is_step(text) or text in history.by_id)
    matches = [checkpoint for checkpoint in newest_first if checkpoint.id.startswith(text)] if is_id else []
    if len(matches) == 1:
        return Chosen(matches[0])
    if matches:
        raise ConfigError(
            f"{text!r} is the beginning of {len(matches)} ids",
            hint=", ".join(checkpoint.id for checkpoint in matches[:5]),
        )
    if text in history.retired:
        raise CheckpointNotFound(f"checkpoint {text} was retired", hint="relight log shows when and why")
    if "@" in text:
        hint = "a run restores its own checkpoints: relight branch STORE/RUN@WHICH NAME makes a run that begins at another run's"
        raise CheckpointNotFound(f"no checkpoint {text!r}", hint=hint)
    raise _not_found(history, text)


def is_step(text: str) -> bool:
    """Return whether ``text`` is the number of a step."""
    return text.isdecimal() and text.isascii() and len(text) <= DIGITS_MAX


def _not_found(history: History, text: str) -> CheckpointNotFound:
    """Return the error for a name that no checkpoint has. Its hint lists the nearest steps and tags."""
    what = f"no checkpoint {text[:80]!r}"
    if not history.live:
        return CheckpointNotFound(what, hint="this run has no checkpoint yet")
    tags = sorted(name for name in history.tags if not name.startswith(BRANCH_TAGS))
    digits = text.removeprefix(STEP)
    if is_step(digits):
        nearest = sorted({checkpoint.step for checkpoint in history.live}, key=lambda step: abs(step - int(digits)))
        return CheckpointNotFound(what, hint=f"the nearest steps are {', '.join(map(str, sorted(nearest[:4])))}")
    close = get_close_matches(text, [*tags, "latest", BEST], n=2)
    near = f"did you mean {' or '.join(close)}? " if close else ""
    steps = ", ".join(str(checkpoint.step) for checkpoint in history.live[::-1][:8])
    return CheckpointNotFound(
        what, hint=f"{near}there are steps {steps}" + (f", and tags {', '.join(tags[:8])}" if tags else "")
    )


def _best(history: History, text: str) -> Chosen:
    newest_first, names = history.live[::-1], finite_metrics(history)
    if not newest_first:
        raise CheckpointNotFound(f"no checkpoint {text!r}", hint="this run has no checkpoint yet")
    if not names and text == BEST and history.best_by is None:
        raise CheckpointNotFound(
            "no checkpoint has a finite metric, so none is the best", hint="pass metrics to ckpt.step(…, name=value)"
        )
    by = best_by(text, history.best_by, names)
    winner = best(
        [checkpoint for checkpoint in newest_first if checkpoint.id not in history.rolled_back_ids] or newest_first,
        by.metric,
        by.mode,
    )
    if winner is not None:
        return Chosen(winner, by)
    if by.metric in names:
        raise CheckpointNotFound(
            f"every checkpoint with a finite metric {by.metric!r} is suspect, or was set aside by a roll-back"
        )
    raise no_metric(by.metric, names)


def nothing_there(view: LogView, run: str, where: str) -> RelightError:
    """Return the error for a run without a live checkpoint: none was saved yet, or its records are damaged or untrusted."""
    return (
        nothing_counts(view, where)
        if view.faults
        else CheckpointNotFound(f"run {run!r} has no checkpoint yet", where=where)
    )


def nothing_counts(view: LogView, where: str) -> CorruptCheckpoint:
    """Return the error for a run without a usable record: all remaining ones are damaged, or their signer is not trusted here."""
    return CorruptCheckpoint(
        f"this run has no valid checkpoint: {len(view.faults)} records of its log are damaged, or signed by a key that is not trusted",
        where=where,
        details=[f"{fault.file}: {fault.reason}" for fault in view.faults[:FAULTS_SHOWN]],
        hint="if they are signed, name the signer in trust=; relight verify shows all damage; or give the run another name",
    )
