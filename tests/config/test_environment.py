"""The environment's settings are read into one frozen value, and each value is checked when it is read."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from relight.cli import _shows_tracebacks
from relight.errors import ConfigError
from relight.observe import events_directory
from relight.settings.environment import environment, text_of
from relight.settings.file import forget_taken, take_environment
from relight.settings.registry import from_variable


def test_an_invalid_variable_affects_only_its_reader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wrong cache size stops nothing but the cache. The error names the variable, its kind and its value."""
    monkeypatch.setenv("RELIGHT_CACHE_BYTES", "lots")
    monkeypatch.setenv("RELIGHT_EVENTS", str(tmp_path))
    now = environment()
    assert events_directory() == tmp_path and now.events == str(tmp_path) and now.store_patience_s > 0
    with pytest.raises(
        ConfigError, match="RELIGHT_CACHE_BYTES must be a size: \"500GB\", or bytes, not 'lots'"
    ) as raised:
        _ = now.cache_bytes
    assert raised.value.where == "RELIGHT_CACHE_BYTES"


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("yes", True), ("TRUE", True), ("0", False), ("No", False), ("false", False), ("", False)]
)  # fmt: skip
def test_switches_take_the_same_words(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    """Each switch of the environment takes 1, true, yes, 0, false and no, in any case."""
    for name in ("core_dumps", "single_writer", "keys_over_http", "debug"):
        monkeypatch.setenv(f"RELIGHT_{name.upper()}", text)
        assert getattr(environment(), name) is value
    monkeypatch.setenv("RELIGHT_BACKGROUND", text)
    assert from_variable("checkpoint.background") is (value if text else None)


def test_a_value_is_of_the_moment_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later changes of the environment do not change a value that was read."""
    monkeypatch.setenv("RELIGHT_NODE", "a")
    before = environment()
    monkeypatch.setenv("RELIGHT_NODE", "b")
    assert (before.node, environment().node, text_of("RELIGHT_NODE")) == ("a", "b", "b")


def test_a_secret_is_not_in_the_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Values of secret settings appear in no error, and an invalid switch of tracebacks shows them."""
    monkeypatch.setenv("RELIGHT_KEY", "hunter2")
    assert environment().key == "hunter2" and "hunter2" not in repr(environment())
    monkeypatch.setenv("RELIGHT_DEBUG", "perhaps")
    assert _shows_tracebacks() and not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (
            'store_patience_s = "soon"',
            "store_patience_s must be a time above 0, at most a day: \"10m\", or seconds, not 'soon'",
        ),
        ('log = "loud"', "log must be quiet, warnings, default, info or debug, not 'loud'"),
        ("nod = 1", "has no 'nod'"),
    ],
)
def test_a_mistake_in_the_file_names_its_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, what: str
) -> None:
    """A value of ``[environment]`` is checked when the file is read."""
    monkeypatch.chdir(tmp_path)
    Path("relight.toml").write_text(f"[environment]\nrack = 3\n{line}\n")
    try:
        with pytest.raises(ConfigError) as raised:
            take_environment()
    finally:
        forget_taken()
    assert what in raised.value.what and raised.value.where == "relight.toml:3:1"
