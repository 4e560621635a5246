"""Template values of charts: metrics of one or several runs over steps or time. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from relight.serve.curves import smoothed
from relight.serve.draw import Curve, Mark, line, thinned
from relight.serve.pages_addresses import at
from relight.serve.pages_words import number
from relight.serve.values import SeriesDetail
from relight.units import count_text

CHARTS_MAX, RUNS_MAX = 12, 8
"""Charts of a page, and runs in one chart: as many as there are colours."""
SMOOTH = (0, 10, 50, 200)
_TREND_POINTS_MAX = 2000


class ChartOptions(NamedTuple):
    """What the form above the charts selects."""

    axis: str = "step"
    """``step``, or ``time`` since the run's first point."""
    scale: str = "linear"
    """``linear`` or ``log``."""
    smooth: int = 0
    find: str = ""
    """Part of a metric's name."""

    @property
    def log(self) -> bool:
        """Whether values are logarithmic."""
        return self.scale == "log"


class RunSeries(NamedTuple):
    """A run and its metrics."""

    store: str
    run: str
    series: Mapping[str, SeriesDetail]


def options_of(axis: str, scale: str, smooth: str, find: str) -> ChartOptions:
    """Return the options of a query. Unknown values count as the defaults."""
    points = int(smooth) if smooth.isascii() and smooth.isdecimal() and len(smooth) < 6 else 0
    return ChartOptions(
        axis if axis == "time" else "step", scale if scale == "log" else "linear", min(points, 10_000), find
    )


def charts(runs: Sequence[RunSeries], options: ChartOptions, marks: Sequence[Mark] = ()) -> dict[str, Any]:
    """Return a chart for each metric, the loss first, with one curve for each run. ``marks``: at steps, of the only run.

    Each chart is a picture, and data for the script that replaces it with a chart of all points.
    """
    names = sorted({name for run in runs for name in run.series}, key=lambda name: (name != "loss", name))
    matching = [name for name in names if options.find.lower() in name.lower()]
    shown = [_chart(name, runs, options, marks) for name in matching[:CHARTS_MAX]]
    cut = f"{len(shown)} of {count_text(len(matching), 'metric')}: search for others by a part of their name."
    return {
        "charts": shown,
        "charts_cut": cut if len(matching) > len(shown) else "",
        "options": options,
        "smooth_choices": [(points, f"{points} points" if points else "none") for points in SMOOTH],
        "metrics": len(names),
    }


def _chart(name: str, runs: Sequence[RunSeries], options: ChartOptions, marks: Sequence[Mark]) -> dict[str, Any]:
    having = [run for run in runs if name in run.series and run.series[name].steps]
    per, unit = _unit([run.series[name] for run in having]) if options.axis == "time" else (0.0, "step")
    curves, data = [], []
    for run in having:
        series = smoothed(run.series[name], options.smooth)
        origin = min(series.seconds) if per else 0.0
        label = run.run if len(runs) > 1 else name
        curves.append(_curve(label, series, origin, per))
        href = at("api", "v1", "runs", run.store, run.run, "series", name=name, smooth=options.smooth or None)
        data.append({"name": label, "href": href, "origin": origin, "per": per})
    near = _near(marks, having[0].series[name], per) if len(runs) == 1 and having else []
    missing = sum(value is None for run in having for value in run.series[name].values)
    total = sum(run.series[name].total for run in having)
    drawn = sum(len(run.series[name].steps) for run in having)
    latest = next((value for value in reversed(having[0].series[name].values) if value is not None), None)
    notes = [
        f"{count_text(drawn, 'point')}" + (f" of {number(total)}" if total > drawn else ""),
        f"last {number(latest)}" if len(having) == 1 and latest is not None else "",
        f"{count_text(missing, 'value')} NaN or infinite" if missing else "",
    ]
    first = min(run.series[name].steps[0] for run in having)
    over = f"steps {number(first)} to {number(max(run.series[name].steps[-1] for run in having))}"
    return {
        "name": name,
        "note": ", ".join(note for note in notes if note),
        "marked": bool(near),
        "key": [(index % 8, run.run) for index, run in enumerate(having)] if len(runs) > 1 else [],
        "data": _json(unit, options.log, data, near),
        "picture": line(curves, near, f"{name} over {over}", log=options.log),
    }


def _unit(series: Sequence[SeriesDetail]) -> tuple[float, str]:
    """Return seconds of the unit for the longest of these series, and its name."""
    longest = max(max(each.seconds) - min(each.seconds) for each in series)
    return next(
        (
            (float(size), name)
            for size, name in ((86400, "days"), (3600, "hours"), (60, "minutes"))
            if longest > 2 * size
        ),
        (1.0, "seconds"),
    )


def _curve(label: str, series: SeriesDetail, origin: float, per: float) -> Curve:
    x = [(moment - origin) / per for moment in series.seconds] if per else list(map(float, series.steps))
    points = sorted(zip(x, (value if value is not None else math.nan for value in series.values)), key=lambda p: p[0])
    return Curve(label, [x for x, _ in points], [y for _, y in points])


def _near(marks: Sequence[Mark], series: SeriesDetail, per: float) -> list[Mark]:
    """Return the marks within the range of a series, on its axis."""
    steps, origin = series.steps, min(series.seconds)
    near = [mark for mark in marks if steps[0] <= mark.x <= steps[-1] * 1.05 + 1]
    if not per:
        return near
    places = [min(bisect_left(steps, mark.x), len(steps) - 1) for mark in near]
    return [mark._replace(x=(series.seconds[place] - origin) / per) for mark, place in zip(near, places)]


def trend_data(curve: Curve, unit: str) -> str:
    """Return the data of a chart that has no metric, as JSON text. The template escapes it."""
    thin = thinned(curve, _TREND_POINTS_MAX)
    return _json(unit, False, [{"name": curve.name, "x": list(thin.x), "y": list(thin.y)}], [])


def _json(unit: str, log: bool, curves: Sequence[Mapping[str, Any]], marks: Sequence[Mark]) -> str:
    shown = [{"x": mark.x, "kind": mark.kind} for mark in marks]
    return msgspec.json.encode({"unit": unit, "log": log, "curves": curves, "marks": shown}).decode()
