"""What a save may take of the machine."""

from __future__ import annotations

from dataclasses import dataclass

from relight.policy.units import number_above_0, one_of, whole_of


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on the harm that saving does. None means: what is there.

    ``memory``: bytes of shared memory for snapshots, all slots together; a state larger than that is streamed by the trainer through
    two buffers of 16 MiB, while it waits. ``threads`` hash and copy. ``nice`` is the agent's. ``bytes_per_second`` bounds what the
    run's processes on one node write to the nearest store, all ranks together, in the background or not; ``read_bytes_per_second`` what
    they read from stores, mostly in a restore. Copies to further tiers have a bound of their own: ``relight.tier(bytes_per_second=)``.
    ``when_busy``: a save that is due while no slot is free is made as soon as one is (``"newest"``: several due ones become one, of the
    then newest state), or waits for it (``"queue"``). ``deadline_s`` bounds every wait for the agent.
    """

    memory: int | None = None
    threads: int = 2
    bytes_per_second: float | None = None
    nice: int = 10
    when_busy: str = "newest"
    deadline_s: float = 600.0
    read_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("memory", 0), ("threads", 1), ("nice", 0)):
            value = getattr(self, name)
            if value is not None or name != "memory":
                object.__setattr__(self, name, whole_of(value, f"Limits({name}=…)", least=least))
        for name in ("bytes_per_second", "read_bytes_per_second", "deadline_s"):
            value = getattr(self, name)
            if value is not None or name == "deadline_s":
                object.__setattr__(self, name, number_above_0(value, f"Limits({name}=…)"))
        one_of(self.when_busy, ("newest", "queue"), "Limits(when_busy=…)")
