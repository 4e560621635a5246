"""Read the heartbeats of a running job's ranks from outside, also the last ones after the job has ended and removed its pages."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from relight.drill.processes import is_below
from relight.heartbeat import Heartbeat, read_beat
from relight.store.urls import absolute
from relight.supervise.shared_pages import directories

_PAGE = "heartbeat-"


class Pages:
    """Heartbeat pages of one supervisor's ranks. Each page is kept open once it was found: an unlinked file can still be read."""

    def __init__(self, supervisor: int) -> None:
        self._supervisor = supervisor
        self._held: dict[int, int] = {}

    def close(self) -> None:
        """Close all pages."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    def beats(self) -> dict[int, Heartbeat]:
        """Return the newest heartbeat of each rank that has published one."""
        directory = directories().get(self._supervisor)
        if directory is not None:
            for page in directory.glob(f"{_PAGE}*"):
                rank = int(page.name.removeprefix(_PAGE))
                if rank not in self._held:
                    with contextlib.suppress(OSError):
                        self._held[rank] = os.open(page, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        beats = {rank: read_beat(f"/proc/self/fd/{descriptor}") for rank, descriptor in sorted(self._held.items())}
        return {rank: beat for rank, beat in beats.items() if beat is not None}


class Running(NamedTuple):
    """A job that runs on this machine under ``relight run``."""

    supervisor: int
    beats: dict[int, Heartbeat]


def running(url: str) -> list[Running]:
    """Return the jobs on this machine that train the run at ``url`` (store and name), each with the ranks that its supervisor started."""
    jobs = []
    for supervisor in directories():
        pages = Pages(supervisor)
        beats = {rank: beat for rank, beat in pages.beats().items() if is_below(beat.pid, supervisor)}
        pages.close()
        if any(f"{beat.url.rstrip('/')}/{beat.run}" == absolute(url) for beat in beats.values()):
            jobs.append(Running(supervisor, beats))
    return jobs
