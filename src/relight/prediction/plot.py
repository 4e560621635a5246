"""The picture: what each detector finds, what it alarms for nothing, and what that saves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from relight.prediction.score import Result

PAPER, INK, FAINT, GOOD, BAD = "#fbfaf7", "#22262e", "#8a8f98", "#1f9d61", "#d1274b"


def draw(results: Sequence[Result], path: Path) -> None:
    """Write the picture to ``path``, as its ending says (``.png``, ``.svg``, ``.pdf``)."""
    figure = Figure(figsize=(11, 1.8 + 0.55 * len(results)), facecolor=PAPER, dpi=150)
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3, sharey=True)
    names = [one.detector for one in results]
    columns = (
        ("failures found, of those there were", [one.recall for one in results], GOOD, "{:.0%}"),
        ("false alarms a day", [one.false_per_day for one in results], BAD, "{:.2f}"),
        ("seconds saved a day, less those spent", [one.net_s_per_day for one in results], None, "{:+.0f}"),
    )
    for panel, (title, values, colour, text) in zip(panels, columns, strict=True):
        panel.set_facecolor(PAPER)
        shown = [0.0 if math.isnan(one) else one for one in values]
        panel.barh(range(len(shown)), shown, height=0.6, color=[colour or (GOOD if one >= 0 else BAD) for one in shown])
        for at, one in enumerate(shown):
            panel.text(max(one, 0), at, " " + text.format(one), va="center", fontsize=9, color=INK)
        panel.set_xlim(min(0.0, *shown) * 1.1, max(1e-9, *shown) * 1.25)
        panel.set_title(title, loc="left", fontsize=10, color=INK)
        panel.tick_params(colors=FAINT, labelsize=8.5)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    panels[0].set_yticks(range(len(names)), names, color=INK)
    panels[0].invert_yaxis()
    figure.text(0.01, 0.01, f"{results[0].days:.1f} node-days with {results[0].failures} failures", fontsize=9, color=FAINT)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, facecolor=PAPER)
