"""``[checkpoint.tiers]`` of relight.toml: one file holds where a run goes, for any script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import relight
from relight.checkpointer import options
from relight.drill.warden import environment
from relight.errors import ConfigError
from relight.policy.file_defaults import defaults_of


def train(store: str | Path, steps: int, **more: Any) -> None:
    """Train the run ``demo`` in ``store``."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with relight.Checkpointer(
        Path(store) / "demo", model=model, optimizer=optimizer, save=relight.every(steps=2), background=False, **more
    ) as ckpt:
        for step in range(ckpt.restore(), steps):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            ckpt.step(step)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A settings file that is named."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RELIGHT_SETTINGS", str(tmp_path / "flow.toml"))
    return tmp_path / "flow.toml"


def steps_in(url: Path) -> list[int]:
    """Steps of the run's checkpoints there."""
    return [checkpoint.step for checkpoint in relight.open(url).checkpoints("demo")]


def test_a_run_is_copied_to_the_tiers_of_the_file(here: Path, tmp_path: Path) -> None:
    """The newest save reaches the further store under the run's name and the tier's retention. A restore can read it
    there."""
    here.write_text(
        f'[checkpoint.keep]\nlast = 1\n[checkpoint.tiers.cold]\nurl = "{tmp_path}/cold"\nlag = 0\nkeep = {{last = 2}}\n'
    )
    train(tmp_path / "runs", 6)
    assert steps_in(tmp_path / "runs") == [5] and steps_in(tmp_path / "cold")[-1:] == [5]
    for name in (tmp_path / "runs").rglob("*"):
        if name.is_file():
            name.unlink()
    ckpt = relight.Checkpointer(
        tmp_path / "new" / "demo", model=torch.nn.Linear(2, 2), optimizer=None, save=None, background=False
    )
    assert ckpt.restore(only=["model/*"]) == 6, "from the further store: the near one is empty"
    ckpt.close()


def test_the_nearest_may_have_a_table_of_its_own(here: Path, tmp_path: Path) -> None:
    """The first table without a URL is the script's store. Several URLs of a tier are several places."""
    here.write_text(
        f'[checkpoint.tiers.hot]\nkeep = {{last = 1}}\n[checkpoint.tiers.cold]\nurl = ["{tmp_path}/a", "{tmp_path}/b"]\nlag = 0\n'
    )
    train(tmp_path / "runs", 4)
    assert steps_in(tmp_path / "runs") == [3] and steps_in(tmp_path / "a")[-1:] == steps_in(tmp_path / "b")[-1:] == [3]


def test_a_script_that_names_tiers_has_these(here: Path, tmp_path: Path) -> None:
    """``Tiers(…)`` in the script beats the file."""
    here.write_text(f'[checkpoint.tiers.cold]\nurl = "{tmp_path}/cold"\n')
    url, name, tiers, own = options.where_to(
        relight.Tiers(one=tmp_path / "runs" / "demo", two=tmp_path / "two" / "demo"), None
    )
    with relight.Checkpointer(tiers, model=torch.nn.Linear(2, 2), save=None, background=False) as ckpt:  # type: ignore[arg-type]
        ckpt.save(1)
    assert own and steps_in(tmp_path / "two") == [1] and not (tmp_path / "cold").exists()


def test_a_file_that_was_not_named_adds_no_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relight.toml in the working directory alone cannot have a run copied to a place, as it cannot name keys."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RELIGHT_SETTINGS", raising=False)
    (tmp_path / "relight.toml").write_text(f'[checkpoint.tiers.cold]\nurl = "{tmp_path}/cold"\n')
    with pytest.raises(ConfigError, match="is used only in a settings file that is named explicitly"):
        train(tmp_path / "runs", 2)


def test_a_drill_copies_nothing_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drill's stores are no part of the real run's tiers, whatever variables and settings name."""
    monkeypatch.setenv("RELIGHT_CHECKPOINT__TIERS__COLD__URL", "s3://ours/runs")
    given = environment()
    assert given["RELIGHT_CHECKPOINT__TIERS"] == "{}" and "RELIGHT_CHECKPOINT__TIERS__COLD__URL" not in given
    assert defaults_of({"tiers": {}}, "a file").tiers is None


WRONG = [
    ({"cold": "s3://b"}, "cold.* is a table"),
    ({"cold": {}}, "no further store"),
    ({"cold": {"url": "s3://b"}, "hot": {}}, "has no url"),
    ({"cold": {"url": []}}, "a store, or a list"),
    ({"cold": {"url": "s3://b", "speed": 1}}, "has no 'speed'"),
    ({"cold": {"url": "s3://b", "keep": {"lst": 1}}}, "has no 'lst'"),
    ({"cold": {"url": "s3://b", "quorum": 3}}, "quorum"),
    ({"Cold": {"url": "s3://b"}}, "cannot be a tier's name"),
    ({"cold": {"url": "s3://b"}, "colder": {"url": "s3://b"}}, "same place"),
]


@pytest.mark.parametrize(("table", "message"), WRONG)
def test_a_wrong_table_is_refused_before_a_job_needs_it(table: Any, message: str) -> None:
    """Every mistake is one of the file, found when it is read."""
    with pytest.raises(ConfigError, match=message):
        defaults_of({"tiers": table}, "relight.toml")
