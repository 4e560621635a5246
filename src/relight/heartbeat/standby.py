"""Where a script may be left waiting: what is in front of it can be done by a process that is yet to take a rank's place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from relight.errors import ConfigError
from relight.heartbeat.writer import forget, heartbeat

_waits: Callable[[], None] | None = None
_passed = False
_begun = ""


def standby() -> None:
    """Put this behind what takes long and is the same for every rank, such as imports and building the model, and in front of all else.

    Under ``relight run`` a spare process runs the script up to here while the job trains, and waits: when ranks fail, the ones in
    their place begin here. In a rank, and without ``relight run``, it costs a file's read and does nothing. So in front of it there is
    no ``RANK`` yet, nothing may be written or logged to elsewhere that is not to be there twice, and no seed may depend on the rank. A
    spare needs the memory that its rank had at this point; it does without where that would take more than half of what the machine
    has left.

    Call it before ``torch.distributed.init_process_group`` and before a Checkpointer is made: ``ConfigError`` otherwise. A second call
    does nothing.
    """
    global _passed
    if _passed:
        return
    distributed = sys.modules.get("torch.distributed")
    behind = _begun or ("init_process_group" if distributed is not None and distributed.is_initialized() else "")
    if behind:
        hint = "a spare has no rank yet: put it in front of all that is of a rank"
        raise ConfigError(f"relight.standby() comes behind {behind}", hint=hint)
    _passed = True
    if _waits is not None:
        _waits()
        forget()
    heartbeat().stands_by(_resident_bytes())


def assert_past_standby(what: str) -> None:
    """That the rank's own part begins, with ``what``. ``ConfigError`` in a spare that has not come to ``standby()``: it must not train."""
    global _begun
    if _waits is not None and not _passed:
        raise ConfigError(f"{what} in front of relight.standby()", hint="a spare ends here; put relight.standby() in front of it")
    _begun = _begun or what


def wait_with(waits: Callable[[], None]) -> None:
    """In a spare: what ``standby()`` is to do; once it returns, the process is a rank."""
    global _waits
    _waits = waits


def _resident_bytes() -> int:
    try:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) << 10
    except (OSError, StopIteration, ValueError):
        return 1 << 30
