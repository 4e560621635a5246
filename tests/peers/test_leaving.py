"""The end of a run: an agent that ends first is not reported as lost."""

from __future__ import annotations

import time

from in_process import MB, Events, join, part_of, several, until


def test_nothing_is_missed_once_the_run_has_announced_its_end() -> None:
    """A missing agent is reported during the run, but not for parts that are offered or sent at the run's end."""
    events: Events = []
    with several(2, events) as peers:
        join(peers, 1, 1)
        peers[1].close()
        for seq in (1, 2):  # the second part causes the report about the first
            peers[0].offer(part_of(f"c{seq}", seq, 0, MB)[0])
            assert until(lambda: not peers[0]._sender._waiting or seq == 2)
        assert until(lambda: any(name == "peers.failed" for name, _ in events)), events
        peers[0].leave()
        assert peers[0].wait(10)
        events.clear()
        for seq in (3, 4, 5):
            peers[0].offer(part_of(f"c{seq}", seq, 0, MB)[0])
            time.sleep(0.2)
        assert events == []


def test_who_joins_again_is_protected_again() -> None:
    """After the end of a first Checkpointer, a second one of the same job uses the same roster from scratch."""
    events: Events = []
    with several(2, events) as peers:
        join(peers, 1, 1)
        peers[0].leave()
        join(peers, 1, 1)
        peers[0].offer(part_of("c1", 1, 0, MB)[0])
        assert until(lambda: [name for name, _ in events].count("peers.sent") == 1), events
