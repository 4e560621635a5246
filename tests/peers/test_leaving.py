"""The end of a run: whoever is quicker with it is not missed."""

from __future__ import annotations

import time
from collections.abc import Callable

from in_process import MB, Told, join, part_of, several


def until(true: Callable[[], object]) -> bool:
    ends = time.monotonic() + 20
    while not true() and time.monotonic() < ends:
        time.sleep(0.01)
    return bool(true())


def test_nothing_is_missed_once_the_run_is_said_to_end() -> None:
    """An agent that is gone is told of while the run goes on; not of what is offered, or on its way, when the run is at its end."""
    told: Told = []
    with several(2, told) as peers:
        join(peers, 1, 1)
        peers[1].close()
        for seq in (1, 2):  # the first is told of because the second is there, which must not come in its place
            peers[0].offer(part_of(f"c{seq}", seq, 0, MB)[0])
            assert until(lambda: not peers[0]._sender._waiting or seq == 2)
        assert until(lambda: any(name == "peers.failed" for name, _ in told)), told
        peers[0].leave()
        assert peers[0].wait(10)
        told.clear()
        for seq in (3, 4, 5):
            peers[0].offer(part_of(f"c{seq}", seq, 0, MB)[0])
            time.sleep(0.2)
        assert told == []


def test_who_joins_again_is_protected_again() -> None:
    """A second Checkpointer of the same job, behind the first one's end: the same roster counts anew."""
    told: Told = []
    with several(2, told) as peers:
        join(peers, 1, 1)
        peers[0].leave()
        join(peers, 1, 1)
        peers[0].offer(part_of("c1", 1, 0, MB)[0])
        assert until(lambda: [name for name, _ in told].count("peers.sent") == 1), told
