"""Copies checkpoints between the tiers of a run in the background (drain), and repairs damaged files of one tier from
another (scrub).

Always holds: a tier is a run of its own with its own log. Its commits have the order of the nearest tier's. An
interrupted drain continues from what it finds in the tier. An attempt that was superseded in a tier copies nothing more
to it. May import: ``reclaim``, ``transfer`` and everything below them.
"""

from relight.drain.outwards import Drained, drain
from relight.drain.process import Drainer
from relight.drain.scrub import Scrubbed, scrub

__all__ = ["Drained", "Drainer", "Scrubbed", "drain", "scrub"]
