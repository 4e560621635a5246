"""Chart of ``relight plan simulate``: each policy's use of time, and its stored bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Drawing

from relight.simulator.result import BUCKETS, SAVING, USEFUL, Summary
from relight.supervise.plot import GOOD, INK, LOST, PAPER, WORK
from relight.units import percent_text

_CAUSES_MAX = len(LOST)


def draw(summaries_by_title: Sequence[tuple[str, Sequence[Summary]]], days: float, path: Path) -> None:
    """Write a chart of the summaries, by title, to ``path``.

    Its suffix selects the format (``.png``, ``.svg``, ``.pdf``).
    """
    rows = [
        (title if number == 0 else "", summary)
        for title, summaries in summaries_by_title
        for number, summary in enumerate(summaries)
    ]
    height = 1.2 + 0.45 * len(rows)
    drawing = Drawing(figsize=(10, height + 3.2), facecolor=PAPER, dpi=150)
    FigureCanvasAgg(drawing)
    upper, lower = drawing.subplots(2, 1, height_ratios=[height, 2.4])
    _bars(upper, rows)
    _storage(lower, rows, days)
    for axes in (upper, lower):
        axes.set_facecolor(PAPER)
        axes.tick_params(colors=INK, labelsize=8.5)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    drawing.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, facecolor=PAPER)


def _bars(axes: Any, rows: Sequence[tuple[str, Summary]]) -> None:
    """Draw a bar for each policy: shares of useful time, of saves, and of losses by cause."""
    causes = sorted(
        {cause for _, summary in rows for cause in summary.by_cause},
        key=lambda cause: -max(summary.by_cause.get(cause, 0.0) for _, summary in rows),
    )
    shown, other_causes = causes[:_CAUSES_MAX], causes[_CAUSES_MAX:]
    colours = {"useful": GOOD, "saves": WORK[0]} | {
        f"lost to: {cause}": LOST[position % len(LOST)] for position, cause in enumerate(shown)
    }
    colours |= {"lost to: others": WORK[2]} if other_causes else {}
    drawn: set[str] = set()
    least = min(summary.parts[USEFUL] for _, summary in rows)
    for position, (_, summary) in enumerate(rows):
        offset = 0.0
        shares = {"useful": summary.parts[USEFUL], "saves": summary.parts[SAVING]} | {
            f"lost to: {cause}": summary.by_cause.get(cause, 0.0) for cause in shown
        }
        shares["lost to: others"] = sum(summary.by_cause.get(cause, 0.0) for cause in other_causes)
        for name, colour in colours.items():
            share = 100 * shares[name]
            axes.barh(
                position,
                share,
                left=offset,
                color=colour,
                height=0.6,
                label=None if name in drawn or not share else name,
            )
            offset += share
            drawn |= {name} if share else set()
        axes.text(100.3, position, percent_text(summary.goodput.median), va="center", color=INK, fontsize=9)
    axes.set_yticks(range(len(rows)), [summary.policy[:28] for _, summary in rows], fontsize=8.5, color=INK)
    axes.invert_yaxis()
    first_percent = 10 * int(10 * max(0.0, least - 0.05)) if least > 0.3 else 0
    axes.set_xlim(first_percent, 100 + (100 - first_percent) * 0.08)
    titles = [title for title, _ in rows if title]
    axes.set_xlabel(
        f"share of the time, %{f' (from {first_percent} on)' if first_percent else ''}; on the right the median goodput",
        color=INK,
        fontsize=9,
    )
    axes.set_title(
        titles[0] if len(titles) == 1 else f"{titles[0]}, and {len(titles) - 1} more below",
        loc="left",
        color=INK,
        fontsize=10,
        pad=46,
    )
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5, frameon=False, fontsize=8)


def _storage(axes: Any, rows: Sequence[tuple[str, Summary]], days: float) -> None:
    """Draw each policy's stored bytes: the median over seeds of the peak in each bucket of time."""
    times = [days * (part + 1) / BUCKETS for part in range(BUCKETS)]
    lines: dict[tuple[float, ...], list[str]] = {}
    for _, summary in rows:
        lines.setdefault(summary.stored, []).append(summary.policy[:20])
    for number, (stored, names) in enumerate(lines.items()):
        axes.plot(
            times,
            [count / 1e12 for count in stored],
            color=(GOOD, *LOST)[number % (1 + len(LOST))],
            label=", ".join(names)[:60],
            linewidth=1.3,
        )
    axes.set_xlabel("days", color=INK, fontsize=9)
    axes.set_ylabel("stored, TB", color=INK, fontsize=9)
    axes.set_xlim(0, days)
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=8)
