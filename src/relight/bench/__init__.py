"""``relight bench``: measures saves and restores on this machine and in this store, and recommends settings.

Always holds: all files are in one directory inside the store, which is removed at the end, also after Ctrl-C or an error; Relight and the
machine's floors are measured in turns, so that a ratio compares the same moment; every restore is compared with what was saved.
Importing this room does not import torch. Without torch, only the floors and the writing of packs are measured, and a note states this.
``plan``, ``figures`` and ``advice`` are pure. May import everything below it.
"""

from relight.bench.advice import Advice, RecommendedSetting
from relight.bench.figures import Figure
from relight.bench.measure import BenchOptions, run
from relight.bench.report import BenchReport

__all__ = ["Advice", "BenchOptions", "BenchReport", "Figure", "RecommendedSetting", "run"]
