"""What is seen of a node at one moment, and the names of the columns it is written down in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

NAN = math.nan


class Accelerator(NamedTuple):
    """One, at a moment. Not a number: it does not say."""

    temperature_c: float = NAN
    utilisation: float = NAN
    """From 0 to 1."""
    clock_mhz: float = NAN
    """Of its processors, not of its memory."""
    power_w: float = NAN
    memory_bytes: float = NAN
    """In use."""
    ecc_corrected: float = NAN
    """Errors of its memory since it was started, as is the next one."""
    ecc_uncorrected: float = NAN


class Gauges(Protocol):
    """Where accelerators are read."""

    def read(self) -> list[Accelerator]:
        """All of this node, always in the same order; one that does not answer any more stays in its place, without numbers."""
        ...


class Rank(NamedTuple):
    """One, at a moment."""

    step_s: float = NAN
    """How long its last step took; not a number while it is at something else than training."""
    loss: float = NAN
    save_s: float = NAN
    """How long its last save took until it was durable."""
    rss_bytes: float = NAN


class DiskSpace(NamedTuple):
    """What a file system has."""

    free_bytes: float = NAN
    size_bytes: float = NAN


class Host(NamedTuple):
    """The node itself. Pressure: per cent of the last ten seconds in which some, or all, processes waited (the kernel's PSI)."""

    cpu: float = NAN
    """From 0 to 1, of all cores."""
    load: float = NAN
    """Of one minute, for each core."""
    memory_available_bytes: float = NAN
    memory_size_bytes: float = NAN
    group_used_bytes: float = NAN
    """Of the control group, without what the kernel can drop at once."""
    group_limit_bytes: float = NAN
    psi_memory_some: float = NAN
    psi_memory_full: float = NAN
    psi_io_some: float = NAN
    psi_io_full: float = NAN
    psi_cpu_some: float = NAN
    psi_cpu_full: float = NAN
    major_faults: float = NAN
    """Pages a second that had to be read from disk."""


class NodeSample(NamedTuple):
    """A node at a moment."""

    at: float
    """Seconds since 1970."""
    host: Host = Host()
    rooms: tuple[DiskSpace, ...] = ()
    ranks: tuple[Rank, ...] = ()
    accelerators: tuple[Accelerator, ...] = ()


@dataclass(frozen=True, slots=True)
class SampleShape:
    """For how many of each there are columns. What a sample has beyond that is left out; what it lacks is not a number."""

    rooms: int = 1
    ranks: int = 8
    accelerators: int = 8

    @property
    def columns(self) -> tuple[str, ...]:
        """Their names, in order: ``host.cpu``, ``room0.free_bytes``, ``rank0.step_s``, ``accelerator0.power_w``."""
        parts = (("room", self.rooms, DiskSpace), ("rank", self.ranks, Rank), ("accelerator", self.accelerators, Accelerator))
        names = [f"host.{field}" for field in Host._fields]
        return (*names, *(f"{word}{at}.{field}" for word, count, kind in parts for at in range(count) for field in kind._fields))

    def row(self, sample: NodeSample) -> list[float]:
        """A sample's values, in that order."""
        values = list(sample.host)
        for found, count, width in (
            (sample.rooms, self.rooms, len(DiskSpace._fields)),
            (sample.ranks, self.ranks, len(Rank._fields)),
            (sample.accelerators, self.accelerators, len(Accelerator._fields)),
        ):
            for one in found[:count]:
                values += one
            values += [NAN] * (width * (count - len(found)))
        return values
