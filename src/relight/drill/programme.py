"""All rehearsals, in the order in which they run."""

from __future__ import annotations

from relight.drill import network, rehearsals, storage
from relight.drill.rehearsals import Rehearsal

REHEARSALS = {
    rehearsal.name: rehearsal
    for rehearsal in (
        Rehearsal("kill", "a rank was killed (SIGKILL)", rehearsals.kill, "killed", "resume"),
        Rehearsal("hang", "a rank was stopped (SIGSTOP)", rehearsals.hang, "hang", "resume"),
        Rehearsal("lock", "a rank waited forever in Python", rehearsals.lock, "hang", "resume"),
        Rehearsal("crash", "a rank aborted (SIGABRT)", rehearsals.crash, "crash", "resume"),
        Rehearsal("poison", "the loss of one step was NaN", rehearsals.poison, "numerical", "roll back"),
        Rehearsal("full", "the store was full", storage.full),
        Rehearsal("away", "the store was unavailable", storage.away),
        Rehearsal("damage", "the newest checkpoint was damaged", storage.damage),
        Rehearsal("network", "a node's network was cut", network.network),
        Rehearsal("agent", "the process that writes saves was killed", rehearsals.agent),
        Rehearsal("supervisor", "relight run itself was killed", rehearsals.supervisor),
        Rehearsal("preempt", "relight run was asked to end (SIGTERM)", rehearsals.preempt),
    )
}
"""Rehearsals by name."""
