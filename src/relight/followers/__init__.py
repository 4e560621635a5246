"""Followers: processes that take each new checkpoint of a run into live tensors, while the run trains on.

Invariants: outside a switch, which happens in the caller's own call, the live tensors have the bytes of one committed checkpoint.
Every byte is verified before the switch. A follower writes nothing to the store. May import: ``restore`` and the rooms below.
"""

from relight.followers.follower import Follower, Switched, follow

__all__ = ["Follower", "Switched", "follow"]
