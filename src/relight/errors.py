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
    ├── InternalError           report it: a fault in Relight's own code
    └── SaveFailed              a save did not become a checkpoint; training may go on

Each carries ``kind`` (stable, for programs), ``what`` happened, ``where`` (file, chunk, tensor), ``hint`` (what to do) and
``retryable``. ``details`` lists single findings where there are several.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence

from relight.run_names import shown as shown_names

PROGRAMMING_ERRORS = (TypeError, ValueError, AttributeError, AssertionError, LookupError, NameError, ArithmeticError, NotImplementedError)
"""What faulty code raises. Stores, disks and networks raise ``RelightError`` or ``OSError``."""
_FRAMES, _SHOWN_MAX = 8, 60
_HERE, _LIBRARY = os.path.dirname(os.path.abspath(__file__)) + os.sep, os.path.dirname(os.path.abspath(os.__file__)) + os.sep


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
        self.what = shown_names(what)
        self.where = shown_names(where)
        self.hint = shown_names(hint)
        self.details = tuple(shown_names(one) for one in details)
        if retryable is not None:
            self.retryable = retryable
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [f"{self.what}" + (f" [{self.where}]" if self.where else "")]
        first = self.details[:20]
        lines += [f"  - {detail}" for detail in first]
        if len(self.details) > len(first):
            lines.append(f"  … and {len(self.details) - len(first)} more")
        if self.hint:
            lines.append(f"  → {self.hint}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.hint, self.details, self.retryable))


def _rebuild(cls: type[RelightError], what: str, where: str, hint: str, details: tuple[str, ...], retryable: bool) -> RelightError:
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


class RunRemoved(CorruptCheckpoint):
    """The run's directory, or its log, was moved or deleted while a process trains the run."""

    kind = "removed"


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


class InternalError(RelightError):
    """A fault in Relight's own code. ``details`` is the traceback, the cause is ``__cause__``. A retry would repeat it."""

    kind = "internal"


def is_fault(error: BaseException) -> bool:
    """Whether ``error`` shows a fault in code, not a failure of a store. A certificate's error is a ``ValueError`` and an ``OSError``."""
    return isinstance(error, PROGRAMMING_ERRORS) and not isinstance(error, OSError)


def known(error: BaseException, where: str = "") -> RelightError:
    """Return ``error`` as a ``RelightError``: itself, ``InternalError`` for a fault in Relight's code, else ``SaveFailed``.

    A fault in other code (a component, a library) is a ``SaveFailed`` that names the line and is not retried.
    """
    if isinstance(error, RelightError):
        return error
    what = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    made: RelightError
    if not is_fault(error):
        made = SaveFailed(what, where=where)
    elif _raised_here(frames):
        lines = [f"{_place(one.filename)}:{one.lineno} in {one.name}: {one.line or ''}" for one in frames[-_FRAMES:]]
        hint = "report this traceback to Relight's authors; the store did not fail"
        made = InternalError(f"internal error in Relight: {what}", where=where, details=lines, hint=hint)
    else:
        last = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        made = SaveFailed(f"{what}{last}", where=where, hint="fix that code: the store did not fail", retryable=False)
    made.__cause__ = error
    return made


def _raised_here(frames: Sequence[traceback.FrameSummary]) -> bool:
    """Whether the innermost frame outside the standard library is Relight's. Compiled code has no frames: its caller counts."""
    for one in reversed(frames):
        if one.filename.startswith(_HERE):
            return True
        if not one.filename.startswith((_LIBRARY, "<frozen ")) or "-packages" in one.filename:
            return False
    return False


def _place(path: str) -> str:
    """A source file's path from its package on: the message may be read on another machine."""
    return "/".join(path.replace("\\", "/").rsplit("/", 3)[-3:])


def shown(value: object) -> str:
    """A value for a message: short, without its elements if it is an array or a tensor (reading one waits for its device)."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if dtype is not None and isinstance(shape, tuple) and not isinstance(value, type):
        return f"a {type(value).__name__} of dtype {dtype} and shape {tuple(shape)}"
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a caller's own __repr__: the message must not fail
        return f"a {type(value).__qualname__}"
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}… (a {type(value).__qualname__})"
