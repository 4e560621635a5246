"""``python -m tests.works_with.page`` writes the pages of what works with which tool, from the results of the tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.optimizers import sweep
from tests.works_with.rows import FAILED

ROOT = Path(__file__).parents[2]
RESULTS, SWEEP = Path(__file__).with_name("results"), ROOT / "tests" / "optimizers" / "results.json"
FEATURES = {
    "killed and resumed": "killed, resumed",
    "killed and resumed, 2 workers": "2 loader workers",
    "killed and resumed, 2 ranks": "2 ranks",
    "every optimizer of the library": "every optimizer",
    "export and import": "export, import",
}
"""The columns, by the name of the feature."""
LIBRARIES = {
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao",
    "schedulefree": "schedule-free",
    "prodigyopt": "Prodigy",
    "pytorch_optimizer": "pytorch-optimizer",
    "torch": "torch's optimizers",
    "torch, forms": "torch's optimizers",
}
"""The tool of each library of the sweep that has a row on the page."""
INTRO = """# What works with Relight

Does your tracker, loader, optimizer or framework work with Relight, and how was that tested?

Find the tool, and then the row of its number, which has the test.
Each cell is a test that ran; an empty cell was not tested.

*Killed, resumed* is a job of one process.
SIGKILL ends it one to five times, each time in another step, with all processes that it started. Each time it is started again.
*exact* means that each loss, and each batch of a loader, equals that of a job without a kill, to the bit.
*refused* means that the resume raises an error before the first step, and the error names the solution.
*every optimizer* counts the library's optimizers that were saved, restored into new objects and then exact: see [the table](optimizers-table.md).

The targets that ran the tests write this page: `make optimizers`, `make loaders`, `make plugins`, `make trackers` and `make exports`.
"""
LOADERS_INTRO = """# Table: loaders

Where does a loader of your library continue after SIGKILL?

`make loaders` writes this page.
A small job trains on 960 samples in six files, and is killed at the end of a training epoch, and again in the middle of one.
*exact* means that each batch and each loss equals that of a job without a kill, to the bit.

[Data](guides/data.md) explains how Relight finds the position again.
"""


def rows() -> list[dict[str, Any]]:
    """Return all rows, those of the sweep included, sorted by tool."""
    listed = [row for path in sorted(RESULTS.glob("*.json")) for row in json.loads(path.read_text())]
    listed += sweep_rows(json.loads(SWEEP.read_text()))
    return sorted(listed, key=lambda row: (row["tool"].lower(), [*FEATURES].index(row["feature"]), row["command"]))


def sweep_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each library of the sweep."""
    listed = []
    for library, tool in LIBRARIES.items():
        outcomes = results["libraries"][library]["outcomes"]
        exact = sum(kind == sweep.EXACT for kind, _ in outcomes.values())
        others = [f"{name}: {kind}" for name, (kind, _) in outcomes.items() if kind != sweep.EXACT]
        shown = [*others[:3], *(["others: see the table of optimizers"] if len(others) > 3 else [])]
        listed.append(
            {
                "tool": tool,
                "version": results["libraries"][library]["version"],
                "feature": "every optimizer of the library",
                "outcome": f"{exact} of {len(outcomes)} exact",
                "why": "; ".join(
                    (["forms by an argument, such as `fused=True`"] if "forms" in library else []) + shown
                ),
                "target": "optimizers",
                "command": f"tests/optimizers/sweep.py --only '{library}'",
            }
        )
    return listed


def works_with(listed: list[dict[str, Any]]) -> str:
    """Return the page with the table of features and tools."""
    lines = [INTRO, "| tool | version | " + " | ".join(FEATURES.values()) + " |", "|---|---|" + "---|" * len(FEATURES)]
    numbered = list(enumerate(listed, 1))
    for tool in dict.fromkeys(row["tool"] for row in listed):
        own = [(number, row) for number, row in numbered if row["tool"] == tool]
        cells = [_cell((number, row) for number, row in own if row["feature"] == feature) for feature in FEATURES]
        lines.append(f"| {tool} | {own[0][1]['version']} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "## The tests",
        "",
        "| number | tool | tried | outcome | target | test |",
        "|---:|---|---|---|---|---|",
    ]
    for number, row in numbered:
        what = FEATURES[row["feature"]] + (f"; {row['why']}" if row["why"] else "")
        lines.append(
            f"| {number} | {row['tool']} | {_plain(what)} | {row['outcome']} | `make {row['target']}` | `{row['command']}` |"
        )
    return "\n".join([*lines, ""])


def _cell(own: Iterable[tuple[int, dict[str, Any]]]) -> str:
    """Return the outcomes of one tool and feature, each with the numbers of its tests."""
    numbers: dict[str, list[str]] = {}
    for number, row in own:
        numbers.setdefault(row["outcome"], []).append(str(number))
    return "; ".join(f"{outcome} ({', '.join(tests)})" for outcome, tests in numbers.items())


def loaders(listed: list[dict[str, Any]]) -> str:
    """Return the page with the table of loaders."""
    lines = [LOADERS_INTRO, "| library | version | loader | no workers | 2 workers |", "|---|---|---|---|---|"]
    outcomes: dict[tuple[str, ...], dict[str, str]] = {}
    for row in listed:
        if row["target"] == "loaders":
            key = (row["tool"], row["version"], row["why"])
            outcomes.setdefault(key, {})[row["feature"]] = row["outcome"]
    for key, of in outcomes.items():
        tried = [of.get(feature, "") for feature in ("killed and resumed", "killed and resumed, 2 workers")]
        lines.append("| " + " | ".join(map(_plain, (*key, *tried))) + " |")
    return "\n".join([*lines, ""])


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def pages() -> dict[Path, str]:
    """Return the text of each page."""
    listed = rows()
    return {
        ROOT / "docs" / "works-with.md": works_with(listed),
        ROOT / "docs" / "loaders-table.md": loaders(listed),
        ROOT / "docs" / "optimizers-table.md": sweep.table(json.loads(SWEEP.read_text())),
    }


def failed() -> list[str]:
    """Return the commands of the tests that failed."""
    return [row["command"] for row in rows() if row["outcome"] == FAILED]


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
