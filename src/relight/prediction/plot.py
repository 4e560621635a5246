"""Chart of an evaluation: failures that each detector finds, its false alarms, and the time that it saves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from relight.prediction.score import Result
from relight.units import percent_text

PAPER, INK, FAINT, GOOD, BAD = "#fbfaf7", "#22262e", "#8a8f98", "#1f9d61", "#d1274b"


def draw(results: Sequence[Result], path: Path) -> None:
    """Write the chart to ``path``, in the format of its ending (``.png``, ``.svg``, ``.pdf``)."""
    figure = Figure(figsize=(11, 1.8 + 0.55 * len(results)), facecolor=PAPER, dpi=150)
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3, sharey=True)
    names = [result.detector for result in results]
    columns = (
        ("share of failures found", [result.recall for result in results], GOOD, percent_text),
        ("false alarms a day", [result.false_per_day for result in results], BAD, "{:.2f}".format),
        ("net seconds saved a day", [result.net_s_per_day for result in results], None, "{:+.0f}".format),
    )
    for panel, (title, values, colour, text_of) in zip(panels, columns, strict=True):
        panel.set_facecolor(PAPER)
        shown = [0.0 if math.isnan(value) else value for value in values]
        panel.barh(
            range(len(shown)), shown, height=0.6, color=[colour or (GOOD if value >= 0 else BAD) for value in shown]
        )
        for row, value in enumerate(shown):
            panel.text(max(value, 0), row, " " + text_of(value), va="center", fontsize=9, color=INK)
        panel.set_xlim(min(0.0, *shown) * 1.1, max(1e-9, *shown) * 1.25)
        panel.set_title(title, loc="left", fontsize=10, color=INK)
        panel.tick_params(colors=FAINT, labelsize=8.5)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    panels[0].set_yticks(range(len(names)), names, color=INK)
    panels[0].invert_yaxis()
    figure.text(
        0.01, 0.01, f"{results[0].days:.1f} node-days with {results[0].failures} failures", fontsize=9, color=FAINT
    )
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, facecolor=PAPER)
