"""What the Checkpointer needs of the writer of its background saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from relight.agent import Request
from relight.capture import Captured
from relight.commit import CommitTarget


class SaveWriter(Protocol):
    """Makes saves while training continues: ``Background`` through the agent, ``BackgroundElsewhere`` through rank 0.

    The training thread calls all methods. The outcome of a started save goes to the ``on_done`` of the writer's constructor, in another
    thread, once.
    """

    bound: Callable[[float], float]
    """Returns the seconds that a wait may take: fewer than asked for if the trainer must end sooner."""

    @property
    def place(self) -> CommitTarget:
        """Store, run and attempt that these saves commit to."""

    @property
    def warmed(self) -> bool:
        """Whether agent and memory were requested."""

    @property
    def free_slots(self) -> int | None:
        """Number of saves that could start now; None if that is not known."""

    @property
    def pack_bytes(self) -> int:
        """Bytes of the packs of one save."""

    @property
    def agent_words(self) -> str:
        """The agent's state, for the message of a wait that timed out."""

    def warm_up(self, state: Captured) -> None:
        """Prepare for saves of such a state, in another thread. Idempotent."""

    def free_slot(self, wait_s: float = 0.0, hurry: bool = False, yields: Callable[[int], bool] | None = None) -> bool:
        """Wait up to ``wait_s`` seconds for room for a save. Return whether there is room. ``hurry``: the save must start, so no earlier
        save may be held back. ``yields`` is called with the number of each save that only waits, newest first; if True, that save
        is dropped, and its room taken."""

    def save(self, state: Captured, request: Callable[[int, str, bytes], Request], checkpoint_id: str) -> int | None:
        """Start a save, and return the number that ``on_done`` will report. Return None if it is impossible now (no memory, no agent).

        ``request`` makes the request from the number, the checkpoint's id and the encoded tree. An empty ``checkpoint_id``: a new one.
        """

    def began(self, blocked_s: float) -> None:
        """Record that a save was started, and took ``blocked_s`` seconds in the training thread."""

    def progress_of(self, number: int) -> tuple[float, float]:
        """Return the shares of a save's bytes that are copied and written."""

    def interval(self, seconds: float) -> None:
        """Record the seconds between two calls of ``step()``."""

    def barrier(self) -> None:
        """Wait until no snapshot reads live tensors."""

    def hurry(self) -> None:
        """Write all started saves without holding any back."""

    def close(self, polite: bool = True) -> None:
        """Release all resources. ``polite``: no process restores from this memory."""
