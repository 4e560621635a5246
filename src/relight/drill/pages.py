"""What the ranks of a running job say, read from outside; also what they said last, when the job is over and its pages are gone."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from relight.drill.processes import is_below
from relight.heartbeat import Heartbeat, read_beat
from relight.store.urls import absolute
from relight.supervise.own_memory import directories

_PAGE = "pulse-"


class Pages:
    """Of one supervisor. Each page is held open from when it is first seen: an unlinked file can still be read."""

    def __init__(self, supervisor: int) -> None:
        self._supervisor = supervisor
        self._held: dict[int, int] = {}

    def close(self) -> None:
        """None is held any more."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    def beats(self) -> dict[int, Heartbeat]:
        """By rank; of those that have said something."""
        directory = directories().get(self._supervisor)
        if directory is not None:
            for page in directory.glob(f"{_PAGE}*"):
                rank = int(page.name.removeprefix(_PAGE))
                if rank not in self._held:
                    with contextlib.suppress(OSError):
                        self._held[rank] = os.open(page, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        found = {rank: read_beat(f"/proc/self/fd/{descriptor}") for rank, descriptor in sorted(self._held.items())}
        return {rank: beat for rank, beat in found.items() if beat is not None}


class Running(NamedTuple):
    """A job that runs on this machine under ``relight run``."""

    supervisor: int
    beats: dict[int, Heartbeat]


def running(url: str) -> list[Running]:
    """The jobs of the run at ``url``, a store and a name, that have ranks here; of ranks, those that the supervisor started."""
    found = []
    for supervisor in directories():
        pages = Pages(supervisor)
        beats = {rank: beat for rank, beat in pages.beats().items() if is_below(beat.pid, supervisor)}
        pages.close()
        if any(f"{beat.url.rstrip('/')}/{beat.run}" == absolute(url) for beat in beats.values()):
            found.append(Running(supervisor, beats))
    return found
