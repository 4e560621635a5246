"""The place at which a script waits as a spare: a spare process can run everything before it ahead of time, then
replace a rank."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from relight.errors import ConfigError
from relight.heartbeat.writer import forget, heartbeat

_waits: Callable[[], None] | None = None
"""Set in a spare process, before its script runs: the script calls ``standby`` without a reference to it."""
_passed = False
"""Whether the wait is over. A process waits once."""
_begun = ""
"""The first call of this process that needs a rank."""


def standby() -> None:
    """Mark the end of a script's slow start, which is the same for every rank: imports, building the model.

    Under ``relight run`` a spare process runs the script up to here while the job trains, and waits. When ranks fail,
    the processes that replace them begin here. In a rank, and without ``relight run``, the call reads one file and
    does nothing.

    Before this call there is no ``RANK`` yet. Do not write or log there what must not exist twice, and do not derive a
    seed from the rank. A spare needs the memory that its rank had at this point. No spare is started if that is more
    than half of the machine's free memory.

    Call it before ``torch.distributed.init_process_group`` and before a Checkpointer is created: ``ConfigError``
    otherwise. A second call does nothing.
    """
    global _passed
    if _passed:
        return
    distributed = sys.modules.get("torch.distributed")
    begun = _begun or ("init_process_group" if distributed is not None and distributed.is_initialized() else "")
    if begun:
        hint = "a spare has no rank yet: call standby() before anything that depends on the rank"
        raise ConfigError(f"relight.standby() is called after {begun}", hint=hint)
    _passed = True
    if _waits is not None:
        _waits()
        forget()
    heartbeat().stands_by(_resident_bytes())


def assert_past_standby(what: str) -> None:
    """Raise ``ConfigError`` in a spare that has not reached ``standby()``: it must not train. ``what``: the call that
    needs a rank."""
    global _begun
    if _waits is not None and not _passed:
        raise ConfigError(
            f"{what} is called before relight.standby()", hint="a spare ends here; call relight.standby() first"
        )
    _begun = _begun or what


def wait_with(waits: Callable[[], None]) -> None:
    """Set, in a spare, the function that ``standby()`` calls to wait. Once it returns, the process is a rank."""
    global _waits
    _waits = waits


def _resident_bytes() -> int:
    try:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) << 10
    except (OSError, StopIteration, ValueError):
        return 1 << 30
