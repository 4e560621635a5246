"""Texts for sizes, durations and times on pages."""

from __future__ import annotations

import math

import pytest

from relight.serve.pages_words import ago, number, plural, share, size, span, when


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1536, "1.54 kB"), (999_600, "1 MB"), (123_400_000, "123 MB"), (99_960_000, "100 MB"),
     (1.49e9, "1.49 GB"), (5e12, "5 TB"), (2e15, "2 PB"), (3e20, "300,000 PB"), (None, "–"), (math.nan, "–")],
)  # fmt: skip
def test_sizes(count: float | None, text: str) -> None:
    """A size has three digits and a unit. An unknown size is a dash."""
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 ms"), (0.0004, "0.4 ms"), (0.012, "12 ms"), (3.41, "3.4 s"), (59.97, "1 min"), (61, "1 min"), (240, "4 min"), (3599, "1 h"), (7500, "2 h 5 min"),
     (172_800, "2 days"), (-3.4, "-3.4 s"), (None, "–"), (math.inf, "–")],
)  # fmt: skip
def test_spans(seconds: float | None, text: str) -> None:
    """Durations have units from milliseconds to days, and never 60 of a unit."""
    assert span(seconds) == text


def test_ages_and_shares() -> None:
    """Ages, shares, numbers and plurals have their texts."""
    assert (ago(1), ago(300), ago(-300), ago(None)) == ("just now", "5 min ago", "in 5 min", "never")
    assert (share(0.9138), share(None)) == ("91.4 %", "–")
    assert (number(1234567), number(0.1), number(True), number(None), number(10**400)) == (
        "1 234 567",
        "0.1",
        "true",
        "–",
        "very large",
    )
    assert (plural(1, "run"), plural(2, "branch")) == ("1 run", "2 branches")


def test_times_have_age_and_exact_time() -> None:
    """A time has its age and the exact time. An invalid time is escaped text."""
    assert when("2026-11-22T10:00:00Z", 1795341660.0) == (
        '<time datetime="2026-11-22T10:00:00+00:00" title="2026-11-22 10:00:00 UTC">1 min ago</time>'
    )
    assert when("<b>", 0) == "&lt;b&gt;"
    assert (when(None, 0), when(1e300, 0), when("", 0)) == ("–", "–", "–")
