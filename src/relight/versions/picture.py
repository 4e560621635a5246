"""Draw the lineage as a picture: steps to the right, a row for each run, branches where they begin."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from relight.errors import ConfigError
from relight.versions.lineage import Node

_PAPER, _INK, _FAINT = "#fbfaf7", "#22262e", "#b6bac1"
_COLORS = ("#1e3a5f", "#d1274b", "#1f9d61", "#f6b93b", "#7b4fa3", "#3c8dbc", "#a3622c")
_LABELS_MAX = 60
ENDINGS = (".png", ".svg", ".pdf")


def picture(nodes: Sequence[Node], path: str) -> None:
    """Write the picture to ``path`` in the format of its suffix. Raise ``ConfigError`` for another suffix, or without matplotlib."""
    target = Path(path)
    if target.suffix not in ENDINGS:
        raise ConfigError(
            f"{target.suffix or 'no ending'!r} is no kind of picture", where=path, hint=f"one of {', '.join(ENDINGS)}"
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise ConfigError("pictures need matplotlib", hint="pip install matplotlib") from None
    runs = list(dict.fromkeys(node.run for node in reversed(nodes)))
    row = {run: number for number, run in enumerate(runs)}
    colors = {run: _COLORS[number % len(_COLORS)] for number, run in enumerate(runs)}
    figure = Figure(figsize=(11.0, 1.6 + 0.9 * max(1, len(runs))), facecolor=_PAPER, dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_facecolor(_PAPER)
    known = {node.id: node for node in nodes}
    for node in nodes:
        for parent, between in node.parents:
            ancestor = known.get(parent)
            if ancestor is not None:
                ends = ([ancestor.checkpoint.step, node.checkpoint.step], [row[ancestor.run], row[node.run]])
                axes.plot(
                    *ends, color=colors[node.run], linewidth=1.4, linestyle=":" if between else "-", alpha=0.8, zorder=1
                )
    for node in nodes:
        color = _FAINT if node.set_aside else colors[node.run]
        axes.scatter(
            [node.checkpoint.step], [row[node.run]], s=30, color=color, edgecolors=_PAPER, linewidths=0.8, zorder=2
        )
    for node in [labelled for labelled in nodes if labelled.tags][:_LABELS_MAX]:
        point = (node.checkpoint.step, row[node.run])
        label = ", ".join(node.tags)
        axes.annotate(
            label[:40], point, xytext=(0, 9), textcoords="offset points", ha="center", fontsize=7.5, color=_INK
        )
    axes.set_yticks(range(len(runs)), runs)
    axes.set_ylim(len(runs) - 0.4, -0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step", color=_INK)
    axes.tick_params(colors=_INK, length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.grid(axis="x", color="#e6e4de", linewidth=0.7, zorder=0)
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, facecolor=_PAPER)
