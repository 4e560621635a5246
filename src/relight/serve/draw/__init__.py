"""Pictures that the server makes: SVG out of plain values, so that a page shows them without scripts.

Numbers and names in, markup out; pure. All text is escaped here, in ``svg.py`` and nowhere else. Colours, fonts and what hovering does
are the style sheet's: an element has classes, never styles, since a page may hold none (``Content-Security-Policy: default-src 'self'``).
Every picture has a title that says in words what it shows.
"""

from relight.serve.draw.bars import BarPart, bar, usage
from relight.serve.draw.graph import Fork, graph
from relight.serve.draw.histogram import histogram
from relight.serve.draw.lanes import RankRow, TimeRange, lanes
from relight.serve.draw.line import Curve, Mark, line, spark, thinned
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
    "spark",
    "strip",
    "thinned",
    "treemap",
    "usage",
]
