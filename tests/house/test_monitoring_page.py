"""The tables of docs/monitoring.md are made from the code. ``python tests/house/test_monitoring_page.py`` writes them anew."""

from __future__ import annotations

import re
from pathlib import Path

from relight.monitoring.rules import KINDS
from relight.observe.fields import CARRIES, FIELDS
from relight.observe.metrics import METRICS

PAGE = Path(__file__).parents[2] / "docs" / "monitoring.md"


def metrics_table() -> str:
    """A row a metric."""
    rows = [f"| `{one.name}` | {one.kind} | {', '.join(one.labels)} | {one.help} |" for one in METRICS]
    return "\n".join(["| metric | kind | labels | |", "|---|---|---|---|", *rows])


def rules_table() -> str:
    """A row a kind of alert."""
    rows = []
    for name, kind in KINDS.items():
        limit = f"`{kind.limit} = {kind.default:g}`" if kind.limit else ""
        rows.append(f"| `{name}` | {kind.summary} | {limit} | {kind.severity} | {f'{kind.for_s:g} s' if kind.for_s else ''} |")
    return "\n".join(["| rule | means | limit | severity | must hold for |", "|---|---|---|---|---|", *rows])


def events_table() -> str:
    """A row an event, then what the fields mean."""
    events = [f"| `{name}` | {' '.join(f'`{field}`' for field in fields)} |" for name, fields in CARRIES.items()]
    fields = [f"| `{name}` | {words} |" for name, words in sorted(FIELDS.items())]
    return "\n".join(["| event | fields |", "|---|---|", *events, "", "| field | |", "|---|---|", *fields])


def written() -> str:
    """The page as it should be."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in (("metrics", metrics_table()), ("rules", rules_table()), ("events", events_table())):
        text = re.sub(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", lambda found: f"{found[1]}{table}\n{found[2]}", text, flags=re.DOTALL)
    return text


def test_the_tables_are_what_the_code_says() -> None:
    """Metrics, rules and events as they are defined."""
    text = PAGE.read_text(encoding="utf-8")
    assert text == written(), "python tests/house/test_monitoring_page.py writes it"
    assert all(f"`{one.name}`" in text for one in METRICS)


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
