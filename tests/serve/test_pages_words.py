"""Texts for numbers and times on pages."""

from __future__ import annotations

from relight.serve.pages_words import number, when


def test_numbers() -> None:
    """Integers are grouped, floats have six digits, and an unknown value is a dash."""
    assert [number(value) for value in (1234567, 0.1, True, None, 10**400, "x")] == [
        "1,234,567",
        "0.1",
        "true",
        "–",
        "1e+400",
        "x",
    ]


def test_times_have_age_and_exact_time() -> None:
    """A time has its age and the exact time. An invalid time is escaped text."""
    assert when("2026-11-22T10:00:00Z", 1795341660.0) == (
        '<time datetime="2026-11-22T10:00:00+00:00" title="2026-11-22 10:00:00 UTC">1 min ago</time>'
    )
    assert when("<b>", 0) == "&lt;b&gt;"
    assert (when(None, 0), when(1e300, 0), when("", 0)) == ("–", "–", "–")
