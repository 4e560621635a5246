"""The chart of ``relight goodput``: one bar for each job, divided by what its time was spent on."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Drawing

from relight.supervise.goodput import TRAINING, Account
from relight.units import percent_text

PAPER, INK = "#fbfaf7", "#22262e"
GOOD, WORK = "#1e3a5f", ("#5b7a9d", "#93a8bf", "#c3cedb", "#3f7f7a", "#7fb3a8", "#bcd8d0", "#6b6f8e", "#a9acc6")
LOST = ("#b5482f", "#d98e5f", "#e9c46a", "#8c5e58", "#c9ada7", "#7d4f50", "#a4643a", "#d3b88c", "#5e3b3c")


def draw(accounts: list[Account], path: Path) -> None:
    """Write the chart to ``path``, in the format of its ending (``.png``, ``.svg``, ``.pdf``)."""
    drawing = Drawing(figsize=(10, 1.8 + 0.6 * len(accounts)), facecolor=PAPER, dpi=150)
    FigureCanvasAgg(drawing)
    axes = drawing.subplots()
    axes.set_facecolor(PAPER)
    kinds = sorted({kind for account in accounts for kind in account.lost})
    parts = sorted({part for account in accounts for part in account.spent if part != TRAINING})
    colours = {TRAINING: GOOD} | {part: WORK[index % len(WORK)] for index, part in enumerate(parts)}
    colours |= {f"lost to: {kind}": LOST[index % len(LOST)] for index, kind in enumerate(kinds)}
    drawn: set[str] = set()
    for row, account in enumerate(accounts):
        offset = 0.0
        spent = {**account.spent, **{f"lost to: {kind}": sum(parts.values()) for kind, parts in account.lost.items()}}
        for name, colour in colours.items():
            share = 100 * spent.get(name, 0.0) / (account.seconds or 1.0)
            axes.barh(
                row, share, left=offset, color=colour, height=0.6, label=None if name in drawn or not share else name
            )
            offset += share
            drawn |= {name} if share else set()
        axes.text(100.5, row, percent_text(account.goodput), va="center", color=INK, fontsize=9)
    axes.set_yticks(
        range(len(accounts)), [account.began.replace("T", " ")[:16] for account in accounts], fontsize=8.5, color=INK
    )
    axes.invert_yaxis()
    axes.set_xlim(0, 108)
    axes.set_xlabel("share of each job's time, %; on the right its goodput", color=INK, fontsize=9)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False, fontsize=8.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    drawing.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, facecolor=PAPER)
