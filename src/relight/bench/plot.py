"""The picture: how many times its floor each of Relight's figures takes, round by round."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Drawing

from relight.bench.plan import bytes_text
from relight.bench.report import BenchReport

PAPER, INK, FAINT, BAR = "#fbfaf7", "#22262e", "#8a8f98", "#1e3a5f"


def draw(report: BenchReport, path: Path) -> None:
    """Write the picture to ``path``, as its ending says (``.png``, ``.svg``, ``.pdf``)."""
    shown = [one for one in report.relight if one.ratio is not None]
    drawing = Drawing(figsize=(10, 1.4 + 0.55 * len(shown)), facecolor=PAPER, dpi=150)
    FigureCanvasAgg(drawing)
    axes = drawing.subplots()
    axes.set_facecolor(PAPER)
    for at, one in enumerate(shown):
        assert one.ratio is not None
        axes.barh(at, one.ratio, color=BAR, height=0.6)
        axes.text(one.ratio, at, f" {one.ratio:.2f} ×", va="center", color=INK, fontsize=9)
    axes.axvline(1, color=FAINT, linewidth=1)
    axes.set_yticks(range(len(shown)), [f"{one.label}\n{one.against}" for one in shown], fontsize=8.5, color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max([1.0, *(one.ratio or 0 for one in shown)]))
    axes.set_xlabel("times the floor of this machine (the second line), median of rounds", color=INK, fontsize=9)
    title = f"{bytes_text(report.state_bytes)} in {report.tensors or 0:,} tensors, {report.machine['cores']} cores"
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    drawing.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, facecolor=PAPER)
