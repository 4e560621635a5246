"""The ranks of a job: who there is, and the few words they exchange. Whoever needs more than one rank asks this room.

Always holds: every wait has a deadline, and says which ranks it waited for.
"""

from relight.world.base import Alone, LateRanks, World, late
from relight.world.node import this_node
from relight.world.priority import behind_all, lower_priority, step_back
from relight.world.threads import Together
from relight.world.torch_world import find_world

__all__ = ["Alone", "LateRanks", "Together", "World", "behind_all", "find_world", "late", "lower_priority", "step_back", "this_node"]
