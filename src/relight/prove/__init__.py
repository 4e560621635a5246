"""``relight prove``: does this script resume to the bit? Run straight, run killed and resumed, compare; name the first thing that differs.

May import everything below it. The comparing is pure; only ``recorder`` runs inside the script's process.
"""

from relight.prove.compare import FirstDifference, MetricDrift, compare, drift
from relight.prove.drive import ProveOptions, ProveReport, run

__all__ = ["FirstDifference", "MetricDrift", "ProveOptions", "ProveReport", "compare", "drift", "run"]
