"""How the ranks of a job get a checkpoint: each rank reads the stores itself, or rank 0 reads and sends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from relight.catalog.tiers import TierCopy
from relight.format import Tensor
from relight.layout import Sink
from relight.restore.result import Resumed


class CopiesToTry(NamedTuple):
    """The copies of checkpoints that a restore tries, in order, the same on all ranks."""

    copies: Iterable[TierCopy]
    tiers: Sequence[str]
    """Names of the tiers, by position."""
    silent: set[int]
    """Positions of tiers that did not answer: the restore adds to it."""


class CheckpointView(NamedTuple):
    """A checkpoint as one rank restores it: everything but the tensors' bytes."""

    tensors: Sequence[Tensor]
    tree: Any
    """The decoded tree of this rank's state. Its leaves refer to ``tensors``."""
    own: Sequence[Any]
    """The tree of each saved rank's own state."""
    saved: int
    """Number of ranks that saved."""
    prefix: str
    """The checkpoint's directory, for messages."""
    environment: dict[str, Any]
    exact: Sequence[str]
    """Reasons why training may not continue bit-exactly."""
    user: dict[str, Any]
    check: Callable[[int], None] | None = None
    """Checks that a tensor's bytes exist, before memory is allocated for it."""


class RestoreTransport(Protocol):
    """One rank's side of reading. All methods but ``close`` are collective."""

    reads: bool
    """Whether this rank reads the stores."""

    def find(self, result: Resumed) -> CopiesToTry:
        """Read the logs of all tiers. Return the copies to try."""

    def open(self, copy: TierCopy) -> CheckpointView:
        """Open a copy, and check its metadata. Raise on all ranks if it is damaged."""

    def read(self, sinks: Mapping[int, Sink]) -> tuple[int, str]:
        """Read the bytes of the opened copy into the sinks, by number of tensor. Return the bytes read, and the source:
        ``memory``, ``peers`` or ``store``. Raise on all ranks if bytes are damaged or missing."""

    def close(self, error: BaseException | None) -> None:
        """Release the memory of this node that was read. ``error`` ends the restore, None after a success."""
