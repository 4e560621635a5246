"""Paths of stores, runs and checkpoints, and the errors for paths that are neither."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from at_hand import directory, ids

from relight.catalog.locate import locate, locate_destination
from relight.errors import CheckpointNotFound, ConfigError, StoreUnavailable


def test_stores_runs_and_checkpoints_are_distinguished(runs: Path) -> None:
    """A path's kind follows from its contents. A slash at its end changes nothing."""
    assert locate("runs").run is None
    assert locate("runs/").run is None
    assert locate("runs/demo")[1:] == ("demo", None)
    assert locate("runs/demo/")[1:] == ("demo", None)
    assert locate(f"file://{runs}/demo")[1:] == ("demo", None)
    place = directory(runs, 1)
    assert locate(str(place))[1:] == locate(f"{place}/root.json")[1:] == ("demo", ids(runs)[1])
    assert locate("runs/demo/log")[1:] == locate("runs/demo/log/000000000000.json")[1:] == ("demo", None)
    assert locate("runs/relight.json").run is None


def test_from_inside_and_from_home(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``.``, ``..`` and ``~`` are paths too."""
    monkeypatch.setenv("HOME", str(runs.parent))
    assert locate("~/runs/demo").run == "demo"
    os.chdir(runs / "demo")
    assert locate(".").run == "demo"
    assert locate("..").run is None
    assert locate("../demo/../baseline").run == "baseline"


def test_the_text_after_the_at_names_a_checkpoint(runs: Path) -> None:
    """Tags may have slashes, and directories ``@``. The longest existing path is used."""
    assert locate("runs/demo@release/v1")[1:] == ("demo", "release/v1")
    assert locate("runs/demo@latest")[1:] == ("demo", "latest")
    runs.rename(runs.parent / "me@home")
    assert locate("me@home/demo")[1:] == ("demo", None)
    assert locate("me@home/demo@99")[1:] == ("demo", "99")
    with pytest.raises(CheckpointNotFound):
        locate("me@home/demo@")


def test_without_relight_json_a_store_is_known_by_its_runs(runs: Path) -> None:
    """A reader needs no relight.json."""
    (runs / "relight.json").unlink()
    assert locate("runs").run is None
    assert locate("runs/demo").run == "demo"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("runs/dmo", "did you mean demo?"),
        ("runs/zzz", "the store has baseline, demo"),
        ("runs/demo/zzz", "runs/demo is a run: name one of its checkpoints after @"),
        (".", "below it are ./runs"),
        ("nope/deep/er", "/runs"),
        ("", "zero byte"),
    ],
)
def test_near_misses_are_answered_with_what_is_there(runs: Path, path: str, expected: str) -> None:
    """The hint names runs and stores around the place."""
    with pytest.raises((CheckpointNotFound, ConfigError)) as caught:
        locate(path)
    assert expected in str(caught.value)


def test_a_link_is_not_followed_but_named(runs: Path) -> None:
    """What it leads to is in the hint."""
    Path("current").symlink_to(runs / "demo")
    with pytest.raises(CheckpointNotFound, match="it is a link: try .*/runs/demo"):
        locate("current")


def test_unreadable_places_do_not_hide_the_rest(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unreadable directory next to a store is left out of hints."""
    from relight.store import LocalStore

    real = LocalStore.list

    def refusing(self: LocalStore, prefix: str):
        if prefix.startswith("private"):
            raise StoreUnavailable("no", retryable=False)
        return real(self, prefix)

    Path("private").mkdir()
    monkeypatch.setattr(LocalStore, "list", refusing)
    with pytest.raises(CheckpointNotFound, match="below it are ./runs"):
        locate(".")


def test_destinations(runs: Path) -> None:
    """A destination is an existing or new run, or an existing or new store. Other directories and files are refused."""
    assert locate_destination("runs", "x")[1] == "x"
    assert locate_destination("new/", "x")[1] == "x"
    assert locate_destination("runs/demo", "x")[1] == "demo"
    assert locate_destination("runs/other", "x")[1] == "other"
    assert locate_destination("new/run", "x")[1] == "run"
    Path("plain").mkdir()
    with pytest.raises(ConfigError, match="plain/x would make a store of it"):
        locate_destination("plain", "x")
    with pytest.raises(ConfigError, match="a file"):
        locate_destination("runs/relight.json", "x")


@pytest.mark.parametrize("name", ["model.pt", "model.pt@latest"])
def test_a_file_is_named_as_one(tmp_path: Path, name: str) -> None:
    """The message does not suggest that nothing is there."""
    (tmp_path / "model.pt").write_bytes(b"x")
    with pytest.raises(CheckpointNotFound, match="this is a file") as refused:
        locate(str(tmp_path / name))
    assert "relight import" in refused.value.hint
