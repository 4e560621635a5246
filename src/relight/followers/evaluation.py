"""An evaluation: a command for each checkpoint of a run, with one recorded result for each."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import BinaryIO, NamedTuple

from relight.catalog.run import Run
from relight.errors import CheckpointNotFound, StoreUnavailable
from relight.followers.run_command import CommandEnd, filled, run_command
from relight.log import Checkpoint
from relight.run_names import run_name
from relight.run_records.results import EvaluationResult, record_result

RECORD_PAUSE_S = 5.0
"""Seconds before a result that could not be recorded is tried again."""


class Evaluation(NamedTuple):
    """A command, and how often and how long it may run for a checkpoint."""

    words: Sequence[str]
    name: str
    """At most one result of each name counts for a checkpoint."""
    retries: int = 1
    timeout_s: float | None = None

    def evaluate(self, run: Run, checkpoint: Checkpoint, output: BinaryIO) -> EvaluationResult:
        """Run the command until it succeeds, or all tries have failed. Return the result.

        Skipped is a checkpoint that retention removed before the command had read it.
        """
        address = f"{run.store.url.rstrip('/')}/{run_name(run.name)}@{checkpoint.id}"
        fields = {
            "checkpoint": address,
            "step": str(checkpoint.step),
            "id": checkpoint.id,
            "run": run_name(run.name),
        }
        began = time.monotonic()
        end = CommandEnd({})
        for _ in range(self.retries + 1):
            end = run_command(filled(self.words, fields), output, timeout_s=self.timeout_s)
            if not end.failed:
                break
            if not _exists(run, checkpoint):
                why = f"the checkpoint was removed meanwhile ({end.failed})"
                return EvaluationResult(checkpoint.id, self.name, skipped=why, seconds=_since(began))
        return EvaluationResult(checkpoint.id, self.name, end.metrics, end.failed, seconds=_since(began))


def default_name(words: Sequence[str]) -> str:
    """Return the name of an evaluation without one: a digest of its command."""
    return hashlib.blake2b("\0".join(words).encode(errors="surrogateescape"), digest_size=6).hexdigest()


class RecordedResult(NamedTuple):
    """The result of an evaluation, and whether this process recorded it."""

    result: EvaluationResult
    recorded: bool
    removed: bool = False
    """Whether the run no longer had the checkpoint. Then nothing is recorded, and the result is skipped."""


def record(
    run: Run, result: EvaluationResult, stopping: threading.Event, report: Callable[[str], None]
) -> RecordedResult:
    """Record a result, once. While the store does not answer, try again; ``report`` is called once."""
    silent = False
    while True:
        try:
            return RecordedResult(result, record_result(run.store, run.name, result))
        except CheckpointNotFound:  # perhaps another run has its name now
            skipped = EvaluationResult(
                result.id, result.by, skipped="the run was removed meanwhile", seconds=result.seconds
            )
            return RecordedResult(skipped, recorded=False, removed=True)
        except StoreUnavailable as error:
            if not error.retryable or stopping.is_set():
                raise
            if not silent:
                report(f"{error}; the result is recorded when the store answers")
            silent = True
        stopping.wait(RECORD_PAUSE_S)


def _exists(run: Run, checkpoint: Checkpoint) -> bool:
    try:
        return run.history().find(checkpoint.id) is not None
    except CheckpointNotFound:
        return False
    except StoreUnavailable:
        return True  # unknown: then the failure is the command's


def _since(began: float) -> float:
    return round(time.monotonic() - began, 3)
