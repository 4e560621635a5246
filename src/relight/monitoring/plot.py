"""The chart of ``relight show --trace``: a row for each rank and process, and below them the critical path."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Drawing

from relight.monitoring.trace import HANDOVER, SaveTrace
from relight.observe.spans import PARTS
from relight.units import duration_text

PAPER, INK = "#fbfaf7", "#22262e"
COLOURS = dict(
    zip(PARTS, ("#b5482f", "#e9c46a", "#8c5e58", "#1e3a5f", "#c3cedb", "#5b7a9d", "#3f7d58", "#93a8bf"), strict=True)
)
COLOURS[HANDOVER] = "#dddddd"
LANES_MAX = 64


def draw(trace: SaveTrace, path: Path) -> None:
    """Write the chart to ``path``, in the format of its ending (``.png``, ``.svg``, ``.pdf``)."""
    lanes = sorted(
        {(span.rank, span.role) for span in trace.spans},
        key=lambda lane: (lane[1] == "drain", lane[0], lane[1] != "trainer"),
    )
    lanes = lanes[:LANES_MAX]
    drawing = Drawing(figsize=(10, 2.0 + 0.35 * (len(lanes) + 1)), facecolor=PAPER, dpi=150)
    FigureCanvasAgg(drawing)
    axes = drawing.subplots()
    axes.set_facecolor(PAPER)
    drawn: set[str] = set()

    def bar(row: int, part: str, start: float, seconds: float) -> None:
        label = None if part in drawn else part
        axes.barh(row, seconds, left=start - trace.start, color=COLOURS[part], height=0.7, label=label)
        drawn.add(part)

    for span in sorted(trace.spans, key=lambda span: -PARTS.index(span.part)):
        if (span.rank, span.role) in lanes:
            bar(lanes.index((span.rank, span.role)), span.part, span.start, span.seconds)
    for leg in trace.path:
        bar(len(lanes), leg.part, leg.start, leg.seconds)
    names = [role if role == "drain" else f"rank {rank} {role}" for rank, role in lanes]
    axes.set_yticks(range(len(lanes) + 1), [*names, "critical path"], fontsize=8.5, color=INK)
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the save was requested", color=INK, fontsize=9)
    axes.set_title(
        f"save {trace.id}, step {trace.step}: {duration_text(trace.durable_s)}",
        color=INK,
        fontsize=10,
        loc="left",
        pad=24,
    )
    named = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    order = [part for part in COLOURS if part in named]
    axes.legend(
        [named[part] for part in order],
        order,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=8,
        frameon=False,
        fontsize=8,
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    drawing.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, facecolor=PAPER)
