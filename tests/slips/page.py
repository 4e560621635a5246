"""Write ``docs/what-happens-if.md`` and the table of the notes: ``python -m tests.slips.page``, from the repository's root.

Quotations are real output of the scripts. ``tests/slips/test_slips.py`` compares them with it again.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from tests.slips.before import BEFORE
from tests.slips.harness import Outcome, Runner, fast
from tests.slips.slip import Slip, error_in
from tests.slips.table import CHAPTERS, SLIPS

ROOT = Path(__file__).parents[2]
PAGE, NOTES = ROOT / "docs" / "what-happens-if.md", ROOT / "docs" / "notes" / "021-slips-table.md"
HEAD = f"""# What happens if …

Ordinary slips, and how each one ends: in the right result, or in an error that states what, where, why and what to do. In none of them does Relight lose a checkpoint or take a wrong one. What the user deletes is gone, as three rows of the last table show.

Each row is a script of `tests/slips` that runs as a process of its own. Afterwards a second process checks that every earlier checkpoint that the script did not delete is still there with its values, and that the next start takes the right one. `make slips` runs all {len(SLIPS)} of them; CI runs all but the slow ones. Quoted output is real; `…` stands
for what differs from run to run. [Notes](notes/021-slips-table.md) state how each slip ended before these rules.
"""
_QUOTED_MAX = 260


def quotation(slip: Slip, output: str) -> str:
    """Return what the page quotes of a slip's output, or an empty string."""
    if slip.refused and not slip.quote:
        quoted = error_in(output)
    else:
        match = re.search(slip.quote, output) if slip.quote else None
        quoted = match[0] if match else ""
    quoted = " ".join(line.strip() for line in quoted.splitlines()).replace("`", "'").replace("|", "…")
    if len(quoted) <= _QUOTED_MAX:
        return quoted
    start = quoted[:_QUOTED_MAX]
    return f"{start.rpartition(' ')[0] or start} …"


def row(slip: Slip, quoted: str) -> str:
    """Return the slip's row of the page."""
    return f"| {slip.slip} | {slip.does}{f' `{quoted}`' if quoted else ''} | {slip.do} |"


def quoted_in(page: str, slip: Slip) -> str | None:
    """Return the quotation in the page's row, or None if there is no such row."""
    pattern = rf"^{re.escape(f'| {slip.slip} | {slip.does}')}(?: `([^`]*)`)? {re.escape(f'| {slip.do} |')}$"
    match = re.search(pattern, page, re.MULTILINE)
    return None if match is None else match[1] or ""


def page_of(outcomes: dict[str, Outcome]) -> str:
    """Return the page, with what the scripts printed."""
    parts = [HEAD]
    for chapter, slips in CHAPTERS:
        parts.append(f"## {chapter}\n\n| what happens if … | what Relight does | what to do |\n|---|---|---|")
        parts.append("\n".join(row(slip, quotation(slip, outcomes[slip.name].output)) for slip in slips) + "\n")
    return "\n".join(parts)


def notes_of() -> str:
    """Return the rows of the notes."""
    rows = [f"| {slip.item} | {slip.slip} | {BEFORE.get(slip.name, 'Right already.')} |" for slip in SLIPS]
    return "\n".join(["<!-- slips -->", "| item | slip | on the code before |", "|---|---|---|", *rows, "<!-- end -->"])


def main() -> None:
    """Run all slips, and write both pages."""
    with tempfile.TemporaryDirectory(dir=fast()) as root, Runner(Path(root)) as runner:
        outcomes = {slip.name: runner.run(slip) for slip in SLIPS}
    for name, outcome in outcomes.items():
        if outcome.faults:
            print(f"not right: {name}: {'; '.join(outcome.faults)}")
    PAGE.write_text(page_of(outcomes), encoding="utf-8")
    notes = NOTES.read_text(encoding="utf-8")
    NOTES.write_text(
        re.sub(r"<!-- slips -->.*<!-- end -->", lambda _: notes_of(), notes, flags=re.DOTALL), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
