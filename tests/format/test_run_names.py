"""Run names: which are valid, the directory of each, and that users see and type the name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import relight
from relight.catalog import list_runs
from relight.catalog.locate import locate
from relight.errors import CheckpointNotFound, ConfigError
from relight.format.names import check_run_name, is_run_name
from relight.run_names import DIR_BYTES_MAX, run_dir, run_name, shown
from relight.store import open_bytes
from relight.store.urls import split_run

NAMES = [
    "lr=0.1,bs=32",
    "Versuch Nr. 3 (größer)",
    "a@b",
    "it's +1 [v2]",
    "実験-学習率",
    "эксперимент",
    "model@best",
    "a_20b c",
    "under_score, a_-b",
    "50%",
    "#1?",
    "x" * 199 + "!",
    "ж" * 100,
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_and_its_directory_are_one_to_one(name: str) -> None:
    """A directory is ASCII of at most 255 bytes, maps back to its name, and is accepted in place of the name."""
    directory = run_dir(name)
    assert is_run_name(directory) and directory.isascii() and len(directory) <= DIR_BYTES_MAX
    assert run_name(directory) == name
    assert run_dir(directory) == directory == check_run_name(name)
    assert split_run(f"/store/{name}") == ("/store", directory)
    assert shown(
        f"run {directory!r} in /store/{directory}, and ({directory})."
    ) == f"run {name!r} in /store/{name}, and ({name}).".replace(repr(name), f"'{name}'")


@pytest.mark.parametrize("name", ["demo", "a.b-c_d", "_-foo", "_-a_zz", "_x_20", "9", "A" * 128, "a_20b", "_-"])
def test_names_of_old_stay_what_they_are(name: str) -> None:
    """A name that was possible before is its own directory, and is shown unchanged."""
    assert run_dir(name) == run_name(name) == shown(name) == name


@pytest.mark.parametrize(
    ("name", "why"),
    [("", "empty"), (".", "dot"), ("..", "dot"), (".hidden", "dot"), (" a", "space"), ("a ", "space"), ("a\nb", "U+000A"), ("a\0", "U+0000"),
     ("a\x1b[31m", "U+001B"), ("log", "log"), ("a" * 201, "201 bytes"), ("é" * 101, "202 bytes"), ("(" * 90, "directory would be"),
     ("-rf", "dash"), ("a/b", "slash"), ("\ud800", "U+D800")],
)  # fmt: skip
def test_an_invalid_name_is_refused_with_the_reason(name: str, why: str) -> None:
    """The error states what is wrong with the name."""
    with pytest.raises(ConfigError, match=why.replace("+", r"\+")):
        check_run_name(name)


@given(st.text(min_size=1, max_size=60))
@example("a_ b")
@example("a_" + "ö")
@example("ö-")
@example("_-ö")
def test_no_two_names_share_a_directory(name: str) -> None:
    """The rule is reversible: a directory gives the name in NFC, and nothing else has that directory."""
    try:
        directory = run_dir(name)
    except ValueError:
        return
    again = run_name(directory)
    assert run_dir(again) == directory
    import unicodedata

    assert again == unicodedata.normalize("NFC", name) or name.startswith("_-")


@given(st.from_regex(r"\A_-[A-Za-z0-9._-]{0,60}\Z"))
def test_any_directory_is_shown_as_one_name_that_leads_to_it(directory: str) -> None:
    """The name shown for a directory opens that directory, also in a store that another program made."""
    assert run_dir(run_name(directory)) == directory


def test_composed_and_decomposed_letters_are_one_name() -> None:
    """Names are NFC, so what one system types as two characters is the same run."""
    assert run_dir("gro\u0308\u00dfer") == run_dir("gr\u00f6\u00dfer")


@pytest.mark.parametrize("name", ["lr=0.1,bs=32", "Versuch Nr. 3 (größer)", "a@b", "it's 100% [v2]+#1?"])
def test_everything_shows_and_takes_the_name(tmp_path: Path, name: str) -> None:
    """A run is made, found, listed, opened and reported by its name. Its directory has the escaped name."""
    url = f"{tmp_path}/runs/{name}"
    saved = relight.save(url, {"x": 1}, step=5)
    relight.save(url, {"x": 2}, step=6)
    assert [path.name for path in (tmp_path / "runs").iterdir() if path.is_dir()] == [run_dir(name)]
    assert relight.load(url) == {"x": 2} and relight.load(url, 5) == {"x": 1}
    store = relight.open(tmp_path / "runs")
    assert store.runs == [name] and store.latest(name).step == 6
    assert list_runs(open_bytes(tmp_path / "runs")) == [run_dir(name)]
    assert (locate(url).run, locate(f"{url}@{saved.id}").which) == (run_dir(name), saved.id)
    with pytest.raises(CheckpointNotFound) as caught:
        relight.load(f"{url}x")
    assert f"{name}x" in str(caught.value) and "_-" not in str(caught.value)


def test_the_command_line_shows_and_takes_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """ls, show, verify, cp, branch and log take real names and print no escaped one."""
    from tests.cli.at_hand import in_process

    name, other = "lr=0.1,bs=32", "Kopie von (größer) @ 2"
    monkeypatch.chdir(tmp_path)
    relight.save(f"runs/{name}", {"x": 1}, step=5)
    for arguments in (
        ["ls", "runs"], ["ls", f"runs/{name}"], ["ls", "runs", "--json"], ["show", f"runs/{name}@5"], ["verify", f"runs/{name}@latest"],
        ["cp", f"runs/{name}", f"backup/{other}"], ["ls", "backup", "--json"], ["branch", f"runs/{name}", other], ["log", f"runs/{name}"],
        ["doctor", "runs", "--json"], ["cp", f"runs/{name}", "third/"], ["show", f"runs/{other}"], ["show", f"runs/{name}@99"],
    ):  # fmt: skip
        answer = in_process(monkeypatch, capfd, arguments)
        assert answer.code in (0, 1), answer
        assert "_-" not in answer.out + answer.err, answer
    rows = in_process(monkeypatch, capfd, ["ls", "runs", "--json"]).json
    assert [row["run"] for row in rows] == sorted([name, other], key=run_dir)
    assert json.loads(json.dumps(rows)) == rows
    assert run_dir(other) in [path.name for path in (tmp_path / "backup").iterdir()]


def test_training_with_tiers_events_and_restore_under_such_a_name(tmp_path: Path) -> None:
    """A Checkpointer, its agent, its tiers and its events work under a name with spaces and marks, and a resumed run finds itself."""
    import subprocess
    import sys

    name = "lr=0.1, bs=32 (größer)"
    script = f"""
import sys, torch, relight
model = torch.nn.Linear(2, 2)
tiers = relight.Tiers(near={str(tmp_path / "near" / name)!r}, far={str(tmp_path / "far" / name)!r})
with relight.Checkpointer(tiers, model=model, save=relight.every(steps=1)) as ckpt:
    first = ckpt.restore()
    for step in range(first, first + 2):
        ckpt.step(step)
print(first)
"""
    for expected in ("0", "2"):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        assert done.returncode == 0 and done.stdout.split()[-1] == expected, done
        assert "_-" not in done.stderr, done.stderr
    for place in ("near", "far"):
        assert [path.name for path in (tmp_path / place).iterdir() if path.is_dir()] == [run_dir(name)]
    assert relight.open(tmp_path / "far").latest(name).step == 3
