"""A sample of a node at one time, and the columns of its recording."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

NAN = math.nan


class Accelerator(NamedTuple):
    """One accelerator at one time. NaN: unknown."""

    temperature_c: float = NAN
    utilisation: float = NAN
    """From 0 to 1."""
    clock_mhz: float = NAN
    """Clock of its processors, not of its memory."""
    power_w: float = NAN
    memory_bytes: float = NAN
    """Used memory."""
    ecc_corrected: float = NAN
    """Memory errors since it was started, like the next field."""
    ecc_uncorrected: float = NAN


class Gauges(Protocol):
    """Source of accelerator readings."""

    def read(self) -> list[Accelerator]:
        """Return all accelerators of this node, always in the same order. One that does not answer has NaN values."""
        ...


class Rank(NamedTuple):
    """One rank at one time."""

    step_s: float = NAN
    """Duration of its last step; NaN outside training."""
    loss: float = NAN
    save_s: float = NAN
    """Duration of its last save until it was durable."""
    rss_bytes: float = NAN


class DiskSpace(NamedTuple):
    """Space of a file system."""

    free_bytes: float = NAN
    size_bytes: float = NAN


class Host(NamedTuple):
    """The node itself. Pressure: per cent of the last ten seconds in which some, or all, processes waited (the kernel's PSI)."""

    cpu: float = NAN
    """Use of all cores, from 0 to 1."""
    load: float = NAN
    """Load average of one minute, divided by the number of cores."""
    memory_available_bytes: float = NAN
    memory_size_bytes: float = NAN
    group_used_bytes: float = NAN
    """Memory of the control group, without caches that the kernel can drop at once."""
    group_limit_bytes: float = NAN
    psi_memory_some: float = NAN
    psi_memory_full: float = NAN
    psi_io_some: float = NAN
    psi_io_full: float = NAN
    psi_cpu_some: float = NAN
    psi_cpu_full: float = NAN
    major_faults: float = NAN
    """Pages per second that were read from disk."""


class NodeSample(NamedTuple):
    """A node at one time."""

    at: float
    """Seconds since 1970."""
    host: Host = Host()
    rooms: tuple[DiskSpace, ...] = ()
    ranks: tuple[Rank, ...] = ()
    accelerators: tuple[Accelerator, ...] = ()


@dataclass(frozen=True, slots=True)
class SampleShape:
    """Number of file systems, ranks and accelerators with columns.

    Further ones of a sample are left out; missing ones are NaN.
    """

    rooms: int = 1
    ranks: int = 8
    accelerators: int = 8

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns' names in order, such as ``host.cpu``, ``room0.free_bytes``, ``accelerator0.power_w``."""
        parts = (
            ("room", self.rooms, DiskSpace),
            ("rank", self.ranks, Rank),
            ("accelerator", self.accelerators, Accelerator),
        )
        names = [f"host.{field}" for field in Host._fields]
        return (
            *names,
            *(
                f"{word}{number}.{field}"
                for word, count, kind in parts
                for number in range(count)
                for field in kind._fields
            ),
        )

    def row(self, sample: NodeSample) -> list[float]:
        """Return a sample's values in the order of the columns."""
        values = list(sample.host)
        for readings, count, width in (
            (sample.rooms, self.rooms, len(DiskSpace._fields)),
            (sample.ranks, self.ranks, len(Rank._fields)),
            (sample.accelerators, self.accelerators, len(Accelerator._fields)),
        ):
            for reading in readings[:count]:
                values += reading
            values += [NAN] * (width * (count - len(readings)))
        return values
