"""``relight drill --prove``: tests whether a script resumes to the bit. Compares an uninterrupted run with a killed and resumed one.

Reports the first difference. May import everything below it. The comparison is pure; only ``recorder`` runs in the script's process.
"""

from relight.prove.compare import FirstDifference, MetricDrift, compare, drift
from relight.prove.drive import ProveOptions, ProveReport, run

__all__ = ["FirstDifference", "MetricDrift", "ProveOptions", "ProveReport", "compare", "drift", "run"]
