"""Sizes, durations, rates and counts are shown in one way: the functions of ``relight.units``, and no other formatter."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tree import PRODUCT, SOURCES

from relight.units import (
    UNKNOWN,
    age_text,
    compact_text,
    count_text,
    duration_text,
    parse_count,
    parse_duration,
    parse_size,
    percent_text,
    plural,
    rate_text,
    size_text,
)

ANY = st.floats(allow_nan=True, allow_infinity=True)
AMOUNTS = st.floats(min_value=0, max_value=1e21)
TIMES = st.floats(min_value=1e-9, max_value=1e10)
TEXTS: list[Callable[[float], str]] = [size_text, rate_text, duration_text, age_text, percent_text, count_text]

UNIT = (
    r"(?:ns|µs|us|ms|s|min|h|d|minutes?|hours?|days?|seconds?|B|kB|KB|MB|GB|TB|PB|KiB|kiB|MiB|GiB|TiB|%)(?:/s)?(?!\w)"
)
FORMATTED = re.compile(rf"(?: {UNIT}|%)")
"""Text after a value of an f-string, if the value is an amount of this unit."""
TEMPLATE = re.compile(rf"\{{[^{{}}]*\}} {UNIT}|%[.0-9]*[dfg] {UNIT}|\{{[^{{}}]*%\}}")
"""Placeholder of a template for ``str.format`` or ``%``, with a unit."""
NAMES = {"kB", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "ms", "min", "h"}

_OWN_NUMBER = "an error shows the number that the caller gave"
_OWN_DAYS = "the scenario's key ``days``, as the user gave it"
_OF_A_PAPER = "a label with the numbers of the paper that the row is compared with"
_SETTING = "the value of a setting, which a parser reads"
EXCEPTIONS: dict[str, str] = {
    "cli/keys.py: f'a key is older than {max_age:g} days: relight keys rotate'": "the option's own number",
    "cli/plan_simulate.py: f'{scenario.name}: {count_text(scenario.gpus)} GPUs, {scenario.days:g} days'": _OWN_DAYS,
    "cost_model/interval.py: f'the bounds of the interval are {at_least_s!r} and {at_most_s!r} s'": _OWN_NUMBER,
    "cost_model/schedule.py: f'the bounds of the interval are {self.at_least_s!r} and {self.at_most_s!r} s'": _OWN_NUMBER,
    "cost_model/rates.py: f'{failures!r} failures in {seconds!r} s are impossible'": _OWN_NUMBER,
    "cost_model/presets.py: f'{least:g}s'": _SETTING,
    "cost_model/presets.py: f'{most:g}s'": _SETTING,
    "monitoring/generated.py: f'{rule.for_s:g}s'": "a duration in the language of Prometheus",
    "policy/keep.py: 'not the newest of one of the last {} hours'": "a count of hours, as ``hourly=`` gives it",
    "policy/keep.py: 'not the newest of one of the last {} days'": "a count of days, as ``daily=`` gives it",
    "simulator/clusters.py: f\"{number + 1} of {len(cases)}: {lost['adaptive'] / lost['oracle'] - 1:+.2%} over the oracle's "
    "{lost['oracle']:.4f}\"": "a signed difference, in the progress of a benchmark",
    "simulator/published.py: f'ETTR of 12,000 GPUs at {per_1000_node_days:g} failures in 1,000 node-days, writes of {write_s:g} s'": _OF_A_PAPER,
    "simulator/published.py: f'MTBF {mtbf_s:g} s, stall {stall_s:g}, durable {durable_s:g}, restart {restart_s:g}: every "
    "{interval_s:g} s'": _OF_A_PAPER,
    "simulator/published.py: f'{scenario.gpus:,} GPUs, {days:g} days'": _OWN_DAYS,
    'simulator/published.py: f"{name}\'s period, {period_s:,} s: goodput"': _OF_A_PAPER,
    "simulator/replay.py: f\"only {values['days']:.4g} days are recorded, not {value:g}\"": _OWN_DAYS,
    "simulator/scenario.py: f'about {expected:,.0f} failures are expected in {scenario.days:g} days, and at most {FAILURES_MAX:,} are "
    "simulated'": _OWN_DAYS,
    "simulator/sweep.py: f'up to {count:,.0f} saves in {case.scenario.days:g} days, and at most {SAVES_MAX:,} are simulated'": _OWN_DAYS,
}
"""``file: expression`` of what no function of ``relight.units`` can replace, with the reason."""


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1, "1 B"), (999, "999 B"), (1000, "1 kB"), (1536, "1.54 kB"), (999_499, "999 kB"), (999_500, "1 MB"), (999_960, "1 MB"),
     (13_160e9, "13.2 TB"), (1.49e9, "1.49 GB"), (2e15, "2 PB"), (9.22e18, "9.22 EB"), (-1500, "-1.5 kB"), (-0.0, "0 B"), (0.25, "0.25 B"),
     (1e30, "1e+12 EB"), (10**400, "∞"), (math.inf, "∞"), (-math.inf, "-∞"), (math.nan, UNKNOWN), (None, UNKNOWN)],
)  # fmt: skip
def test_sizes(count: float | None, text: str) -> None:
    """A size has three digits and a decimal unit, and no thousand of a unit."""
    assert size_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (1e-15, "0 s"), (3e-9, "3 ns"), (2e-6, "2 µs"), (0.0004, "400 µs"), (0.0123, "12.3 ms"), (0.9996, "1 s"), (3.414, "3.41 s"),
     (59.94, "59.9 s"), (59.97, "1 min"), (61, "1 min 1 s"), (90, "1 min 30 s"), (3599, "59 min 59 s"), (3599.6, "1 h"), (5400, "1 h 30 min"),
     (86399, "1 d"), (183_600, "2 d 3 h"), (8_640_000, "100 d"), (1e9, "11,574 d"), (1e20, "1.16e+15 d"), (-5400, "-1 h 30 min"),
     (math.inf, "∞"), (-math.inf, "-∞"), (math.nan, UNKNOWN), (None, UNKNOWN)],
)  # fmt: skip
def test_durations(seconds: float | None, text: str) -> None:
    """A duration has three digits below a minute, and two units from there on; it never has 60 of a unit."""
    assert duration_text(seconds) == text


def test_rates_ages_percentages_and_counts() -> None:
    """Rates, ages, percentages, counts and plurals have their texts."""
    assert [rate_text(value) for value in (1.234e9, 0, None)] == ["1.23 GB/s", "0 B/s", UNKNOWN]
    assert [age_text(value) for value in (1, -1, 34.4, 59.6, 300, -300, 183_600)] == [
        "just now", "just now", "34 s ago", "1 min ago", "5 min ago", "in 5 min", "2 d 3 h ago",
    ]  # fmt: skip
    assert [age_text(value) for value in (None, math.nan, math.inf)] == ["never"] * 3
    assert [percent_text(value) for value in (0, 1, 0.9138, 0.00123, -0.5, None)] == [
        "0 %", "100 %", "91.4 %", "0.123 %", "-50 %", UNKNOWN,
    ]  # fmt: skip
    assert [percent_text(value, 2) for value in (0.99954, -0.00001, math.nan)] == ["99.95 %", "0.00 %", UNKNOWN]
    assert [count_text(value) for value in (0, 1234567, -1234, 10**18, 10**5000, math.inf, None)] == [
        "0", "1,234,567", "-1,234", "1e+18", "1e+5000", "∞", UNKNOWN,
    ]  # fmt: skip
    assert [count_text(1, "run"), count_text(2, "copy"), count_text(0, "branch"), count_text(2, "day")] == [
        "1 run", "2 copies", "0 branches", "2 days",
    ]  # fmt: skip
    assert [plural(noun) for noun in ("key", "copy", "box", "class")] == ["keys", "copies", "boxes", "classes"]
    assert [compact_text(value) for value in (0, 12_000, 1.5e12, -2e6)] == ["0", "12k", "1.5T", "-2M"]


@given(ANY)
def test_every_number_has_a_short_text(value: float) -> None:
    """No float raises an error, and a text has at most 20 characters; within usual bounds, at most 12."""
    for text_of in TEXTS:
        assert 0 < len(text_of(value)) <= 20 + 6 * (text_of is count_text)
    if math.isfinite(value) and abs(value) < 1e9:
        assert max(len(size_text(value)), len(duration_text(value))) <= 12


@given(AMOUNTS)
def test_a_size_can_be_parsed_again(value: float) -> None:
    """The parsed text differs from the number by the rounding to three digits."""
    text = size_text(value)
    if "e" not in text:
        assert parse_size(text) == pytest.approx(value, rel=0.0051, abs=0.0006), text


@given(TIMES)
def test_a_duration_can_be_parsed_again(value: float) -> None:
    """The parsed text differs from the number by half of the smaller unit at most."""
    text = duration_text(value)
    if "," not in text and "e" not in text:
        assert parse_duration(text) == pytest.approx(value, rel=0.021), text


@given(AMOUNTS, AMOUNTS)
def test_a_larger_size_has_no_smaller_text(one: float, other: float) -> None:
    """Sizes keep their order."""
    less, more = (parse_size(size_text(value)) for value in sorted((one, other)))
    if less is not None and more is not None:
        assert less <= more


@given(TIMES, TIMES)
def test_a_longer_duration_has_no_shorter_text(one: float, other: float) -> None:
    """Durations keep their order."""
    less, more = (parse_duration(duration_text(value).replace(",", "")) for value in sorted((one, other)))
    assert less is not None and more is not None and less <= more * (1 + 1e-12)


@given(st.integers(min_value=0, max_value=10**6), st.sampled_from(["kB", "MB", "GB", "TB"]))
def test_no_text_has_a_thousand_of_a_unit(count: int, unit: str) -> None:
    """What rounds to 1,000 of a unit is shown in the next one, just below and above the border, too."""
    border = int(parse_size(f"1 {unit}") or 0)
    for value in (border - 1 - count % 1000, border, border + count):
        number = float(size_text(value).split()[0])
        assert number < 1000 and number == float(f"{number:.3g}")


def test_parsers_take_what_people_write() -> None:
    """Units in any case, with or without a space. Other text is None."""
    assert [parse_size(text) for text in ("256MB", "1.5 GiB", "2g", "4096", "1 b", " 7 KB ", "1EB")] == [
        256e6, 3 << 29, 2e9, 4096, 1, 7000, 1e18,
    ]  # fmt: skip
    assert [parse_duration(text) for text in ("36h", "90m", "15 min", "2w", "250ms", "5 µs", "1h30m", "2 d 3 h")] == [
        129_600, 5400, 900, 1_209_600, 0.25, pytest.approx(5e-6), 5400, 183_600,
    ]  # fmt: skip
    assert [parse_count(text) for text in ("8B", "1.3T", "124M", "1000", "2k")] == [8e9, 1.3e12, 124e6, 1000, 2000]
    for text in ("", " ", "MB", "-5MB", "5 XB", "1.2.3MB", "nan", "inf", "1e3", "5M B", "0x10", "٣MB", "1_000"):
        assert parse_size(text) is None, text
        assert parse_count(text) is None, text
        assert parse_duration(text) is None, text
    assert [parse_duration(text) for text in ("90", "1 h 30", "h", "1 h, 2 min")] == [None] * 4
    assert parse_size("9" * 5000) == math.inf


def formatters(source: str) -> Iterator[str]:
    """Return the expressions that format an amount with a unit, and tables of units."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            for value, after in zip(node.values, [*node.values[1:], None]):
                if not isinstance(value, ast.FormattedValue):
                    continue
                spec = ast.unparse(value.format_spec) if value.format_spec is not None else ""
                text = str(after.value) if isinstance(after, ast.Constant) else ""
                is_amount = FORMATTED.match(text) and not ast.unparse(value.value).endswith("_text")
                glued = spec[-2:-1] in ("f", "g", "e", "d") and re.match(UNIT, text)
                if is_amount or glued or spec.endswith(("%'", '%"')):
                    yield ast.unparse(node)
                    break
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and TEMPLATE.search(node.value):
            yield ast.unparse(node)
        elif isinstance(node, (ast.Tuple, ast.List, ast.Dict)):
            parts = node.keys if isinstance(node, ast.Dict) else node.elts
            flat = [item for part in parts for item in (part.elts if isinstance(part, ast.Tuple) else [part])]
            if (
                len(
                    {item.value for item in flat if isinstance(item, ast.Constant) and isinstance(item.value, str)}
                    & NAMES
                )
                > 1
            ):
                yield ast.unparse(node)


