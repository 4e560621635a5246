"""Between the tiers of a run: what a further one is to hold is copied there, behind everybody's back; what is damaged in one is mended from
another.

Always holds: a tier is a run of its own, committed to by its own log, in the order of the nearest one's; what was interrupted is gone on
with by looking at what is there; an attempt that was superseded in a tier copies nothing more to it. May import: ``reclaim``,
``transfer`` and everything below them.
"""

from relight.drain.outwards import Drained, drain
from relight.drain.process import Drainer
from relight.drain.scrub import Scrubbed, scrub

__all__ = ["Drained", "Drainer", "Scrubbed", "drain", "scrub"]
