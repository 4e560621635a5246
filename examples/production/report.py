"""The result of the day: ``report.md``, with a picture of the steps over time and of where the time went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from job import Job
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

PAPER, INK, GOOD, LOST = "#fbfaf7", "#22262e", "#1e3a5f", "#b5482f"


def write_report(job: Job, straight: Job, seed: int, features: list[str], folder: Path) -> Path:
    """Write the report and its pictures. ``features``: lines of a table. The store must still be readable."""
    goodput = json.loads(job.relight("goodput", job.hot, "--json"))
    draw(job, folder / "timeline.png")
    job.relight("goodput", job.hot, "--plot", str(folder / "goodput.png"))
    ours, theirs = job.losses(), straight.losses()
    exact = sorted(theirs)
    same = sum(ours.get(step) == theirs[step] for step in exact)
    last = max(theirs)
    lines = [
        f"# A production run and its trouble, seed {seed}", "",
        f"{job.lines()} steps were made for {len(ours)}; {len(job.incidents())} incidents; no person helped.", "",
        f"- losses that have to be, to the bit, the undisturbed run's: {len(exact)}; that are: {same}",
        f"- the last loss: {ours[last]!r}; the undisturbed run's: {theirs[last]!r}", "",
        "![Steps over time](timeline.png)", "", "![Where the time went](goodput.png)", "",
        "## What the seed switched on", "", *features, "",
        "## What was planted", "", "| at | step | what |", "|---|---|---|",
        *(f"| {time_s - job.rows()[0]['at']:.0f} s | {step} | {name} |" for name, time_s, step in job.stages), "",
        "## Incidents", "", "| kind | step | done | why |", "|---|---|---|---|",
        *(f"| {row['kind']} | {row['step']} | {row['action']} | {_cell(row['why'])} |" for row in job.incidents()), "",
        "## Alerts that came", "", *(f"- {_cell(alert)}" for alert in job.onlookers.alerts), "",
        "## Where the time went", "", "```json", json.dumps(_rounded(goodput), indent=1), "```", "",
    ]  # fmt: skip
    path = folder / "report.md"
    path.write_text("\n".join(lines))
    return path


def draw(job: Job, path: Path) -> None:
    """Draw each step at its time, with planted trouble and incidents as vertical lines."""
    rows, incidents = job.rows(), job.incidents()
    drawing = Figure(figsize=(10, 4.5), facecolor=PAPER, dpi=150)
    FigureCanvasAgg(drawing)
    axes = drawing.subplots()
    axes.set_facecolor(PAPER)
    began = rows[0]["at"]
    axes.plot([row["at"] - began for row in rows], [row["step"] for row in rows], ".", markersize=2.5, color=GOOD)
    for name, time_s, _ in job.stages:
        axes.axvline(time_s - began, color=INK, linewidth=0.5, linestyle=":")
        axes.text(time_s - began, rows[-1]["step"] * 1.02, name, rotation=45, fontsize=7.5, color=INK, va="bottom")
    for incident in incidents:
        axes.axvline(int(incident["id"].split("-")[0]) / 1000 - began, color=LOST, linewidth=0.9)
    axes.set_ylim(0, rows[-1]["step"] * 1.2)
    axes.set_xlabel("seconds; dotted: planted, red: incidents", fontsize=9, color=INK)
    axes.set_ylabel("step", fontsize=9, color=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    drawing.tight_layout()
    drawing.savefig(path, facecolor=PAPER)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:200]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value
