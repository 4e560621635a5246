"""The demo's picture: both loss curves, one over the other, with the kills, and below them the processes of the killed run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from relight.demo.compare import Finished
from relight.demo.report import DemoReport, Kill
from relight.units import compact_text, duration_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAPER, INK, FAINT = "#fbfaf7", "#22262e", "#8a8f98"
STRAIGHT, KILLED = "#f6b93b", "#1e3a5f"
OUTSIDE, INSIDE, RESUMED = "#3c4654", "#d1274b", "#1f9d61"
_PATCH = {"boxstyle": "square,pad=0.15", "facecolor": PAPER, "edgecolor": "none"}


def draw(report: DemoReport, straight: Sequence[Finished], killed: Sequence[Finished], path: Path) -> None:
    """Write the picture to ``path``, in the format of its suffix (``.png``, ``.svg``, ``.pdf``)."""
    figure = Figure(figsize=(11.5, 7.2), facecolor=PAPER, dpi=150)
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3.2, 1.25])
    figure.subplots_adjust(left=0.07, right=0.975, top=0.855, bottom=0.08, hspace=0.07)
    _title(figure, report)
    _curves(top, report, straight, killed)
    _lives(bottom, report)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, facecolor=PAPER)


def _title(figure: Figure, report: DemoReport) -> None:
    count, inside = len(report.kills), report.kills_inside_save
    if report.difference is None:
        head = f"Killed {count} times, {inside} of them inside a save. The same curve, to the last bit."
        colour = INK
    else:
        step = report.difference.step
        head = f"Not equal: the runs differ {'at the end' if step is None else f'from step {step} on'}."
        colour = INSIDE
    figure.text(0.07, 0.94, head, fontsize=17, fontweight="bold", color=colour)
    figure.text(
        0.07,
        0.9,
        f"GPT of {compact_text(report.parameters)} parameters on the source of Python's standard library  ·  "
        f"{report.steps} steps, saved every {report.save_every}  ·  {report.redone} steps redone  ·  seed {report.seed}",
        fontsize=10.5,
        color=FAINT,
    )


def _curves(axes: Axes, report: DemoReport, straight: Sequence[Finished], killed: Sequence[Finished]) -> None:
    curve, killed_curve = _losses(straight), _losses(killed)
    axes.plot(
        list(curve), list(curve.values()), color=STRAIGHT, linewidth=7, alpha=0.75, solid_capstyle="round", zorder=2
    )
    axes.plot(list(killed_curve), list(killed_curve.values()), color=KILLED, linewidth=1.4, zorder=3)
    for kill in report.kills:
        colour, marker = _mark(kill)
        loss = killed_curve.get(kill.step, 0.0)
        axes.axvline(kill.step, color=colour, linewidth=0.9, alpha=0.35, linestyle=(0, (4, 3)), zorder=1)
        _point(axes, kill.step, loss, marker, colour, size=11)
        if kill.resumed_from is not None and kill.resumed_from in killed_curve:
            _point(axes, kill.resumed_from, killed_curve[kill.resumed_from], ">", RESUMED, size=9)
    if report.difference is not None and report.difference.step is not None:
        axes.axvspan(report.difference.step, report.steps - 1, color=INSIDE, alpha=0.08, linewidth=0)
    axes.set_ylabel("loss, nats per byte", color=INK)
    _plain(axes)
    handles = [
        Line2D([], [], color=STRAIGHT, linewidth=7, alpha=0.75, label="never interrupted"),
        Line2D([], [], color=KILLED, linewidth=1.4, label="killed and resumed"),
        _handle(OUTSIDE, "X", "kill -9"),
        _handle(INSIDE, "D", "kill -9 inside a save"),
        _handle(RESUMED, ">", "resumed from here"),
    ]
    legend = axes.legend(handles=handles, loc="upper right", fontsize=10.5, labelcolor=INK, handlelength=2.2)
    legend.get_frame().set(facecolor=axes.get_facecolor(), edgecolor="none", alpha=1)  # a kill's line ends at it


def _lives(axes: Axes, report: DemoReport) -> None:
    """Draw a bar for each process of the killed run, from its first to its last step. Steps that were lost and repeated are hatched."""
    starts = [0, *(kill.resumed_from or 0 for kill in report.kills)]
    ends = [*(kill.step for kill in report.kills), report.steps - 1]
    lost = [*(kill.resumed_from for kill in report.kills), None]
    for row, (start, end, lost_steps) in enumerate(zip(starts, ends, lost, strict=True)):
        kept_until = end + 1 if lost_steps is None else max(min(end + 1, lost_steps), start)
        if kept_until > start:
            axes.barh(
                row, kept_until - start, left=start - 0.5, height=0.5, color=KILLED, alpha=0.85, linewidth=0, zorder=2
            )
        if kept_until <= end:
            axes.barh(
                row, end + 1 - kept_until, left=kept_until - 0.5, height=0.5,
                facecolor="none", edgecolor=KILLED, hatch="/////", linewidth=0.8, alpha=0.6, zorder=2,
            )  # fmt: skip
        if row < len(report.kills):
            _end(axes, row, report.kills[row])
    axes.set_yticks(range(len(ends)), [str(row + 1) for row in range(len(ends))])
    axes.invert_yaxis()
    axes.set_ylabel("process", color=INK)
    axes.set_xlabel("step", color=INK)
    axes.set_xlim(-0.02 * report.steps, report.steps * 1.01)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12, steps=[1, 2, 5, 10]))
    _plain(axes)
    axes.text(
        0.995, 0.93, "hatched: lost, and done again", transform=axes.transAxes,
        ha="right", va="top", fontsize=9, color=FAINT, bbox=_PATCH, zorder=4,
    )  # fmt: skip


def _end(axes: Axes, row: int, kill: Kill) -> None:
    """Draw the kill that ended a process, and the seconds until the next process had finished a step."""
    colour, marker = _mark(kill)
    axes.axvline(kill.step, color=colour, linewidth=0.9, alpha=0.35, linestyle=(0, (4, 3)), zorder=1)
    _point(axes, kill.step + 0.5, row, marker, colour, size=9)
    if kill.back_s is not None:
        axes.annotate(
            f"back at work in {duration_text(kill.back_s)}", (kill.step + 0.5, row), xytext=(9, 0), textcoords="offset points",
            ha="left", va="center", fontsize=8.5, color=FAINT, bbox=_PATCH, zorder=4,
        )  # fmt: skip


def _losses(steps: Sequence[Finished]) -> dict[int, float]:
    return dict(sorted((entry.step, float.fromhex(entry.loss)) for entry in steps))


def _mark(kill: Kill) -> tuple[str, str]:
    return (INSIDE, "D") if kill.inside_save else (OUTSIDE, "X")


def _point(axes: Axes, x: float, y: float, marker: str, colour: str, *, size: float) -> None:
    axes.plot(
        [x], [y], marker=marker, markersize=size, color=colour, markeredgecolor=PAPER, markeredgewidth=1.5, zorder=size
    )


def _handle(colour: str, marker: str, label: str) -> Line2D:
    return Line2D(
        [], [], color=colour, marker=marker, markersize=9, linestyle="none", markeredgecolor=PAPER, label=label
    )


def _plain(axes: Axes) -> None:
    axes.set_facecolor(PAPER)
    axes.grid(axis="y", color=INK, alpha=0.08, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(colors=FAINT, length=0, labelsize=9.5)
