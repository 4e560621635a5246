"""Read access to a Checkpointer: its components, store and run, and the state of the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from relight.capture import capture
from relight.catalog.tiers import Further
from relight.checkpointer.adaptive_schedule import AdaptiveSchedule
from relight.checkpointer.closed import RunEnd
from relight.checkpointer.component_watch import ComponentWatch
from relight.checkpointer.inflight import InflightSaves
from relight.checkpointer.options import RunOptions
from relight.checkpointer.run_progress import RunProgress
from relight.checkpointer.save_requests import user_of
from relight.checkpointer.tier_replication import TierReplicator
from relight.errors import ConfigError
from relight.format.step_number import step_of
from relight.policy.rollback_env import SPLIT
from relight.ranks.group import RankGroup
from relight.restore.result import Resumed
from relight.store import ByteStore
from relight.store.wrapper import guard_of

if TYPE_CHECKING:
    from relight.checkpointer.closed import Closed
    from relight.checkpointer.save_writer import SaveWriter
    from relight.commit import Attempt


class Holds:
    """Base class of ``Checkpointer`` with its properties and item access. Nothing here saves or restores."""

    _components: dict[str, object]
    _run: str
    _store: ByteStore
    _further: Sequence[Further]
    _resumed: Resumed
    _progress: RunProgress
    _ranks: RankGroup
    _watch: ComponentWatch
    _closed: Closed | None
    _outwards: TierReplicator
    _under_way: InflightSaves
    _schedule: AdaptiveSchedule
    _attempt: Attempt | None
    _background: SaveWriter | None
    _options: RunOptions
    _environment: Callable[[], dict[str, Any]] | None

    @property
    def ended(self) -> RunEnd:
        """How the run ended on this rank, after ``close()`` or the ``with`` block."""
        unsaved = self._unsaved or self._under_way.lacks(self._progress.at)
        return RunEnd(self._progress.step, dict(self._outwards.missing), self._closed is not None and self._closed.saves and unsaved)

    @property
    def _unsaved(self) -> bool:
        """Whether no save has the last step of this attempt."""
        if self._attempt is None or self._progress.step is None:
            return False
        return self._progress.at != self._progress.saved

    @property
    def phase(self) -> str:
        """The current phase of training, one of ``relight.adaptive(phases=…)``; an empty name: none.

        Set it on all ranks.
        """
        return self._schedule.phase

    @phase.setter
    def phase(self, name: str) -> None:
        self._schedule.phase = name

    def describe_state(self) -> dict[str, Any]:
        """Return what a save would contain: ``found`` and ``missed`` (lists of sentences), ``bytes`` and ``tensors``.

        Copies nothing.
        """
        state = capture(self._components)
        missed = [*state.missed, *self._watch.sentences]
        return {"found": state.found, "missed": missed, "bytes": state.logical_bytes, "tensors": len(state.items)}

    def __getitem__(self, name: str) -> Any:
        """Return a component; for a plain value, the value that was restored or last set."""
        return self._components[name]

    def __setitem__(self, name: str, value: object) -> None:
        """Set a component that is a plain value."""
        if name not in self._components:
            raise ConfigError(f"no component {name!r}", hint=f"give it to the Checkpointer first: state={{{name!r}: …}}")
        self._components[name] = value

    @property
    def store_urls(self) -> list[str]:
        """The URLs of the stores that this rank writes to, nearest first; last the anchor, which records the end of the
        log."""
        anchor = guard_of(self._store).anchor
        return [self._store.url, *(store.url for _, store, _ in self._further), *([anchor] if anchor else [])]

    @property
    def components(self) -> Mapping[str, object]:
        """The components by name."""
        return self._components

    @property
    def run(self) -> str:
        """The run's name."""
        return self._run

    @property
    def micro_step(self) -> int | None:
        """The first micro-batch still to run of the step that ``restore`` returned, if the checkpoint was saved within
        a step."""
        return None if self._resumed.micro_step is None else self._resumed.micro_step + 1

    def should_skip(self, step: int) -> bool:
        """Return whether to skip the samples of ``step``, because the loss was not finite or jumped after them: draw
        the batch, and do not train on it. The answer is as of the last ``restore``."""
        step = step_of(step)
        return any(first <= step <= last for first, last in self._resumed.skips)

    @property
    def replica_mismatch(self) -> str:
        """Tensors with replicas that were equal at an earlier save and differed at the last one, as a sentence; empty if
        none."""
        return self._ranks.turned

    @property
    def micro_batch_split(self) -> int:
        """The number of parts into which to split each micro-batch: 1, or more after an accelerator ran out of memory
        under ``relight run`` with ``[supervise] split = true``."""
        text = os.environ.get(SPLIT, "1")
        if not text.isdecimal() or not 1 <= int(text) <= 1 << 20:
            raise ConfigError(f"{SPLIT} is a whole number from 1 on, not {text[:40]!r}")
        return int(text)

    def _environment_info(self) -> dict[str, Any]:
        return {**self._environment(), "background": self._background is not None} if self._environment is not None else {}

    def _user(self, micro_step: int | None) -> dict[str, Any]:
        return user_of(self._options.metadata, self._ranks.root_user_fields, self._components, micro_step)
