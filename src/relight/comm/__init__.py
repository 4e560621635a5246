"""The ranks of a job: who there is, and the few words they exchange. Whoever needs more than one rank asks this room.

Always holds: every wait has a deadline, and says which ranks it waited for.
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
