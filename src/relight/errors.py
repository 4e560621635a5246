"""The error tree, grouped by what the caller does next.

::

    RelightError
    ├── CheckpointNotFound      choose another: nothing there under that name
    ├── CorruptCheckpoint       choose another: bytes are not what was committed
    ├── UnsafeContent           choose another: the file asks for something a reader must refuse
    ├── IncompatibleState       change the code: what is stored and what is live do not fit
    ├── ConfigError             change the call: an option is wrong
    ├── StoreUnavailable        try again: the store did not answer as it should
    ├── NoSpace                 make room: disk, quota, inodes
    ├── LeaseHeld               wait: somebody else is at it
    ├── Fenced                  stop: a newer attempt is in charge of this run
    ├── WrongKey                set up: the key does not open this
    ├── Diverged                go back: the loss is no number, or jumped
    └── SaveFailed              a save did not become a checkpoint; training may go on

Each carries ``kind`` (stable, for programs), ``what`` happened, ``where`` (file, chunk, tensor), ``hint`` (what to do) and
``retryable``. ``details`` lists single findings where there are several.
"""

from __future__ import annotations

from collections.abc import Sequence


class RelightError(Exception):
    """Base of every error Relight raises on purpose."""

    kind = "relight"
    retryable = False

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        hint: str = "",
        details: Sequence[str] = (),
        retryable: bool | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.hint = hint
        self.details = tuple(details)
        if retryable is not None:
            self.retryable = retryable
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [f"{self.what}" + (f" [{self.where}]" if self.where else "")]
        shown = self.details[:20]
        lines += [f"  - {detail}" for detail in shown]
        if len(self.details) > len(shown):
            lines.append(f"  … and {len(self.details) - len(shown)} more")
        if self.hint:
            lines.append(f"  → {self.hint}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.hint, self.details, self.retryable))


def _rebuild(
    cls: type[RelightError], what: str, where: str, hint: str, details: tuple[str, ...], retryable: bool
) -> RelightError:
    return cls(what, where=where, hint=hint, details=details, retryable=retryable)


def error_of(kind: str) -> type[RelightError]:
    """The class of errors of that kind, as it was told by another process; ``SaveFailed`` for one that is not known here."""
    found: list[type[RelightError]] = [RelightError]
    for one in found:
        if one.kind == kind and one is not RelightError:
            return one
        found += one.__subclasses__()
    return SaveFailed


class CheckpointNotFound(RelightError):
    """No checkpoint, run, tag or file of that name."""

    kind = "not_found"


class CorruptCheckpoint(RelightError):
    """Stored bytes differ from what was committed, or are not there."""

    kind = "corrupt"


class UnsafeContent(RelightError):
    """A file asks for something no reader may do: leave the store, nest without end, claim absurd sizes."""

    kind = "unsafe"


class IncompatibleState(RelightError):
    """What is stored does not fit what is live, or what is live cannot be stored."""

    kind = "incompatible"


class ConfigError(RelightError):
    """An option or argument is wrong."""

    kind = "config"


class StoreUnavailable(RelightError):
    """The store refused or failed an operation; it may work later."""

    kind = "store"
    retryable = True


class NoSpace(StoreUnavailable):
    """Disk, quota or inodes are exhausted."""

    kind = "no_space"


class LeaseHeld(RelightError):
    """Somebody else holds what this operation needs alone."""

    kind = "lease"
    retryable = True


class Fenced(RelightError):
    """A newer attempt is in charge of this run; this one can never commit again."""

    kind = "fenced"


class WrongKey(RelightError):
    """The key at hand does not open this checkpoint."""

    kind = "wrong_key"


class Diverged(RelightError):
    """The loss is no number, or jumped and stayed. Raised only under ``relight run``, which then goes back to before it."""

    kind = "diverged"


class ReplicasDiffer(RelightError):
    """Ranks that held the same tensor no longer do: one of them has computed wrongly. Raised only under ``relight run``, which then goes
    back to before it.
    """

    kind = "replicas_differ"


class SaveFailed(RelightError):
    """A save did not become a checkpoint. The cause is ``__cause__``."""

    kind = "save_failed"
    retryable = True
