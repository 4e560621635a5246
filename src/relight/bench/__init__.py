"""``relight bench``: what saving and restoring cost on this machine and in this store, and which settings follow.

Always holds: what is measured lies in a directory of its own inside the store, which is removed at the end, also after Ctrl-C or an error;
Relight and the machine's floors take turns, so that a ratio compares the same moment; every restore is compared with what was saved.
Importing this room brings no torch: without it the floors and the writing of packs are measured, and that is said. ``plan``, ``figures``
and ``advice`` are pure. May import everything below it.
"""

from relight.bench.advice import Advice, RecommendedSetting
from relight.bench.figures import Figure
from relight.bench.measure import BenchOptions, run
from relight.bench.report import BenchReport

__all__ = ["Advice", "BenchOptions", "BenchReport", "Figure", "RecommendedSetting", "run"]
