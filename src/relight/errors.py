"""The error tree, grouped by what the caller does next.

::

    RelightError
    ├── CheckpointNotFound      choose another: no checkpoint, run, tag or file of that name
    ├── CorruptCheckpoint       choose another: stored bytes differ from the committed ones
    ├── UnsafeContent           choose another: the file contains something that a reader must refuse
    ├── IncompatibleState       change the code: stored and live state do not fit
    ├── ConfigError             change the call: an option is wrong
    ├── StoreUnavailable        try again: the store refused or failed an operation
    ├── NoSpace                 make room: disk, quota, inodes
    ├── NoMemory                make room: memory of the process or of a device
    ├── LeaseHeld               wait: another process has the lease
    ├── Fenced                  stop: a newer attempt has taken over this run
    ├── WrongKey                set up: the key does not open this checkpoint
    ├── Diverged                roll back: the loss is NaN or infinite, or jumped
    ├── InternalError           report it: a fault in Relight's own code
    └── SaveFailed              a save did not become a checkpoint; training may continue

Each error has ``kind`` (stable, for programs), ``what`` happened, ``where`` (file, chunk, tensor), ``hint`` (what to
do) and ``retryable``. ``details`` lists the findings if there are several.
"""

from __future__ import annotations

import errno
import os
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from relight.run_names import shown as shown_names

PROGRAMMING_ERRORS = (
    TypeError,
    ValueError,
    AttributeError,
    AssertionError,
    LookupError,
    NameError,
    ArithmeticError,
    NotImplementedError,
)
"""Errors that indicate faulty code. Failures of stores, disks and networks are ``RelightError`` or ``OSError``."""
_FRAMES, _SHOWN_MAX = 8, 60
_HERE, _LIBRARY = (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    os.path.dirname(os.path.abspath(os.__file__)) + os.sep,
)


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
        self.details = tuple(shown_names(detail) for detail in details)
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


def _rebuild(
    cls: type[RelightError], what: str, where: str, hint: str, details: tuple[str, ...], retryable: bool
) -> RelightError:
    return cls(what, where=where, hint=hint, details=details, retryable=retryable)


def with_outcome(error: RelightError, outcome: str) -> str:
    """Return the error's text with ``outcome``, what happens next, after its first line: the hint and the details stay at the end."""
    first, *rest = str(error).split("\n")
    return "\n".join([f"{first}; {outcome}", *rest])


def error_of(kind: str) -> type[RelightError]:
    """Return the error class with ``kind``, which another process has sent; ``SaveFailed`` for an unknown kind."""
    classes: list[type[RelightError]] = [RelightError]
    for error_class in classes:
        if error_class.kind == kind and error_class is not RelightError:
            return error_class
        classes += error_class.__subclasses__()
    return SaveFailed


class CheckpointNotFound(RelightError):
    """No checkpoint, run, tag or file has that name."""

    kind = "not_found"


class CorruptCheckpoint(RelightError):
    """Stored bytes differ from the committed ones, or are missing."""

    kind = "corrupt"


class RunRemoved(CorruptCheckpoint):
    """The run's directory, or its log, was moved or deleted while a process trains the run."""

    kind = "removed"


class RunReplaced(CorruptCheckpoint):
    """Another directory, such as an older copy, is in the place of the run's while a process trains the run."""

    kind = "replaced"


class UnsafeContent(RelightError):
    """A file contains something that a reader must refuse: a path outside the store, endless nesting, absurd sizes."""

    kind = "unsafe"


class NewerFormat(UnsafeContent):
    """A newer Relight wrote this, in a format that this version cannot read. The bytes may be undamaged."""

    kind = "newer"


class IncompatibleState(RelightError):
    """Stored state does not fit the live state, or live state cannot be stored."""

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


class NoMemory(RelightError):
    """There is no memory for what a restore, a load or an import reads. The checkpoint is intact: an older one would need as much."""

    kind = "no_memory"


class LeaseHeld(RelightError):
    """Another process holds the lease that this operation needs exclusively."""

    kind = "lease"
    retryable = True


class Fenced(RelightError):
    """A newer attempt has taken over this run; this attempt can never commit again."""

    kind = "fenced"


class WrongKey(RelightError):
    """The given key does not open this checkpoint."""

    kind = "wrong_key"


class Diverged(RelightError):
    """The loss is NaN or infinite, or jumped and stayed high. Raised only under ``relight run``, which then rolls
    back."""

    kind = "diverged"


class ReplicasDiffer(RelightError):
    """Replicas of a tensor have become different: one rank has computed wrongly. Raised only under ``relight run``,
    which treats it as a failure of hardware."""

    kind = "replicas_differ"


class SaveFailed(RelightError):
    """A save did not become a checkpoint. The cause is ``__cause__``."""

    kind = "save_failed"
    retryable = True


class InternalError(RelightError):
    """A fault in Relight's own code. ``details`` is the traceback, the cause is ``__cause__``. A retry would repeat it."""

    kind = "internal"


def is_fault(error: BaseException) -> bool:
    """Return whether ``error`` indicates a fault in code, not a failure of a store. A certificate's error, which is
    both ``ValueError`` and ``OSError``, is a failure of the store."""
    return isinstance(error, PROGRAMMING_ERRORS) and not isinstance(error, OSError)


