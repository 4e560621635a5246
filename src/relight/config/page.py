"""The table of settings in docs/configuration.md: ``python -m relight.config.page docs/configuration.md`` updates
it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from relight.settings.registry import TABLES, settings_by_name

BEGIN, END = "<!-- made by python -m relight.config.page -->", "<!-- end -->"
_RULES = "alerts.rules."


def table_of_settings() -> str:
    """Return Markdown with one table for each table of the file."""
    blocks = []
    for name in TABLES:
        those = [
            setting
            for setting in settings_by_name().values()
            if setting.name.startswith(f"{name}.") and not setting.name.startswith(_RULES)
        ]
        rows = []
        for setting in those:
            key = setting.name.removeprefix(f"{name}.")
            short = "" if "__" in setting.variable else setting.variable
            same = ", ".join(f"`{text}`" for text in (setting.argument, short) if text)
            rows.append(f"| `{key}` | {same} | {setting.kind} | {setting.default} | {setting.doc} |")
        blocks.append(
            "\n".join(
                [
                    f"### {name}",
                    "",
                    "| key | argument, short variable | what it may be | default | |",
                    "|---|---|---|---|---|",
                    *rows,
                ]
            )
        )
    return "\n\n".join(blocks)


def put_in(text: str) -> str:
    """Return ``text`` with the table of settings between its marks."""
    return re.sub(
        f"{re.escape(BEGIN)}.*{re.escape(END)}",
        lambda match: f"{BEGIN}\n{table_of_settings()}\n{END}",
        text,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(put_in(page.read_text(encoding="utf-8")), encoding="utf-8")
