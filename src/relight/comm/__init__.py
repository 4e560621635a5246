"""The ranks of a job, and the small messages they exchange. All other rooms use this one to reach other ranks.

Invariant: every wait has a deadline, and its error names the ranks that were missing.
"""

from relight.comm.base import Communicator, RankTimeout, SingleProcess, late
from relight.comm.node import this_node
from relight.comm.priority import idle_priority, lower_after, lower_priority
from relight.comm.threads import ThreadGroup
from relight.comm.torch_world import find_world

__all__ = [
    "Communicator",
    "RankTimeout",
    "SingleProcess",
    "ThreadGroup",
    "find_world",
    "idle_priority",
    "late",
    "lower_after",
    "lower_priority",
    "this_node",
]
