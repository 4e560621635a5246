"""Which checkpoint is meant: pure choices over a history."""

from __future__ import annotations

import math

from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, RelightError
from relight.format.records import Metric
from relight.log import Checkpoint, History, View

FAULTS_SAID = 5
"""Records that cannot be read which an error lists."""


def metric_value(value: Metric) -> float:
    """A stored metric as a number."""
    return float(value)


def best(checkpoints: list[Checkpoint], metric: str, mode: str) -> Checkpoint | None:
    """The one with the lowest (``min``) or highest (``max``) finite ``metric``, none that is suspect; the newer of equals."""
    if mode not in ("min", "max"):
        raise ConfigError(f"mode is 'min' or 'max', not {mode!r}")
    sign = 1.0 if mode == "min" else -1.0
    scored = [
        (sign * metric_value(one.body.metrics[metric]), -one.seq, one)
        for one in checkpoints
        if metric in one.body.metrics and not one.body.suspect
    ]
    finite = [entry for entry in scored if math.isfinite(entry[0])]
    return min(finite, key=lambda entry: entry[:2])[2] if finite else None


def candidates(history: History, which: str | int = "latest", *, metric: str = "loss", mode: str = "min") -> list[Checkpoint]:
    """What to try, in order. ``latest`` is every live checkpoint, newest first, suspect ones and those that a roll-back went behind, behind
    all others; anything else is one checkpoint.

    ``which``: ``latest``, ``best``, a tag, a step (the newest save of it), an id or an unambiguous beginning of one.
    """
    newest_first = history.live[::-1]
    if which == "latest":
        return sorted(newest_first, key=lambda one: (one.id in history.set_aside, one.body.suspect))
    return [resolve(history, which, metric=metric, mode=mode)]


def resolve(history: History, which: str | int, *, metric: str = "loss", mode: str = "min") -> Checkpoint:
    """The one checkpoint ``which`` means, or ``CheckpointNotFound`` with what there is."""
    newest_first = history.live[::-1]
    text = str(which)
    if text == "latest" and newest_first:
        return min(newest_first, key=lambda one: one.id in history.set_aside)
    if text == "best":
        found = best([one for one in newest_first if one.id not in history.set_aside] or newest_first, metric, mode)
        if found:
            return found
        raise CheckpointNotFound(f"no checkpoint has a finite metric {metric!r}", hint="pass it to ckpt.step(…, metric=value)")
    if text in history.tags:
        tagged = history.find(history.tags[text])
        if tagged:
            return tagged
    if text.isdigit():
        at_step = [one for one in newest_first if one.step == int(text)]
        if at_step:
            return at_step[0]
    matches = [one for one in newest_first if one.id.startswith(text)] if len(text) >= 3 else []
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ConfigError(f"{text!r} begins {len(matches)} ids", hint=", ".join(one.id for one in matches[:5]))
    if text in history.retired:
        raise CheckpointNotFound(f"checkpoint {text} was retired", hint="relight log shows when and why")
    steps = ", ".join(str(one.step) for one in newest_first[:8])
    raise CheckpointNotFound(
        f"no checkpoint {text!r}", hint=f"there are steps {steps}" if steps else "this run has no checkpoint yet"
    )


def nothing_there(view: View, run: str, where: str) -> RelightError:
    """Of a run without a live checkpoint: that there is none yet, or that what may be some counts for nothing, which is another thing."""
    return nothing_counts(view, where) if view.faults else CheckpointNotFound(f"run {run!r} has no checkpoint yet", where=where)


def nothing_counts(view: View, where: str) -> CorruptCheckpoint:
    """Of a run of which there is nothing but records that are damaged, or signed by somebody who is not trusted here."""
    return CorruptCheckpoint(
        f"this run has no checkpoint that counts, and {len(view.faults)} records of its log that count for nothing",
        where=where,
        details=[f"{fault.file}: {fault.reason}" for fault in view.faults[:FAULTS_SAID]],
        hint="name who has signed them in trust=; relight verify shows all damage; to begin anew, give the run another name",
    )
