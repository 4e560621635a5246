"""Going back: what ``relight run`` told this life of the job to do, written into the run's log, where it holds for every life to come."""

from __future__ import annotations

import os

from relight.checkpointer.ranks import Ranks
from relight.format.records import Body, NoteBody
from relight.log import Log, View, fold
from relight.log.history import ROLLED_BACK
from relight.observe import emit
from relight.policy.going_back import BEFORE, SKIP
from relight.store import ByteStore


def roll_back_if_told(store: ByteStore, run: str, ranks: Ranks | None) -> None:
    """Have the run go on from before a step, if this process was told to; once. Cost, then: one record."""
    before, skip = os.environ.pop(BEFORE, ""), os.environ.pop(SKIP, "")
    if not before.isdecimal():
        return

    def write() -> bytes:
        log = Log(store, run)
        log.start()

        def decide(view: View) -> tuple[Body, int]:
            return NoteBody(topic=ROLLED_BACK, data={"before": int(before), "skip": skip}), fold(view).epoch

        log.append(decide)
        return b""

    if ranks is None:
        write()
    else:
        ranks.first(write, "going back")
    past = f", past the samples of steps {skip}" if skip else ""
    emit("restore.back", f"going back to before step {before}{past}", before=int(before), skip=skip)
