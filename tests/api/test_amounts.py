"""Sizes, rates and times as texts or numbers, in every argument and setting."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import relight
from relight.errors import RelightError
from relight.settings.kinds import fields_of
from relight.settings.registry import TABLES, settings_by_name, subtable, typed_text
from relight.settings.supervise_settings import SuperviseSettings
from relight.settings.validation import decode, fits
from relight.units import parse_duration, parse_rate, parse_size

TEXTS = {parse_duration: ("10m", 600.0), parse_size: ("16MB", 16_000_000), parse_rate: ("200MB/s", 2e8)}


def test_limits_take_texts_and_numbers() -> None:
    """Each of the texts is the number that it stands for."""
    given = relight.Limits(memory="16GB", bytes_per_second="200MB/s", read_bytes_per_second="1GiB", deadline_s="10m")
    assert given == relight.Limits(16 * 10**9, bytes_per_second=2e8, read_bytes_per_second=1 << 30, deadline_s=600)
    assert relight.Limits(memory=0).memory == 0 and relight.Limits(deadline_s=timedelta(minutes=1)).deadline_s == 60
    assert repr(relight.Limits(memory="1kB")) == "Limits(memory=1000)"


def test_other_rules_take_texts_and_numbers() -> None:
    """Rates of tiers, peers and ``adaptive`` are texts, too."""
    assert relight.tier("a/b", bytes_per_second="1MB").bytes_per_second == 1e6
    assert relight.Peers(copies=1, memory="512MiB", bytes_per_second="1MB/s").memory == 512 << 20
    assert repr(relight.adaptive(bytes_per_second="1MB")) == "adaptive(bytes_per_second=1000000.0)"


@pytest.mark.parametrize(
    ("call", "example"),
    [
        (lambda: relight.Limits(memory="16 pounds"), "'16GB' or '512MiB'"),
        (lambda: relight.Limits(memory=True), "'16GB' or '512MiB'"),
        (lambda: relight.Limits(deadline_s="soon"), "'30s', '10m' or '36h'"),
        (lambda: relight.Limits(bytes_per_second="fast"), "'200MB/s'"),
        (lambda: relight.phase("evaluate", "soon"), "'30s', '10m' or '36h'"),
        (lambda: relight.keep(within=-1), "'30s', '10m' or '36h'"),
    ],
)
def test_an_invalid_amount_is_refused_with_examples(call: Any, example: str) -> None:
    """The error of each kind of amount has the same words, wherever it is given, and a hint with the units."""
    with pytest.raises(relight.ConfigError, match=example) as raised:
        call()
    assert "a number counts" in raised.value.hint


def test_waiting_takes_a_time(tmp_path: Path) -> None:
    """``Save.wait(timeout=)`` takes a text, and numbers as before."""
    with relight.Checkpointer(tmp_path / "run", model=torch.nn.Linear(2, 2), background=False) as ckpt:
        save = ckpt.save(0)
        assert save.wait("10s") is save and save.wait(0) is save and save.wait(timedelta(seconds=1)) is save
        with pytest.raises(relight.ConfigError, match="timeout"):
            save.wait("soon")
    with relight.phase("evaluate", "10m"):
        pass


@pytest.mark.parametrize(
    "name", [name for name, setting in settings_by_name().items() if setting.type.__metadata__[0].extra["parse"]]
)
def test_every_setting_of_an_amount_takes_a_text(name: str) -> None:
    """A text counts as its number, also in a variable; a text without an amount does not fit."""
    setting = settings_by_name()[name]
    text, number = TEXTS[setting.type.__metadata__[0].extra["parse"]]
    above, *between, key = name.split(".")
    table = TABLES[above]
    for part in between:
        table = subtable(fields_of(table)[part]) or table
    field = fields_of(table)[key]
    assert setting.kind.startswith(("a time", "a size", "a rate"))
    assert fits(text, field, table) and fits(number, field, table) and not fits("soon", field, table)
    if not between:
        assert typed_text(setting, text) in (text, number) and typed_text(setting, "40") in (40, "40")


def test_structs_of_settings_have_numbers() -> None:
    """Code that reads a table gets seconds, whatever the file has."""
    table = decode({"backoff_s": "1m", "start_s": 30}, SuperviseSettings, "supervise")
    assert (table.backoff_s, table.start_s) == (60.0, 30.0)
    with pytest.raises(RelightError, match="at most a day"):
        decode({"backoff_s": "2d"}, SuperviseSettings, "supervise")


def test_no_setting_of_seconds_or_bytes_takes_numbers_only() -> None:
    """If a setting's name states seconds or bytes, its type has a parser."""
    plain = [
        name
        for name, setting in settings_by_name().items()
        if name.endswith(("_s", "bytes", "bytes_per_second")) and not setting.type.__metadata__[0].extra["parse"]
    ]
    assert plain == []
