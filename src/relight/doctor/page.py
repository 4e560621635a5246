"""Generate the table of checks in docs/doctor.md from the registry: ``python -m relight.doctor.page docs/doctor.md``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from relight.doctor.judge import all_checks

BEGIN, END = "<!-- made by python -m relight.doctor.page -->", "<!-- end -->"
PARTS = {
    "machine": "This machine",
    "store": "The store",
    "run": "A run",
    "config": "Settings",
    "nodes": "Between nodes",
}


def table_of_checks() -> str:
    """Return a Markdown table for each part of the checks."""
    blocks = []
    for part, title in PARTS.items():
        rows = [
            f"| `{check.name}` | {check.severity} | {check.about} |"
            for check in all_checks().values()
            if check.part == part
        ]
        blocks.append("\n".join([f"### {title}", "", "| check | | found when |", "|---|---|---|", *rows]))
    return "\n\n".join(blocks)


def put_in(text: str) -> str:
    """Return ``text`` with the current table between its markers."""
    return re.sub(
        f"{re.escape(BEGIN)}.*{re.escape(END)}",
        lambda match: f"{BEGIN}\n{table_of_checks()}\n{END}",
        text,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(put_in(page.read_text(encoding="utf-8")), encoding="utf-8")
