"""What a save may take of the machine."""

from __future__ import annotations

from dataclasses import dataclass

from relight.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on the harm that saving does. None means: what is there.

    ``memory``: bytes of shared memory for snapshots, all slots together; a state larger than that is streamed by the trainer through
    two buffers of 16 MiB, while it waits. ``threads`` hash and copy. ``bytes_per_second`` bounds writing. ``nice`` is the agent's.
    ``when_busy``: a save that is due while no slot is free is made as soon as one is (``"newest"``: several due ones become one, of the
    then newest state), or waits for it (``"queue"``). ``deadline_s`` bounds every wait for the agent.
    """

    memory: int | None = None
    threads: int = 2
    bytes_per_second: float | None = None
    nice: int = 10
    when_busy: str = "newest"
    deadline_s: float = 600.0

    def __post_init__(self) -> None:
        for name, value, least in (("memory", self.memory, 0), ("threads", self.threads, 1), ("nice", self.nice, 0)):
            if value is not None and (type(value) is not int or value < least):
                raise ConfigError(f"Limits({name}=…) is a whole number from {least} on, not {value!r}")
        for name, number in (("bytes_per_second", self.bytes_per_second), ("deadline_s", self.deadline_s)):
            if number is not None and not (isinstance(number, (int, float)) and 0 < number < float("inf")):
                raise ConfigError(f"Limits({name}=…) is a number above 0, not {number!r}")
        if self.when_busy not in ("newest", "queue"):
            raise ConfigError(f"Limits(when_busy=…) is 'newest' or 'queue', not {self.when_busy!r}")
