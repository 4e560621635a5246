"""Error of an attempt that was superseded: which process owns the run now, and since when."""

from __future__ import annotations

from relight.errors import Fenced
from relight.log.history import History


def process_of(writer: str) -> tuple[str, int]:
    """Return host and process id in a record's ``writer``. The process id is 0 if the text has none."""
    host, _, rest = writer.partition(":")
    pid = rest.partition(":")[0]
    return host, int(pid) if pid.isdecimal() else 0


def superseded(history: History, epoch: int, run: str) -> Fenced:
    """Return the error of attempt ``epoch``. It names the process that owns the run now, and what to do."""
    what = f"attempt {epoch} of this run was superseded by attempt {history.epoch}"
    if history.fences:
        host, pid = process_of(history.fences[-1].writer)
        what += f": process {pid} on host {host} took the run over at {history.fences[-1].time}"
    return Fenced(
        what,
        where=run,
        hint="stop this process, which can save nothing more here, or give it a run name of its own; its checkpoints up to then are kept",
    )
