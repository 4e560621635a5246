"""The command: its output, its exit codes, and what ``--fix`` removes and keeps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import at_hand
import pytest
from tests.doctor.conftest import supervised

from relight.format.names import LOG_DIR

PAGE = Path(__file__).parents[2] / "docs" / "reference.md"


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):  # noqa: ANN201
    """Return a function that calls ``relight doctor`` in this process."""
    return lambda *arguments: at_hand.in_process(monkeypatch, capfd, ["doctor", *map(str, arguments)])


def leave(runs: Path, memory: Path) -> list[Path]:
    """Create leftovers: of a superseded attempt, of a killed writer, of a dead supervisor."""
    record = sorted((runs / "demo" / LOG_DIR).iterdir())[1]
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    left = [
        runs / "demo" / "0000000111-aaaaaaaaaa-e1",
        record.parent / f".tmp-{record.name}-0123456789abcdef",
        supervised(memory, gone.pid),
    ]
    left[0].mkdir()
    (left[0] / "pack-00000-000.safetensors").write_bytes(b"half")
    left[1].write_bytes(b"half")
    return left


def test_healthy(ask, tmp_path: Path) -> None:  # noqa: ANN001
    """A healthy store gives one line and exit code 0, and so does a store that does not exist yet."""
    at_hand.fill(tmp_path / "runs")
    answer = ask(tmp_path / "runs")
    assert answer.code == 0 and answer.err == "" and "nothing wrong" in answer.out and len(answer.out.splitlines()) == 1
    assert ask(tmp_path / "to-come").code == 0
    assert ask(tmp_path / "runs", "--json").json["findings"] == []


def test_a_finding_is_whole_and_fits_a_screen(ask, tmp_path: Path) -> None:  # noqa: ANN001
    """Findings are ordered by severity, have all their fields and one command, and give exit code 1."""
    at_hand.fill(tmp_path / "runs")
    (pack,) = at_hand.directory(tmp_path / "runs", 3).glob("pack-*")
    os.truncate(pack, 100)
    (tmp_path / "runs").chmod(0o777)
    answer = ask(tmp_path / "runs" / "demo")
    lines = answer.out.splitlines()
    assert answer.code == 1 and lines[0].startswith("error    the newest checkpoint is damaged  (checkpoint-damaged)")
    for head in ("where", "seen", "hurts", "do", "run", "see"):
        assert any(line.startswith(f"         {head:5}  ") for line in lines[:10]), head
    assert any(line.startswith("warning  every user may write to the store") for line in lines)
    assert len(lines) <= 24 and "1 error, 1 warning" in lines[-1]
    result = ask(tmp_path / "runs" / "demo", "--json")
    assert (
        result.code == 1
        and not result.json["ok"]
        and [finding["severity"] for finding in result.json["findings"]] == ["error", "warning"]
    )


def test_notes_alone_are_no_failure(ask, tmp_path: Path, memory: Path) -> None:  # noqa: ANN001
    """Leftovers are notes, and notes give exit code 0."""
    at_hand.fill(tmp_path / "runs")
    leave(tmp_path / "runs", memory)
    answer = ask(tmp_path / "runs")
    assert answer.code == 0 and "3 notes" in answer.out


def test_fix_does_nothing_unasked(ask, tmp_path: Path, memory: Path) -> None:  # noqa: ANN001
    """``--fix`` without ``--yes`` and without a terminal is refused, and removes nothing."""
    at_hand.fill(tmp_path / "runs")
    left = leave(tmp_path / "runs", memory)
    answer = ask(tmp_path / "runs", "--fix")
    assert answer.code == 2 and "--yes" in answer.err and "0000000111-aaaaaaaaaa-e1" in answer.out
    assert all(path.exists() for path in left)


def test_fix_removes_what_it_shows_and_no_checkpoint(ask, tmp_path: Path, memory: Path) -> None:  # noqa: ANN001
    """``--fix`` removes all leftovers, changes nothing else, and checks again."""
    at_hand.fill(tmp_path / "runs")
    before = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    left = leave(tmp_path / "runs", memory)
    mine = supervised(memory, os.getpid())
    answer = ask(tmp_path / "runs", "--fix", "--yes", "--json")
    assert (
        answer.code == 0
        and answer.json["findings"] == []
        and len(answer.json["fix"]["removed"]) == 3 == len(answer.json["fix"]["plan"])
    )
    assert not any(path.exists() for path in left) and mine.exists()
    assert {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()} == before
    assert "nothing that can be fixed" in ask(tmp_path / "runs", "--fix", "--yes").out


def test_fix_keeps_what_a_damaged_log_might_need(ask, tmp_path: Path, memory: Path) -> None:  # noqa: ANN001
    """If a record is damaged, ``--fix`` keeps leftovers, because they may belong to its checkpoint."""
    at_hand.fill(tmp_path / "runs")
    left = leave(tmp_path / "runs", memory)
    at_hand.flip(
        sorted(path for path in (tmp_path / "runs" / "demo" / LOG_DIR).iterdir() if not path.name.startswith("."))[3],
        40,
    )
    answer = ask(tmp_path / "runs", "--fix", "--yes", "--json")
    assert answer.code == 1 and left[0].exists()


def test_fix_asks_on_a_terminal(tmp_path: Path) -> None:
    """On a terminal, ``--fix`` shows the plan and asks; after "no" it removes nothing."""
    at_hand.fill(tmp_path / "runs")
    (tmp_path / "runs" / "demo" / "0000000111-aaaaaaaaaa-e1").mkdir()
    answer = at_hand.on_terminal("doctor", tmp_path / "runs", "--fix", "--quick", typed="n\n", prompt="Remove them?")
    assert "goes" in answer.out and (tmp_path / "runs" / "demo" / "0000000111-aaaaaaaaaa-e1").exists()


def test_hostile_text_is_shown_and_not_obeyed(ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN001
    """Control characters in names of variables and tables, and in a log, are escaped."""
    monkeypatch.setenv("RELIGHT_\x1b[31mX", "1")
    Path("relight.toml").write_text('[supervise]\n"\\u001b]0;x\\u0007" = 1\n')
    answer = ask(tmp_path / "to-come")
    assert answer.code == 1 and not at_hand.CONTROL.search(answer.out.replace("\n", ""))
    explained = ask("--error", f"OSError: No space left on device {at_hand.HOSTILE}")
    assert not at_hand.CONTROL.search(explained.out.replace("\n", ""))
