"""Limits of the resources that saves may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from relight.errors import short_traceback
from relight.policy.argument_checks import checked_arguments
from relight.policy.call_text import ShownAsCall
from relight.settings.checkpoint_settings import LimitsSettings
from relight.units import Duration, Rate, Size

_REQUIRED = ("threads", "nice", "when_busy", "deadline_s")


@dataclass(frozen=True, init=False, slots=True, repr=False)
class Limits(ShownAsCall):
    """Limits of the resources that saves may use. None: no limit but the machine's.

    - ``memory``: bytes of shared memory for snapshots, all slots together. The trainer itself writes a larger state,
      through two buffers of 16 MiB, and waits for that.
    - ``threads``: number of threads that hash and copy. ``nice``: the agent's niceness.
    - ``bytes_per_second``: limit for writes to the nearest store by all ranks of a node together, in the background or
      not. ``read_bytes_per_second``: limit for their reads from stores, mostly in a restore. Copies to further tiers
      have their own limit: ``relight.tier(bytes_per_second=)``.
    - ``when_busy``: a save that is due while no slot is free is made as soon as one is (``"newest"``: several such
      saves become one, of the newest state then), or waits for a slot (``"queue"``).
    - ``deadline_s``: seconds that bound every wait for the agent.
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
