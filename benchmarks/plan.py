"""Is a plan right on this machine? Stall, durable and load times of ``relight plan``, against later measurements.

    python -m benchmarks.plan --store /scratch/relight --out plan.json

Two sizes are measured by ``relight bench``; the plan for three others comes from them alone, and is held against what
these take. All five are measured in turns, pass by pass, in a random order: a disk is not as fast in one minute as in
the next. Wants a quiet machine. Ends with 1 if any of the nine times is further off than ``--within``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from relight.cost_model import prior
from relight.cost_model.planned import MeasuredTime, ParallelLayout, Question, fit, plan
from relight.cost_model.sizing import Size

FIGURES = {"stall": "save_lost", "durable": "save_durable", "load": "restore_cold"}
LEARNED, ASKED = ("96MB", "1200MB"), ("200MB", "500MB", "900MB")
"""What the plan is made from, and what it is held against: within what was measured, not at its ends."""


def measure(store: str, size: str, rounds: int) -> dict[str, Any]:
    """``relight bench`` of one size, in a process of its own."""
    print(f"measuring {size} …", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "relight", "bench", store, "--size", size, "--rounds", str(rounds), "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)  # type: ignore[no-any-return]


def seconds(reports: list[dict[str, Any]], figure: str) -> float:
    """Return the median of one figure over all passes. A pass gives the median of its rounds."""
    return statistics.median(
        next(float(row["seconds"]) for row in report["relight"] if row["name"] == figure) for report in reports
    )


def predicted(measured: dict[str, MeasuredTime], size: int) -> dict[str, float]:
    """Return the plan's figures for a state of that size."""
    start_s = 10.0
    question = Question(
        size=Size({"weights": size}, "as measured"),
        layout=ParallelLayout(1, 1),
        belief=prior(1),
        rate_source="published",
        measured=measured,
        start_s=start_s,
        levels=("memory", "store"),
    )
    answer = plan(question)
    store = answer.sources[-1]
    return {"stall": answer.costs.stall_s, "durable": store.has_after_s, "load": store.restart_s - start_s}


def main() -> int:
    """Measure, plan, measure, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, help="on the disk to measure; by default a temporary directory")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2, help="of each size in each pass")
    parser.add_argument("--within", type=float, default=0.15)
    parser.add_argument("--learned", nargs="+", default=LEARNED, help="sizes that the plan is made from")
    parser.add_argument("--asked", nargs="+", default=ASKED, help="sizes that it is held against")
    parser.add_argument("--out", type=Path, help="the figures as JSON")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.store) as folder:
        reports: dict[str, list[dict[str, Any]]] = {size: [] for size in [*given.learned, *given.asked]}
        for turn in range(given.passes):
            for size in random.Random(turn).sample(list(reports), len(reports)):
                reports[size].append(measure(folder, size, given.rounds))
        points = {
            name: [(float(reports[size][0]["state_bytes"]), seconds(reports[size], figure)) for size in given.learned]
            for name, figure in FIGURES.items()
        }
        lines = {name: fit(measured, "relight bench") for name, measured in points.items()}
        rows = []
        for size in given.asked:
            state_bytes = int(reports[size][0]["state_bytes"])
            prediction = predicted(lines, state_bytes)
            for name, figure in FIGURES.items():
                took = seconds(reports[size], figure)
                off = prediction[name] / took - 1
                rows.append(
                    {"bytes": state_bytes, "what": name, "planned_s": prediction[name], "measured_s": took, "off": off}
                )
        machine = describe(Path(folder))
    print(f"{'state':>9}  {'':8}  {'planned':>9}  {'measured':>9}  {'off':>6}")
    for row in rows:
        print(
            f"{row['bytes'] / 1e6:6.0f} MB  {row['what']:8}  {row['planned_s']:7.3f} s  {row['measured_s']:7.3f} s  {row['off']:+6.1%}"
        )
    worst = max(abs(float(row["off"])) for row in rows)
    print(f"the furthest is off by {worst:.1%}; {given.within:.0%} is allowed")
    if given.out is not None:
        given.out.write_text(json.dumps({"machine": machine, "rows": rows, "worst": worst}, indent=1) + "\n")
    return 0 if worst <= given.within else 1


if __name__ == "__main__":
    sys.exit(main())
