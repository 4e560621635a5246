"""Nodes that are made up for one test: calm, with the changes that the test states."""

from __future__ import annotations

from collections.abc import Iterator

from relight.prediction import Accelerator, DiskSpace, Host, NodeSample, Rank, SampleShape

SHAPE = SampleShape(1, 2, 2)
GB = 1e9


def sample(
    at: float,
    *,
    free: float = 0.5,
    disk: float = 0.5,
    step_s: float = 1.0,
    celsius: float = 60.0,
    mhz: float = 1755.0,
    ecc: float = 0.0,
    silent: bool = False,
    psi: float = 0.0,
) -> NodeSample:
    """Return one second of a calm node, with the given values changed."""
    host = Host(
        cpu=0.3,
        load=0.3,
        memory_available_bytes=free * 100 * GB,
        memory_size_bytes=100 * GB,
        psi_memory_full=psi,
        major_faults=0.0,
    )
    first = Accelerator() if silent else Accelerator(celsius, 0.9, mhz, 400.0, 10 * GB, ecc, 0.0)
    ranks = (Rank(step_s, 2.0, 5.0, 10 * GB), Rank(1.001 * step_s, 2.0, 5.0, 10 * GB))
    return NodeSample(
        at,
        host,
        (DiskSpace(disk * 100 * GB, 100 * GB),),
        ranks,
        (first, Accelerator(58.0, 0.9, 1755.0, 400.0, 10 * GB, 0.0, 0.0)),
    )


def leak(seconds: int, begin: int, end: int, at: float = 1e9) -> Iterator[NodeSample]:
    """Yield samples of a leak: free memory falls from one half to nothing between two seconds."""
    for second in range(seconds):
        yield sample(at + second, free=0.5 * (1 - min(1.0, max(0.0, (second - begin) / (end - begin)))))
