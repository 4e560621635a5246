"""Limits of the resources that saves may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from relight.policy.argument_checks import checked_arguments
from relight.policy.call_text import ShownAsCall
from relight.settings.checkpoint_settings import LimitsSettings
from relight.settings.short_traceback import short_traceback
from relight.units import Duration, Rate, Size

_REQUIRED = ("threads", "nice", "when_busy", "deadline_s")


@dataclass(frozen=True, init=False, slots=True, repr=False)
class Limits(ShownAsCall):
    """Limits of the resources that saves may use.

    Args:
        memory: Shared memory for snapshots, all slots together: ``"16GB"``, or bytes. The trainer itself writes a
            larger state, through two buffers of 16 MiB, and waits for that. None: what the machine has.
        threads: The number of threads that hash and copy.
        bytes_per_second: Limit for writes to the nearest store by all ranks of a node together, in the background or
            not: ``"200MB/s"``, or bytes a second. Copies to further tiers have their own limit:
            ``relight.tier(bytes_per_second=)``. None: no limit.
        nice: The agent's niceness, 0 to 19.
        when_busy: What becomes of a save that is due while no slot is free. ``"newest"``: it is made as soon as a slot
            is free, of the newest state then; several such saves become one. ``"queue"``: training waits for a slot.
        deadline_s: The longest wait for the agent: ``"10m"``, a ``timedelta``, or seconds.
        read_bytes_per_second: Limit for reads from stores by all ranks of a node together, mostly in a restore. None:
            no limit.
    """

    memory: int | None = None
    threads: int = 2
    bytes_per_second: float | None = None
    nice: int = 10
    when_busy: Literal["newest", "queue"] = "newest"
    deadline_s: float = 600.0
    read_bytes_per_second: float | None = None

    @short_traceback
    def __init__(
        self,
        memory: Size | None = None,
        threads: int = 2,
        bytes_per_second: Rate | None = None,
        nice: int = 10,
        when_busy: Literal["newest", "queue"] = "newest",
        deadline_s: Duration = 600.0,
        read_bytes_per_second: Rate | None = None,
    ) -> None:
        for name, value in checked_arguments(LimitsSettings, locals(), "Limits({}=…)", _REQUIRED).items():
            object.__setattr__(self, name, value)
