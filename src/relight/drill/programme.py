"""All rehearsals, in the order in which they are done."""

from __future__ import annotations

from relight.drill import network, rehearsals, storage
from relight.drill.rehearsals import Rehearsal

REHEARSALS = {
    one.name: one
    for one in (
        Rehearsal("kill", "a rank was killed (SIGKILL)", rehearsals.kill, "killed", "resume"),
        Rehearsal("hang", "a rank was stopped (SIGSTOP)", rehearsals.hang, "hang", "resume"),
        Rehearsal("lock", "a rank waited in Python for ever", rehearsals.lock, "hang", "resume"),
        Rehearsal("crash", "a rank aborted (SIGABRT)", rehearsals.crash, "crash", "resume"),
        Rehearsal("poison", "the loss of one step was no number", rehearsals.poison, "numerical", "roll back"),
        Rehearsal("full", "there was no room for saves", storage.full),
        Rehearsal("away", "the store was away", storage.away),
        Rehearsal("damage", "the newest checkpoint was damaged", storage.damage),
        Rehearsal("network", "a node's network was cut", network.network),
        Rehearsal("agent", "the process that writes saves was killed", rehearsals.agent),
        Rehearsal("supervisor", "relight run itself was killed", rehearsals.supervisor),
        Rehearsal("preempt", "relight run was asked to end (SIGTERM)", rehearsals.preempt),
    )
}
"""By name."""
