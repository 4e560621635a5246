"""SVG pictures made by the server from plain values, so that pages show them without scripts.

Pure: numbers and names in, markup out. All text is escaped in ``svg.py``. The style sheet defines colours, fonts and hover effects:
elements have classes, never styles, because pages must not have any (``Content-Security-Policy: default-src 'self'``).
Every picture has a title that describes it.
"""

from relight.serve.draw.bars import BarPart, bar, usage
from relight.serve.draw.graph import Fork, graph
from relight.serve.draw.histogram import histogram
from relight.serve.draw.lanes import RankRow, TimeRange, lanes
from relight.serve.draw.line import Curve, Mark, line, thinned
from relight.serve.draw.strip import StripItem, strip
from relight.serve.draw.treemap import Tile, treemap

__all__ = [
    "BarPart",
    "Curve",
    "Fork",
    "Mark",
    "RankRow",
    "StripItem",
    "Tile",
    "TimeRange",
    "bar",
    "graph",
    "histogram",
    "lanes",
    "line",
    "strip",
    "thinned",
    "treemap",
    "usage",
]
