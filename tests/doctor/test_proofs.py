"""Proofs: ``relight verify`` and ``relight drill --prove`` record them with a run, and ``relight doctor --ready`` uses them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import at_hand
import pytest

from relight.errors import StoreUnavailable
from relight.prove import FirstDifference, ProveReport
from relight.run_records.proofs import DIRECTORY, KEPT, Proof, Verified, proofs_of, remember_proof
from relight.store import LocalStore, open_bytes


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Create a store with runs that have some checkpoints."""
    at_hand.fill(tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Return a function that calls the command line in this process."""
    return lambda *arguments: at_hand.in_process(monkeypatch, capfd, [str(argument) for argument in arguments])


def line(call: Any, path: Path, name: str) -> Any:
    """Return the line ``name`` of ``relight doctor --ready``."""
    return next(row for row in call("doctor", "--ready", path, "--json").json["list"] if row["name"] == name)


def test_a_verification_is_remembered_and_counts_for_the_newest(place: Path, call: Any) -> None:
    """Each run gets its own proof. ``--quick`` reads no bytes and records none. Damage is recorded, too."""
    name = "restore of the newest checkpoint"
    call("verify", place, "--quick")
    assert proofs_of(open_bytes(place), "demo") == []
    assert line(call, place / "demo", name)["score"] == 0.75
    call("verify", place)
    (proof,) = proofs_of(open_bytes(place), "demo")
    assert proof.ok
    assert [checkpoint.id for checkpoint in proof.checkpoints] == at_hand.ids(place)
    assert len(proofs_of(open_bytes(place), "baseline")) == 1
    row = line(call, place / "demo", name)
    assert row["score"] == 1.0
    assert "just now" in row["evidence"]
    (pack,) = at_hand.directory(place, -1).glob("pack-*")
    at_hand.flip(pack)
    assert call("verify", place / "demo", "latest").code == 1
    damaged = proofs_of(open_bytes(place), "demo")[-1]
    assert not damaged.ok
    assert pack.name in damaged.checkpoints[-1].damage
    assert line(call, place / "demo", name)["score"] == 0.0


def test_a_proof_is_recorded_in_the_given_run(place: Path, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof records equality or the first difference. Without ``--remember`` nothing is written. A missing run is an error at once."""
    name = "proof of an exact resume"
    for difference, score in ((None, 1.0), (FirstDifference(7, "after step 7", "model/x", "why", []), 0.0)):
        report = ProveReport(difference is None, 5, 3, 3, 42, difference, 1.0)
        monkeypatch.setattr("relight.cli.drill_prove.run", lambda options, report=report: report)
        call("drill", "--prove", "train.py")
        before = len(proofs_of(open_bytes(place), "demo"))
        call("drill", "--prove", "--remember", place / "demo", "train.py")
        assert len(proofs_of(open_bytes(place), "demo")) == before + 1
        row = line(call, place / "demo", name)
        assert row["score"] == score
        assert "train.py" in row["evidence"]
    monkeypatch.setattr("relight.cli.drill_prove.run", lambda options: pytest.fail("it was run"))
    assert call("drill", "--prove", "--remember", place / "none", "train.py").code == 1


def test_the_newest_proofs_stay_and_invalid_files_are_skipped(tmp_path: Path) -> None:
    """Only the newest 32 proofs are kept. Damaged, huge and foreign files are ignored."""
    store = LocalStore(tmp_path / "runs")
    for number in range(KEPT + 8):
        remember_proof(store, "demo", Proof("prove", True, str(number), at=f"2026-01-01T00:{number:02d}:00Z"))
    assert [proof.summary for proof in proofs_of(store, "demo")] == [str(number) for number in range(8, KEPT + 8)]
    for number, data in enumerate((b"", b"{", b"[]", b'{"kind": 3}', b"\xff" * 100, b" " * (2 << 20))):
        store.put_once(f"demo/{DIRECTORY}/9999999999999-{number}.json", data)
    assert len(proofs_of(store, "demo")) == KEPT
    assert proofs_of(store, "other") == []
    for number in range(20):
        remember_proof(store, "quick", Proof("prove", True, str(number)))
        time.sleep(0.002)
    assert [proof.summary for proof in proofs_of(store, "quick")] == [str(number) for number in range(20)]
    assert Proof("prove", True, "", at="yesterday").time_s is None


def test_a_store_that_cannot_be_written_is_verified_all_the_same(
    place: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the proof cannot be recorded, output and exit code are unchanged."""

    def refuse(self: LocalStore, key: str, data: bytes) -> bool:
        raise StoreUnavailable("read-only", where=key)

    monkeypatch.setattr(LocalStore, "put_once", refuse)
    assert call("verify", place / "demo").code == 0
    monkeypatch.setattr("relight.cli.drill_prove.run", lambda options: ProveReport(True, 5, 3, 3, 42, None, 1.0))
    answer = call("drill", "--prove", "--remember", place / "demo", "train.py")
    assert answer.code == 0
    assert "could not be recorded" in answer.err
    assert not os.path.exists(place / "demo" / DIRECTORY)


def test_a_long_list_of_checkpoints_is_cut(tmp_path: Path) -> None:
    """A proof names at most the newest thousand checkpoints."""
    store = LocalStore(tmp_path / "runs")
    remember_proof(
        store,
        "demo",
        Proof("verify", True, "", checkpoints=tuple(Verified(str(number), number) for number in range(3000))),
    )
    (proof,) = proofs_of(store, "demo")
    assert (len(proof.checkpoints), proof.checkpoints[-1].step) == (1000, 2999)
