"""The settings' further tiers hold the user's own runs: benchmark and demo write nothing there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch import nn

import relight
from relight.bench.ours import without_tiers
from relight.demo.lane import _environment
from relight.settings.environment import TIERS


def test_only_the_tiers_are_restored_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable is missing in between, and a variable that another thread sets meanwhile keeps its value."""
    monkeypatch.setenv(TIERS, "{'cold': {}}")
    monkeypatch.setenv("LATER", "before")
    monkeypatch.setattr(type(os.environ), "clear", lambda _: pytest.fail("the environment was empty for a moment"))
    with without_tiers():
        assert os.environ[TIERS] == "{}"
        monkeypatch.setenv("LATER", "after")
    assert (os.environ[TIERS], os.environ["LATER"]) == ("{'cold': {}}", "after")
    monkeypatch.delenv(TIERS)
    with without_tiers():
        assert os.environ[TIERS] == "{}"
    assert TIERS not in os.environ


def test_no_run_of_the_benchmark_or_the_demo_has_further_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables are as before afterwards, and other Checkpointers have the tiers."""
    settings = tmp_path / "relight.toml"
    settings.write_text(f'[checkpoint.tiers.cold]\nurl = "{tmp_path}/cold"\n')
    monkeypatch.setenv("RELIGHT_SETTINGS", str(settings))
    model, before = nn.Linear(2, 2), dict(os.environ)
    with without_tiers():
        within = relight.Checkpointer(tmp_path / "runs" / "within", model=model, background=False)
    outside = relight.Checkpointer(tmp_path / "runs" / "outside", model=model, background=False)
    assert within._options.tiers is None and outside._options.tiers is not None
    assert dict(os.environ) == before and _environment()[TIERS] == "{}"
    for ckpt in (within, outside):
        ckpt.close(save=False)
