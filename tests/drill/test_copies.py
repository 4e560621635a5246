"""Drills of copies: damage is detected, the run stays unchanged, and wrong behaviour fails the drill."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.cli.at_hand import directory, fill, flip, request

from relight.catalog.run import Run
from relight.cli.doctor_ready import _drills
from relight.commit import Attempt
from relight.drill import DrillOptions, DrillReport, copies, run
from relight.drill.record import drills_of, remember
from relight.drill.report import FAILED, PASSED, SKIPPED, lines_of, markdown
from relight.errors import ConfigError
from relight.store import open_bytes

ALL = ["copy", *copies.REHEARSALS]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Create four checkpoints of ``demo`` and one of ``baseline``."""
    fill(tmp_path / "runs")
    return tmp_path / "runs"


def drilled(store: Path, name: str = "demo", **more: Any) -> DrillReport:
    """Return the report of a drill."""
    return run(DrillOptions(copies=Run(open_bytes(store), name), **more))


def files(store: Path) -> dict[Path, bytes]:
    """Return all files of the store with their bytes."""
    return {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}


def test_an_undamaged_run_passes_all_rehearsals_unchanged(store: Path, tmp_path: Path) -> None:
    """Every rehearsal passes, in order. No file is left, and restores fall back to the previous checkpoint."""
    before = files(store)
    done = drilled(store)
    assert [(outcome.name, outcome.verdict) for outcome in done.outcomes] == [(name, PASSED) for name in ALL], lines_of(
        done
    )
    assert [outcome.steps_lost for outcome in done.outcomes if outcome.name in ("damage", "lost", "torn")] == [
        50,
        50,
        50,
    ]
    assert files(store) == before and done.copies and "only copies of its checkpoints" in markdown(done)
    remember(open_bytes(store), "demo", done)
    assert drills_of(open_bytes(store), "demo") == [done]
    assert _drills(open_bytes(store), "demo") == [], "relight doctor --ready asks whether the job came back"


def test_with_one_checkpoint_rehearsals_that_need_two_are_skipped(store: Path) -> None:
    """With one checkpoint, there is none to fall back to: the rehearsals are skipped, and not failed."""
    done = drilled(store, "baseline")
    assert {outcome.name: outcome.verdict for outcome in done.outcomes} == {
        "copy": PASSED, "verify": PASSED, "restore": PASSED, "damage": SKIPPED, "lost": SKIPPED, "torn": SKIPPED, "prune": SKIPPED,
    }  # fmt: skip
    assert done.ok


def test_a_run_that_is_damaged_fails_before_anything_is_rehearsed(store: Path) -> None:
    """A damaged checkpoint is found when it is copied, because every byte is read."""
    flip(max(directory(store, 3).glob("*.safetensors"), key=lambda path: path.stat().st_size), 4104)
    done = drilled(store)
    assert [(outcome.name, outcome.verdict) for outcome in done.outcomes] == [
        ("copy", FAILED)
    ] and "damaged" in done.outcomes[0].why


def test_a_restore_that_does_not_notice_fails(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rehearsals can fail: a load that skips nothing is detected, and so is a verify that finds nothing."""
    monkeypatch.setattr(copies, "load", lambda url: {})
    verdicts = {outcome.name: outcome.verdict for outcome in drilled(store).outcomes}
    assert verdicts["damage"] == verdicts["lost"] == FAILED and verdicts["verify"] == PASSED
    monkeypatch.undo()
    monkeypatch.setattr(copies, "verify_checkpoint", lambda *_: [])
    verdicts = {outcome.name: outcome.verdict for outcome in drilled(store).outcomes}
    assert verdicts["damage"] == verdicts["lost"] == SKIPPED, "no byte of it was found to matter"


def test_without_room_nothing_is_copied(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drill does not fill the machine's disk or memory."""
    usage = shutil.disk_usage(store)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000))
    done = drilled(store)
    assert [(outcome.name, outcome.verdict) for outcome in done.outcomes] == [
        ("copy", FAILED)
    ] and "are free" in done.outcomes[0].why
    monkeypatch.undo()
    monkeypatch.setattr(copies, "available_bytes", lambda: 100)
    done = drilled(store)
    assert {outcome.name for outcome in done.outcomes if outcome.verdict == SKIPPED} == {
        "restore",
        "damage",
        "lost",
        "torn",
    } and done.ok


def test_an_encrypted_run_is_not_copied_into_the_clear(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a key for the copies, nothing is written. With a key, they are encrypted, and the possible rehearsals run."""
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    key.chmod(0o600)
    monkeypatch.setenv("RELIGHT_KEY", f"file:{key}")
    secret = tmp_path / "secret"
    attempt = Attempt.begin(open_bytes(secret), "demo")
    attempt.save(request(1))
    attempt.save(request(2))
    source = Run(open_bytes(secret), "demo")
    kept = tmp_path / "kept"
    done = run(DrillOptions(copies=source, keep=kept))
    assert done.ok and {outcome.name for outcome in done.outcomes if outcome.verdict == SKIPPED} <= {
        "damage",
        "lost",
        "torn",
    }, lines_of(done)
    assert not any(b"layer.weight" in data for data in files(kept).values())
    monkeypatch.delenv("RELIGHT_KEY")
    done = run(DrillOptions(copies=source))
    assert [(outcome.name, outcome.verdict) for outcome in done.outcomes] == [
        ("copy", FAILED)
    ] and "would not be" in done.outcomes[0].why


def test_only_what_is_named_is_rehearsed(store: Path) -> None:
    """The error for an unknown name lists the known ones."""
    assert [outcome.name for outcome in drilled(store, only=["torn"]).outcomes] == ["copy", "torn"]
    with pytest.raises(ConfigError, match="no rehearsal 'kill' of copies"):
        drilled(store, only=["kill"])
