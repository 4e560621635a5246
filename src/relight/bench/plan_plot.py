"""The picture of ``relight plan``: expected goodput over the save interval, with the optimum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Drawing

from relight.cost_model.planned import JobPlan
from relight.units import duration_text, percent_text

PAPER, INK, OURS, STORE = "#fbfaf7", "#22262e", "#1e3a5f", "#b5482f"
POINTS = 240


def draw(plan: JobPlan, path: Path) -> None:
    """Write the picture to ``path``, in the format of its suffix (``.png``, ``.svg``, ``.pdf``)."""
    drawing = Drawing(figsize=(9, 5), facecolor=PAPER, dpi=150)
    FigureCanvasAgg(drawing)
    axes = drawing.subplots()
    axes.set_facecolor(PAPER)
    best, alone = plan.best.seconds, plan.store_only.seconds
    low, high = min(best, alone) / 8, max(best, alone) * 30
    least = max(low, plan.sources[-1].has_after_s)  # saves do not overlap
    intervals = [least * (high / least) ** (index / POINTS) for index in range(POINTS + 1)]
    if len(plan.sources) > 1:
        axes.plot(
            intervals,
            [100 * (1 - plan.lost_at(interval_s)) for interval_s in intervals],
            color=OURS,
            label=f"restores from {', '.join(source.name for source in plan.sources)}",
        )
        _mark(axes, best, plan.goodput, OURS)
    axes.plot(
        intervals,
        [100 * (1 - plan.store_lost_at(interval_s)) for interval_s in intervals],
        color=STORE,
        ls="--",
        label="restores from the store alone",
    )
    _mark(axes, alone, 1 - plan.store_only.waste, STORE)
    axes.set_xscale("log")
    ticks = [
        tick
        for tick in (0.01, 0.1, 1, 10, 60, 600, 3600, 6 * 3600, 86400, 10 * 86400, 100 * 86400)
        if low <= tick <= high
    ]
    axes.set_xticks(ticks, [duration_text(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(low, high)
    axes.set_xlabel("from one save to the next", color=INK)
    axes.set_ylabel("expected goodput, %", color=INK)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower center")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    drawing.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, facecolor=PAPER)


def _mark(axes: Any, interval_s: float, goodput: float, colour: str) -> None:
    axes.plot([interval_s], [100 * goodput], "o", color=colour, ms=7)
    text = f"{duration_text(interval_s)}: {percent_text(goodput, 2)}"
    axes.annotate(
        text,
        (interval_s, 100 * goodput),
        xytext=(0, 10),
        textcoords="offset points",
        ha="center",
        color=colour,
        fontsize=9,
    )
