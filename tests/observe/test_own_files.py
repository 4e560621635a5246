"""Removing by a pattern: only own files, of one exact form, in a directory that no other user could replace."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from relight.errors import ConfigError
from relight.observe import file
from relight.observe.file import make_private, tidy
from relight.observe.own_files import OwnFiles
from relight.prediction.trace import keep_newest
from relight.settings.file import take_environment

OURS = ["0000000000001-77-000001.jsonl", "1700000000000-4194304-000012.jsonl"]
OTHERS = [
    "train.jsonl", "part-000001.jsonl", "0000000000001-77-000001.jsonl.bak", "x0000000000001-77-000001.jsonl", "1-2-3.jsonl",
    "0000000000001-77-000001.jsonl\n", "0000000000001-77-0000011.jsonl",
]  # fmt: skip


def fill(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name in [*OURS, *OTHERS]:
        (directory / name).write_text("x")
        os.utime(directory / name, (0, 0))


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_only_names_of_the_exact_form_are_removed(tmp_path: Path) -> None:
    """A data set of JSON lines in the same directory stays, however old it is."""
    fill(tmp_path / "events")
    tidy(tmp_path / "events", 1e10)
    assert names(tmp_path / "events") == set(OTHERS)


def as_link(top: Path) -> Path:
    fill(top / "data")
    (top / "events").symlink_to(top / "data")
    return top / "data"


def writable_by_others(top: Path) -> Path:
    fill(top / "events")
    (top / "events").chmod(0o777)
    return top / "events"


def in_a_directory_that_others_rename_in(top: Path) -> Path:
    fill(top / "events")
    top.chmod(0o777)
    return top / "events"


@pytest.mark.parametrize("how", [as_link, writable_by_others, in_a_directory_that_others_rename_in])
def test_nothing_is_removed_where_others_could_have_put_it(tmp_path: Path, how: Callable[[Path], Path]) -> None:
    """A link in the place of the directory, a directory that others may write to, and one that others could exchange."""
    (tmp_path / "top").mkdir()
    data = how(tmp_path / "top")
    before = names(data)
    tidy(tmp_path / "top" / "events", 1e10)
    assert names(data) == before
    with pytest.raises(OSError):
        OwnFiles(tmp_path / "top" / "events", r".*")


def test_every_directory_above_is_checked(tmp_path: Path) -> None:
    """A directory of this user, below one in which others may rename, can be exchanged with all that is in it."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "shared")
    fill(tmp_path / "shared" / "own" / "events")
    (tmp_path / "shared").chmod(0o777)
    for top in ("shared", "link"):
        with pytest.raises(PermissionError, match="others may rename in it"):
            OwnFiles(tmp_path / top / "own" / "events", file.EVENT_FILE)
    (tmp_path / "shared").chmod(0o755)
    with OwnFiles(tmp_path / "link" / "own" / "events", file.EVENT_FILE) as files:
        assert {own_file.name for own_file in files} == set(OURS)


def test_links_and_directories_of_a_matching_name_stay(tmp_path: Path) -> None:
    """Only regular files are removed."""
    (tmp_path / "target").write_text("x")
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / OURS[0]).symlink_to(tmp_path / "target")
    (tmp_path / "events" / OURS[1]).mkdir()
    tidy(tmp_path / "events", 1e10)
    assert names(tmp_path / "events") == set(OURS) and (tmp_path / "target").exists()


def test_a_name_of_another_form_is_never_removed(tmp_path: Path) -> None:
    """The caller cannot name any file in the directory."""
    fill(tmp_path / "events")
    with OwnFiles(tmp_path / "events", file.EVENT_FILE) as files:
        for name in [*OTHERS, "../events/" + OURS[0], "."]:
            with pytest.raises(ValueError, match="not the name of an own file"):
                files.remove(name)
    assert names(tmp_path / "events") == {*OURS, *OTHERS}


def test_a_temporary_directory_that_another_user_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory above the default one is checked as well: its owner could replace its contents."""
    monkeypatch.delenv("RELIGHT_EVENTS", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    directory = file.events_directory()
    assert directory is not None
    directory.parent.mkdir()
    directory.parent.chmod(0o777)
    with pytest.raises(PermissionError):
        make_private(directory)
    assert not directory.exists()
    directory.parent.chmod(0o700)
    make_private(directory)


def test_a_settings_file_in_the_working_directory_names_no_directory_to_tidy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a setting could have a data set deleted, so it is refused. It may switch events off.

    A settings file that the user named may name directories.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RELIGHT_EVENTS", raising=False)
    fill(tmp_path / "data")
    for name in ("events", "cache"):
        (tmp_path / "relight.toml").write_text(f'[environment]\n{name} = "{tmp_path / "data"}"\n')
        with pytest.raises(ConfigError, match=f"{name} is used only in a settings file that is named explicitly"):
            take_environment()
    script = "import relight, torch; relight.Checkpointer('runs/x', model=torch.nn.Linear(1, 1), background=False, save=None).save(0)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "RELIGHT_EVENTS": ""},
    )
    assert "only in a settings file that is named" in done.stderr
    assert names(tmp_path / "data") == {*OURS, *OTHERS}
    (tmp_path / "relight.toml").write_text("[environment]\nevents = 0\n")
    take_environment()
    assert os.environ.pop("RELIGHT_EVENTS") == "0"


def test_recordings_remove_their_own_names_only(tmp_path: Path) -> None:
    """The recordings of failures share the rule: other traces stay."""
    for name in ("straight.trace", "mine.trace", "000000000001.trace", "000000000002.trace"):
        (tmp_path / name).write_text("x")
    keep_newest(tmp_path, 1)
    assert names(tmp_path) == {"straight.trace", "mine.trace", "000000000002.trace"}
