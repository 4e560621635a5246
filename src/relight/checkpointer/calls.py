"""Checks of the calls of one Checkpointer: which process makes them, and whether steps count up."""

from __future__ import annotations

import os

from relight.errors import ConfigError
from relight.observe import emit

COUNT_ON = (
    "after a restore, begin at its result: range(ckpt.restore(), total); "
    "with several epochs, count all steps in one variable that begins there"
)


def refuse_unconnected() -> None:
    """Raise ``ConfigError`` if a launcher started this process as one of several ranks and ``torch.distributed`` does not connect them.

    Rank 0 is let through: a script may train with other means, and save on rank 0 alone.
    """
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank.isdecimal() and size.isdecimal() and int(rank) > 0 and int(size) > 1 and not is_connected():
        raise ConfigError(
            f"this process is rank {rank} of WORLD_SIZE {size}, but torch.distributed is not initialised: each rank would save alone",
            where="Checkpointer",
            hint="call torch.distributed.init_process_group() first; or make a Checkpointer on rank 0 only; "
            "or, if each rank trains a run of its own, remove WORLD_SIZE from its environment",
        )


def is_connected() -> bool:
    """Return whether ``torch.distributed`` is initialised in this process."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


class Calls:
    """Remembers the process that made a Checkpointer, and whether a repeated step was reported already."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._pid = os.getpid()
        self._repeated = False
        self.previous: int | None = None
        """The last step that ended before the current one."""
        self.begins_again = False
        """Whether steps count from before a partially restored checkpoint: then another training starts from the
        restored part."""
        self._start: int | None = None
        """The step after a partially restored checkpoint, until the first step is reported."""
        self._reported = False

    @property
    def elsewhere(self) -> bool:
        """Whether this process was forked from the one that made the Checkpointer."""
        return os.getpid() != self._pid

    def restored(self, step: int, micro_step: int | None, *, part: bool) -> tuple[int, int | None] | None:
        """Record a restore. Return the step that the next one must follow, and its micro-batch; None if the count may begin again.

        ``part``: only a part of the state was restored, or for a fresh start. Steps that this process has reported still count.
        """
        self.begins_again, self._start = False, None
        if not part or self._reported:
            return step, micro_step
        self._start = step + (1 if micro_step is None else 0)
        return None

    def check(
        self, step: int | None, micro_step: int | None, last: int | None, last_micro: int | None, *, reports: bool
    ) -> None:
        """Raise ``ConfigError`` for a call from a forked process or a step below the last one. Warn once about a step
        reported twice.

        ``step`` is None for a restore. ``reports``: the call is ``step()``; ``save()`` of the step that was just
        reported is usual.
        """
        if self.elsewhere:
            raise ConfigError(
                f"this process ({os.getpid()}) was forked from the one that made the Checkpointer ({self._pid})",
                where=f"run {self._run!r}",
                hint="call step(), save() and restore() in that process alone, or make a Checkpointer in this one, of another run",
            )
        if step is not None:
            self.begins_again = self._start is not None and step < self._start
            last = self._start - 1 if last is None and self._start is not None and not self.begins_again else last
            self._start, self._reported = None, True
        if reports and last is not None:
            if last_micro is None:
                self.previous = last
            elif self.previous is None:
                self.previous = last - 1  # restored within a step
        if step is None or last is None:
            return
        if step < last:
            message = f"step {step} was reported after step {last}: the numbers of steps count up within a run"
            raise ConfigError(message, where=f"run {self._run!r}", hint=COUNT_ON)
        if reports and step == last and micro_step is None and last_micro is None and not self._repeated:
            self._repeated = True
            text = (
                f"step {step} was reported twice; call step() once per optimizer step, or pass micro_step= within one"
            )
            emit("steps.repeated", text, step=step)
