"""The tables of docs/monitoring.md are made from the code. ``python tests/house/test_monitoring_page.py`` writes them again."""

from __future__ import annotations

import re
from pathlib import Path

from relight.monitoring.rules import KINDS
from relight.observe.fields import CARRIES, FIELDS
from relight.observe.metrics import METRICS

PAGE = Path(__file__).parents[2] / "docs" / "monitoring.md"


def metrics_table() -> str:
    """Return the table of metrics."""
    rows = [f"| `{metric.name}` | {metric.kind} | {', '.join(metric.labels)} | {metric.help} |" for metric in METRICS]
    return "\n".join(["| metric | kind | labels | |", "|---|---|---|---|", *rows])


def rules_table() -> str:
    """Return the table of alert rules."""
    rows = []
    for name, kind in KINDS.items():
        limit = f"`{kind.limit} = {kind.usual.limit[1]:g}`" if kind.limit else ""
        rows.append(
            f"| `{name}` | {kind.summary} | {limit} | {kind.usual.severity} | {f'{kind.usual.for_s:g} s' if kind.usual.for_s else ''} |"
        )
    return "\n".join(["| rule | means | limit | severity | must hold for |", "|---|---|---|---|---|", *rows])


def events_table() -> str:
    """Return the table of events, and the table of their fields."""
    events = [f"| `{name}` | {' '.join(f'`{field}`' for field in fields)} |" for name, fields in CARRIES.items()]
    fields = [f"| `{name}` | {words} |" for name, words in sorted(FIELDS.items())]
    return "\n".join(["| event | fields |", "|---|---|", *events, "", "| field | |", "|---|---|", *fields])


def written() -> str:
    """Return the page's text, with the tables from the code."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in (("metrics", metrics_table()), ("rules", rules_table()), ("events", events_table())):
        text = re.sub(
            rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)",
            lambda match: f"{match[1]}{table}\n{match[2]}",
            text,
            flags=re.DOTALL,
        )
    return text


def test_the_tables_equal_the_definitions_in_the_code() -> None:
    """The page has the present metrics, rules and events."""
    text = PAGE.read_text(encoding="utf-8")
    assert text == written(), "python tests/house/test_monitoring_page.py writes it"
    assert all(f"`{metric.name}`" in text for metric in METRICS)


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
