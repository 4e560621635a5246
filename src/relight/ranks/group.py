"""The ranks that save and restore one run together. A job of one process is a group of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from relight.capture import CaptureCache, Captured, capture
from relight.capture.restore_check import Restorable
from relight.comm import Communicator, SingleProcess
from relight.commit.save import CommitTarget, Participant
from relight.policy import Trigger, TriggerInput
from relight.policy.triggers import reason_now
from relight.save_reason import SaveReason, of_signal


class Signals(Protocol):
    """The trainer's signal handlers, as a group uses them."""

    @property
    def pending(self) -> str | None:
        """The name of the signal that wants a save now, or None."""

    def adopt(self, name: str) -> None:
        """Act as if the signal ``name`` had arrived: another rank has received it."""


class RankGroup(Protocol):
    """This rank's side of the group. Every rank must make the same calls, except where a method is not collective."""

    world: Communicator
    several: bool
    """Whether the group has more than one rank."""
    turned: str
    """Tensors with replicas that differed at the last capture, and at no earlier one; empty if none."""
    seat: Participant | None
    """This rank's place in the last capture; None in a group of one."""
    owes_part: bool
    """Whether the ranks have agreed on a save that this rank has neither started to write nor aborted: others wait."""

    @property
    def lost(self) -> bool:
        """Whether an exchange has failed: then this job saves nothing more."""

    @property
    def acts_alone(self) -> bool:
        """Whether this rank may end the job without the others: it is the only one, or an exchange has failed."""

    @property
    def is_fully_replicated(self) -> bool:
        """Whether, at the last capture, each of several ranks had all of the common state."""

    @property
    def root_user_fields(self) -> dict[str, Any]:
        """Fields for the root's ``user`` about the last capture."""

    def check_split(self, components: Mapping[str, object]) -> None:
        """Raise ``ConfigError`` if ``per_rank=`` separates an optimizer from the module that it trains. Not
        collective."""

    def check_micro_step(self) -> None:
        """Raise ``ConfigError`` if this group cannot save within a step. Not collective."""

    def cache_of_all(self, cache: CaptureCache) -> CaptureCache:
        """Return the cache for captures of all components on this rank, if ``cache`` serves ``capture``."""

    def capture(
        self,
        components: Mapping[str, object],
        plans: Restorable,
        *,
        micro_step: int | None,
        recall: CaptureCache | None,
        failed: Exception | None = None,
    ) -> Captured:
        """Capture this rank's part of the checkpoint. Raise ``IncompatibleState`` if it could not be restored.

        ``failed``: an error of this rank since the ranks decided to save. It is raised, on all ranks.
        """

    def save_reason(
        self,
        facts: Callable[[], TriggerInput],
        trigger: Trigger | None,
        signals: Signals | None,
        due: SaveReason | None,
        free_slots: Callable[[], int | None],
        *,
        within_step: bool,
    ) -> SaveReason | None:
        """Return the reason to save now, the same on all ranks, or None. Does not wait for other ranks.

        ``facts`` are what the trigger decides by. ``due``: the reason of a postponed or failed save. ``free_slots``: the
        number of free snapshot slots; None if saves may wait for one. ``within_step``: the step is not complete.
        """

    def id_of(self, place: CommitTarget, more: str = "") -> str:
        """Return the checkpoint id of the last capture in that attempt; empty if the save itself draws one. ``more``
        distinguishes another save after that capture."""

    def is_still_fully_replicated(self, common: Captured) -> bool:
        """Return whether the state was fully replicated and still has the same tensors. Not collective."""

    def run_on_rank0(self, action: Callable[[], bytes], doing: str) -> bytes:
        """Run ``action`` on rank 0, and return its result on every rank. Its error is raised on every rank."""

    def unused_on_all(self, unused: Sequence[str]) -> list[str]:
        """Return those of the stored names in ``unused``, which this rank does not use, that no rank uses."""


class SingleRank:
    """The group of a job of one process. Nothing is exchanged."""

    several = lost = is_fully_replicated = owes_part = False
    acts_alone = True
    turned = ""
    seat: Participant | None = None

    def __init__(self, world: Communicator | None = None) -> None:
        self.world: Communicator = SingleProcess() if world is None else world

    @property
    def root_user_fields(self) -> dict[str, Any]:
        """Return no fields."""
        return {}

    def check_split(self, components: Mapping[str, object]) -> None:
        """All components are this rank's own."""

    def check_micro_step(self) -> None:
        """One process can save the gradients that it has summed within a step."""

    def cache_of_all(self, cache: CaptureCache) -> CaptureCache:
        """Each capture is one of all components."""
        return cache

    def capture(
        self,
        components: Mapping[str, object],
        plans: Restorable,
        *,
        micro_step: int | None,
        recall: CaptureCache | None,
        failed: Exception | None = None,
    ) -> Captured:
        """Capture the whole state."""
        if failed is not None:
            raise failed
        return plans.check(components, capture(components, micro_step=micro_step, recall=recall))

    def save_reason(
        self,
        facts: Callable[[], TriggerInput],
        trigger: Trigger | None,
        signals: Signals | None,
        due: SaveReason | None,
        free_slots: Callable[[], int | None],
        *,
        within_step: bool,
    ) -> SaveReason | None:
        """A pending signal comes first. Within a step, nothing else makes a save due."""
        if signals is not None and signals.pending:
            return of_signal(signals.pending)
        return None if within_step else due or reason_now(trigger, facts())

    def id_of(self, place: CommitTarget, more: str = "") -> str:
        """The save draws an id."""
        return ""

    def is_still_fully_replicated(self, common: Captured) -> bool:
        """There is no replica."""
        return False

    def run_on_rank0(self, action: Callable[[], bytes], doing: str) -> bytes:
        """Run ``action`` here."""
        return action()

    def unused_on_all(self, unused: Sequence[str]) -> list[str]:
        """Return ``unused``: there is no other rank that could use these."""
        return list(unused)


SINGLE_RANK = SingleRank()
"""A group of one, for callers that restore without a job."""
