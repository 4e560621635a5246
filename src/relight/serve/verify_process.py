"""``python -m relight.serve.verify_process STORE RUN CHECKPOINT``: verify a checkpoint for ``relight serve``, which starts it.

The first line of standard input has the store's keys and security settings. The process ends when standard input ends, so
it does not outlive the server. Each line of standard output is a ``VerifyMessage`` as JSON: the progress, then
the result, or the error that prevented it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

import msgspec

from relight.catalog.run import Run
from relight.comm import lower_priority
from relight.errors import CheckpointNotFound, RelightError, error_of
from relight.keys import StoreSecurity
from relight.keys.dumps import keep_out_of_core_dumps
from relight.log import fold
from relight.log.known_damage import was_removed
from relight.reader.verify import verify_checkpoint
from relight.store import open_bytes

NICE = 10
"""Niceness of the process: the server's event loop, and training on the same machine, come first."""
FINDINGS_MAX = 50
"""Findings that are sent to the server; it shows no more."""


class VerifyResult(msgspec.Struct):
    """All damage of a checkpoint. ``findings``: the first ``FINDINGS_MAX``, each with its file and its detail."""

    count: int
    findings: list[tuple[str, str]]
    is_unknown: bool
    """Whether the store failed to answer a read. Then nothing may be recorded about the checkpoint."""


class VerifyError(msgspec.Struct):
    """A ``RelightError``, field by field."""

    kind: str
    what: str
    where: str
    hint: str
    details: list[str]
    retryable: bool

    @classmethod
    def of(cls, error: RelightError) -> VerifyError:
        """Return the fields of ``error``."""
        return cls(error.kind, error.what, error.where, error.hint, list(error.details), error.retryable)

    def to_exception(self) -> RelightError:
        """Return the error that the process raised."""
        return error_of(self.kind)(
            self.what, where=self.where, hint=self.hint, details=self.details, retryable=self.retryable
        )


class VerifyMessage(msgspec.Struct, omit_defaults=True):
    """One line of the process's output; one of the fields is set."""

    tenths: int | None = None
    """Tenths of the checkpoint's bytes that are verified: 1 to 9."""
    result: VerifyResult | None = None
    error: VerifyError | None = None


def main() -> int:
    """Verify the checkpoint that the arguments name. Return the exit status: 1 if it could not be verified."""
    url, run, checkpoint_id = sys.argv[1:4]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends this process
    lower_priority(max(NICE, os.nice(0)))
    settings = sys.stdin.buffer.readline()
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        guard = StoreSecurity.from_line(settings)
        if guard:
            keep_out_of_core_dumps(whole=True)
        opened = Run(open_bytes(url, guard=guard), run)
        _send(VerifyMessage(result=verify(opened, checkpoint_id, lambda tenths: _send(VerifyMessage(tenths=tenths)))))
    except RelightError as error:
        _send(VerifyMessage(error=VerifyError.of(error)))
        return 1
    return 0


def verify(run: Run, checkpoint_id: str, advanced: Callable[[int], None]) -> VerifyResult:
    """Read every byte of a checkpoint. ``advanced`` is called with each tenth of the bytes that is verified: 1 to 9.

    Raise ``CheckpointNotFound`` if the run has no such checkpoint, for example if it was pruned meanwhile.
    """
    view = run.view()
    checkpoint = fold(view).find(checkpoint_id)
    if checkpoint is None:
        raise CheckpointNotFound(f"checkpoint {checkpoint_id} is no longer in the run", where=run.name)
    total, verified, tenths = max(1, checkpoint.body.stored_bytes), 0, 0

    def advance(count: int) -> None:
        nonlocal verified, tenths
        verified += count
        if (now := min(9, 10 * verified // total)) > tenths:
            tenths = now
            advanced(tenths)

    findings = verify_checkpoint(run.store, view, checkpoint, progress=advance)
    if findings and was_removed(run.store, run.name, checkpoint_id):
        raise CheckpointNotFound(f"checkpoint {checkpoint_id} was removed while it was verified", where=run.name)
    shown = [(finding.file, finding.detail) for finding in findings[:FINDINGS_MAX]]
    return VerifyResult(len(findings), shown, any(finding.is_unknown for finding in findings))


def _end_with_input() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)


def _send(message: VerifyMessage) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    try:
        status = main()
    except BrokenPipeError:  # the server has ended
        status = 1
    os._exit(status)  # threads of a library must not hold the process
