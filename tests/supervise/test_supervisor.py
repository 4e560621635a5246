"""One job under watch, without processes: pages are written here."""

from __future__ import annotations

import os
from pathlib import Path

from relight.pulse import SETTING, Beat, Page
from relight.supervise.decide import Rules
from relight.supervise.facts import Worker
from relight.supervise.incidents import incidents_in
from relight.supervise.limits import Patience
from relight.supervise.supervisor import Supervisor


def test_a_life_that_ended_between_two_looks_went_on_all_the_same(tmp_path: Path) -> None:
    """Its steps are in its pages: the incident before it is over, with what it has cost; the next one is open."""
    watched = Supervisor(Rules(), Patience(), "job", tmp_path)
    try:
        for reached, restored in ((5, -1), (12, 4)):
            told = watched.begin([0, 1], {})
            watched.started({0: os.getpid(), 1: os.getpid()})
            for rank in range(2):
                Page(told[rank][SETTING]).write(Beat(pid=1, phase="training", step=reached, steps=3, restored=restored, first_at=2.0))
            watched.failed([Worker(0, -9, 1.0), Worker(1, stopped=True)])
        first, second = incidents_in(tmp_path)
        assert first.after is not None and (first.after.restored, first.after.steps_lost) == (4, 1)
        assert second.after is None and second.step == 12
    finally:
        watched.close()