def test_no_other_module_formats_amounts() -> None:
    """An amount with a unit is text of ``relight.units``. An exception has a reason, and is still there."""
    seen = {
        f"{path.relative_to(PRODUCT).as_posix()}: {expression}"
        for path in SOURCES
        if path.is_relative_to(PRODUCT) and path != PRODUCT / "units.py"
        for expression in formatters(path.read_text(encoding="utf-8"))
    }
    assert seen - EXCEPTIONS.keys() == set(), "use relight.units"
    assert EXCEPTIONS.keys() - seen == set(), "no longer there"


@pytest.mark.parametrize(
    "source",
    [
        'f"{size / 1e9:.2f} GB"', 'f"{seconds:.1f} s"', 'f"{n} min left"', 'f"{100 * share:.0f} %"', 'f"{share:.1%}"', 'f"{x:g}s"',
        '"older than {:g} s".format(x)', '"%.1f MB" % x', '("B", "kB", "MB")', '(("h", 3600), ("min", 60))', '{"ms": 1e-3, "min": 60}',
        'f"{size >> 20} MiB"', 'f"{rate:.0f} MB/s"',
    ],
)  # fmt: skip
def test_the_check_detects_formatters(source: str) -> None:
    """Each usual form of a formatter is detected."""
    assert list(formatters(source)) != []


@pytest.mark.parametrize(
    "source", ['f"{count} steps"', 'f"{name}s"', 'f"{duration_text(x)} s"[:1]', '"100 %"', '("min", "max")']
)
def test_the_check_ignores_other_text(source: str) -> None:
    """Counts, plurals and plain text are no amounts with a unit."""
    assert [text for text in formatters(source) if "_text" not in text] == []