_NO_MEMORY = re.compile(
    r"can't allocate memory|[Cc]annot allocate memory|[Uu]nable to allocate|\b[Oo]ut of memory|could not create a (primitive|memory object)"
    r"|std::bad_alloc|mmap of \d+ bytes failed"
)
"""Messages of ``RuntimeError`` by which torch and its libraries report that memory was refused."""
REFUSALS = (MemoryError, RuntimeError, OSError)
"""Errors that a refusal of memory may be."""
_FAILED_AT = re.compile(r"^\[enforce fail at [^\]]*\][^.]*\. ?")
LESS_MEMORY = (
    "give the process more memory, or read less at once: restore(only=[…]), relight.load(only=[…]), or relight.load(mmap=True), which "
    "reads pages when they are used"
)


def _text(error: BaseException) -> str:
    """Return the error's text; empty if its class cannot make one."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - another library's __str__: the error itself must be reported
        return ""


def is_no_memory(error: BaseException) -> bool:
    """Return whether ``error`` is a refusal of memory, by the system or by a device's allocator."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and _NO_MEMORY.search(_text(error)) is not None
    )


_REFUSED = frozenset((errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOBUFS, errno.ENOSPC))
_REFUSED_WORDS = ("can't allocate memory", "out of memory", "can't start new thread")
"""Parts of the messages of torch's allocators and of Python's threads."""


def is_refusal(error: BaseException) -> bool:
    """Return whether the system refused memory, a descriptor, a thread or disk space. It may grant the next request."""
    if isinstance(error, OSError):
        return error.errno in _REFUSED
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in _text(error) for words in _REFUSED_WORDS)
    )


def no_memory(error: BaseException, what: str, where: str = "", hint: str = LESS_MEMORY) -> NoMemory:
    """Return the error for memory that was refused. ``what`` needs it; the refusal's own words follow, by which ``relight run`` knows a
    device's memory from the machine's."""
    first = next(iter(_FAILED_AT.sub("", str(error)).splitlines()), "")[:300] or type(error).__name__
    made = NoMemory(f"no memory for {what}: {first}", where=where, hint=hint)
    made.__cause__ = error
    return made


@contextmanager
def memory_refusals(what: str, where: str = "") -> Iterator[None]:
    """Raise ``NoMemory`` if memory is refused in the block. What allocates a tensor itself names that tensor."""
    try:
        yield
    except REFUSALS as error:
        if isinstance(error, RelightError) or not is_no_memory(error):
            raise
        raise no_memory(error, what, where) from error


_ADVICE = re.compile(r"\n(?=Search for `cuda|CUDA kernel errors might|For debugging consider|Compile with `TORCH)")
"""Where the advice begins that torch appends to every error of CUDA."""


def known(error: BaseException, where: str = "") -> RelightError:
    """Return ``error`` as a ``RelightError``: itself, ``InternalError`` for a fault in Relight's code, else ``SaveFailed``.

    A fault in other code (a component, a library) is a ``SaveFailed`` that names the line and is not retried.
    """
    if isinstance(error, RelightError):
        return error
    what = f"{type(error).__name__}: {_ADVICE.split(_text(error), maxsplit=1)[0]}"
    frames = traceback.extract_tb(error.__traceback__)
    made: RelightError
    if not is_fault(error):
        made = SaveFailed(what, where=where)
    elif _raised_here(frames):
        lines = [
            f"{_place(frame.filename)}:{frame.lineno} in {frame.name}: {frame.line or ''}"
            for frame in frames[-_FRAMES:]
        ]
        hint = "report this traceback to Relight's authors; the store did not fail"
        made = InternalError(f"internal error in Relight: {what}", where=where, details=lines, hint=hint)
    else:
        last = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        made = SaveFailed(f"{what}{last}", where=where, hint="fix that code: the store did not fail", retryable=False)
    made.__cause__ = error
    return made


def _raised_here(frames: Sequence[traceback.FrameSummary]) -> bool:
    """Return whether the innermost frame outside the standard library is Relight's. Compiled code has no frames: its
    caller counts."""
    for frame in reversed(frames):
        if frame.filename.startswith(_HERE):
            return True
        if not frame.filename.startswith((_LIBRARY, "<frozen ")) or "-packages" in frame.filename:
            return False
    return False


def _place(path: str) -> str:
    """Return the last three components of a source file's path: the message may be read on another machine."""
    return "/".join(path.replace("\\", "/").rsplit("/", 3)[-3:])


def shown(value: object) -> str:
    """Return a short text of a value for a message. Elements of an array or tensor are not read, which could wait for a
    device."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if dtype is not None and isinstance(shape, tuple) and not isinstance(value, type):
        return f"a {type(value).__name__} of dtype {dtype} and shape {tuple(shape)}"
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a caller's own __repr__: the message must not fail
        return f"a {type(value).__qualname__}"
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}… (a {type(value).__qualname__})"


def extra_command(extra: str) -> str:
    """Return the command that adds an extra to the installed Relight. pip needs no index for Relight itself, since it is installed: from
    a clone, a Git address or a file."""
    return f"pip install 'relight[{extra}]'"


def extra_hint(extra: str) -> str:
    """Return the hint of an error that a library of an extra is missing."""
    return f"{extra_command(extra)}, which adds it to the installed Relight"
