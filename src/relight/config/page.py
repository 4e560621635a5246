"""The table of settings in docs/configuration.md: ``python -m relight.config.page docs/configuration.md`` puts it in anew."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from relight.settings.registry import SETTINGS, TABLES

BEGIN, END = "<!-- made by python -m relight.config.page -->", "<!-- end -->"
_RULES = "alerts.rules."


def table_of_settings() -> str:
    """Markdown: a table a table of the file."""
    blocks = []
    for name in TABLES:
        those = [one for one in SETTINGS.values() if one.name.startswith(f"{name}.") and not one.name.startswith(_RULES)]
        rows = [
            f"| `{one.name.removeprefix(f'{name}.')}` | {one.argument and f'`{one.argument}`'} | {one.kind} | {one.default} | {one.doc} |"
            for one in those
        ]
        blocks.append("\n".join([f"### {name}", "", "| key | argument | what it may be | default | |", "|---|---|---|---|---|", *rows]))
    return "\n\n".join(blocks)


def put_in(text: str) -> str:
    """``text`` with the table between its marks."""
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda match: f"{BEGIN}\n{table_of_settings()}\n{END}", text, flags=re.DOTALL)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(put_in(page.read_text(encoding="utf-8")), encoding="utf-8")
