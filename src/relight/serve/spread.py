"""Statistics and histogram of a tensor's values, read from the checkpoint. Every byte is verified."""

from __future__ import annotations

from relight.errors import CheckpointNotFound
from relight.reader.opened import Opened
from relight.reader.spread import numbers_of, pieces_named, spread_of
from relight.serve.jobs import Progress
from relight.serve.pages_words import number
from relight.serve.values import Statistics

NAMES = {"min": "Least", "mean": "Mean", "max": "Largest", "norm": "Norm", "nan": "NaN", "inf": "Infinite"}


def statistics_of(opened: Opened, path: str, progress: Progress) -> Statistics:
    """Return statistics of a tensor. Cost: reads the tensor twice, for the statistics and for the histogram between their extremes."""
    pieces = pieces_named(opened, lambda name: name == path).get(path)
    if not pieces:
        raise CheckpointNotFound(f"no tensor {path[:80]!r} in this checkpoint")
    (numbers,) = numbers_of(opened, [pieces], progress)
    edges, counts = list[float](), list[int]()
    if "min" in numbers:
        edges, counts = spread_of(opened, pieces, float(numbers["min"]), float(numbers["max"]), progress)
    counted = sum(counts)
    explanation = f"{number(counted)} values in {len(counts)} classes; each byte was verified" if counts else ""
    if not numbers:
        explanation = "Statistics of this dtype are not supported."
    elif "min" in numbers and numbers["min"] == numbers["max"]:
        explanation = "All its values are equal."
    elif "min" in numbers and not counts:
        explanation = "Its values are too far apart, or too close, for a histogram."
    return Statistics(
        [(NAMES[name], float(numbers[name])) for name in NAMES if name in numbers], edges, counts, explanation
    )
