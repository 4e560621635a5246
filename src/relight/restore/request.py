"""What a restore is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from relight.catalog.tiers import Further
from relight.peers import Remote
from relight.ranks.group import SINGLE_RANK, RankGroup
from relight.store import ByteStore

Rename = Mapping[str, str] | Callable[[str], str] | None


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """Restore checkpoint ``which`` of a run into ``components``.

    ``latest`` tries checkpoints from newest to oldest until one verifies. Any other value names one checkpoint, which is
    restored or an error is raised.
    """

    store: ByteStore
    """The nearest tier. Where rank 0 reads for all ranks, only rank 0 uses it."""
    run: str
    components: Mapping[str, object]
    which: str | int = "latest"
    only: Sequence[str] | None = None
    """Patterns of names to restore; None: all."""
    strict: bool = True
    """Whether stored and live names must agree."""
    rename: Rename = None
    """From stored names to live names."""
    ranks: RankGroup = SINGLE_RANK
    further: Sequence[Further] = ()
    """The tiers after the store."""
    remote: Callable[[], Remote | None] = lambda: None
    """Access to snapshots in the memory of other nodes."""
    first_step: int = 0
    """The number that the job gives its first step: a requested rollback names steps by such numbers."""

    @property
    def where(self) -> str:
        """Store and run, for messages."""
        return f"{self.store.url.rstrip('/')}/{self.run}"
