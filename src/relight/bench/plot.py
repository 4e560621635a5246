"""The picture of ``relight bench``: each figure of Relight as a multiple of its floor."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Drawing

from relight.bench.report import BenchReport
from relight.units import size_text

PAPER, INK, FAINT, BAR = "#fbfaf7", "#22262e", "#8a8f98", "#1e3a5f"


def draw(report: BenchReport, path: Path) -> None:
    """Write the picture to ``path``, in the format of its suffix (``.png``, ``.svg``, ``.pdf``)."""
    shown = [figure for figure in report.relight if figure.ratio is not None]
    drawing = Drawing(figsize=(10, 1.4 + 0.55 * len(shown)), facecolor=PAPER, dpi=150)
    FigureCanvasAgg(drawing)
    axes = drawing.subplots()
    axes.set_facecolor(PAPER)
    for row, figure in enumerate(shown):
        assert figure.ratio is not None
        axes.barh(row, figure.ratio, color=BAR, height=0.6)
        axes.text(figure.ratio, row, f" {figure.ratio:.2f} ×", va="center", color=INK, fontsize=9)
    axes.axvline(1, color=FAINT, linewidth=1)
    axes.set_yticks(
        range(len(shown)), [f"{figure.label}\n{figure.against}" for figure in shown], fontsize=8.5, color=INK
    )
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max([1.0, *(figure.ratio or 0 for figure in shown)]))
    axes.set_xlabel("times the floor of this machine (the second line), median of rounds", color=INK, fontsize=9)
    title = f"{size_text(report.state_bytes)} in {report.tensors or 0:,} tensors, {report.machine['cores']} cores"
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    drawing.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, facecolor=PAPER)
