"""Damage that one part of Relight has found is shown by all of them, until it is repaired."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.cli.at_hand import directory, fill, flip, ids, in_process, request
from tests.scripts import run_script

from relight.catalog import Run
from relight.commit import Attempt
from relight.doctor.facts_run import collect_run
from relight.drain.scrub import scrub
from relight.errors import StoreUnavailable
from relight.keys import StoreSecurity
from relight.keys.signing import write_signing_key
from relight.monitoring.event_metrics import Tally
from relight.monitoring.overview import seen_of
from relight.policy import keep
from relight.reclaim import plan_prune
from relight.run_records.verification import checked, damage, record_checked
from relight.store import LocalStore, open_bytes

PACK = "pack-00000-000.safetensors"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a store with a run ``demo`` of four checkpoints. The third one's pack has a wrong byte, which metadata and
    sizes do not show."""
    fill(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    flip(directory(tmp_path / "runs", 2) / PACK)
    return tmp_path / "runs"


@pytest.fixture
def relight(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """The command line in this process."""
    return lambda *arguments: in_process(monkeypatch, capfd, [str(argument) for argument in arguments])


def history(path: Path):
    """Return the present history of ``demo``."""
    return Run(open_bytes(path), "demo").history()


def test_damage_found_by_verify_is_shown_by_all_commands(relight, runs: Path) -> None:
    """ls, show, doctor, ready and the monitoring name the damaged checkpoint, the damage, and the command that found
    it."""
    bad, good = ids(runs)[2], ids(runs)[3]
    findings = relight("doctor", "runs/demo", "--json").json["findings"]
    assert not [finding for finding in findings if "demo" in finding["where"]], "metadata and sizes are as committed"
    assert relight("verify", "runs/demo").code == 1
    listed = {row["id"]: row for row in relight("ls", "runs/demo", "--json").json}
    assert PACK in listed[bad]["damaged"]["what"] and listed[bad]["damaged"]["by"].startswith("relight verify on ")
    assert listed[good]["damaged"] is None and listed[good]["verified"]["by"].startswith("relight verify on ")
    shown = relight("ls", "runs/demo")
    assert "DAMAGED" in shown.out and f"checkpoint {bad} is damaged" in shown.err
    assert "found by relight verify" in relight("show", f"runs/demo@{bad}").out
    assert "every byte as committed" in relight("show", f"runs/demo@{good}").out
    assert bad in relight("doctor", "runs/demo").out
    facts = collect_run(open_bytes(runs), "demo", "runs/demo")
    assert [bool(checkpoint.damage) for checkpoint in facts.checkpoints] == [False, False, True, False]
    seen = seen_of(open_bytes(runs), "demo", history(runs), [], [], Tally(), 0.0)
    assert seen.damaged == 1 and dict(seen.bad)[bad].startswith("damaged: ")


def test_repaired_damage_is_no_longer_shown(relight, runs: Path) -> None:
    """A verification without damage clears recorded damage. A repair by scrub does, too."""
    bad = ids(runs)[2]
    relight("verify", "runs/demo")
    relight("verify", "runs/demo")
    assert sum(note.body.data.get("damaged") == bad for note in history(runs).notes) == 1, "recorded once"
    flip(directory(runs, 2) / PACK)
    assert relight("verify", "runs/demo", bad).code == 0
    assert not damage(history(runs)) and "DAMAGED" not in relight("ls", "runs/demo").out
    flip(directory(runs, 2) / PACK)
    scrub(open_bytes(runs), "demo")
    assert damage(history(runs))[bad].by.startswith("relight verify --repair on ")


def test_a_restore_has_its_next_attempt_record_what_it_skipped(tmp_path: Path) -> None:
    """The next attempt records what a restore could not read. The restore itself writes nothing."""
    script = f"""
import sys, torch, relight
model = torch.nn.Linear(2, 2)
with relight.Checkpointer({str(tmp_path / "runs/demo")!r}, model=model, save=relight.every(steps=1), background=False) as ckpt:
    first = ckpt.restore()
    if sys.argv[1] == "restore":
        sys.exit(0)
    for step in range(first, first + 2):
        ckpt.step(step)
"""
    run = lambda what: run_script(script, what).check_returncode()  # noqa: E731
    run("train")
    newest = ids(tmp_path / "runs")[-1]
    flip(directory(tmp_path / "runs", -1) / PACK)
    head = Run(open_bytes(tmp_path / "runs"), "demo").view().head
    run("restore")
    assert Run(open_bytes(tmp_path / "runs"), "demo").view().head == head
    run("train")
    assert damage(history(tmp_path / "runs"))[newest].by.startswith("a restore on ")


def test_damage_in_a_further_tier_is_recorded_there(tmp_path: Path) -> None:
    """If the nearest tier is lost, a restore skips the damaged newest copy of the further tier and records it in that tier's log."""
    script = f"""
import sys, torch, relight
model = torch.nn.Linear(2, 2)
tiers = relight.Tiers(hot={str(tmp_path / "hot/demo")!r}, cold={str(tmp_path / "cold/demo")!r})
with relight.Checkpointer(tiers, model=model, save=relight.every(steps=1), background=False) as ckpt:
    first = ckpt.restore()
    for step in range(first, first + 2):
        ckpt.step(step)
"""
    run = lambda: run_script(script).check_returncode()  # noqa: E731
    run()
    run()
    newest = ids(tmp_path / "cold")[-1]
    flip(directory(tmp_path / "cold", -1) / PACK)
    shutil.rmtree(tmp_path / "hot")
    run()
    assert damage(Run(open_bytes(tmp_path / "cold"), "demo").history())[newest].by.startswith("a restore on ")
    assert not damage(history(tmp_path / "hot"))


def test_retention_keeps_at_least_what_it_kept(runs: Path) -> None:
    """A checkpoint that is known to be damaged counts for no rule: another stays in its place, and none goes for it."""
    Run(open_bytes(runs), "demo").tag("good", None)
    before = set(plan_prune(open_bytes(runs), "demo", keep(last=2)).going)
    record_checked(open_bytes(runs), "demo", {ids(runs)[2]: "wrong"}, "a test")
    after = set(plan_prune(open_bytes(runs), "demo", keep(last=2)).going)
    assert (before, after) == (set(ids(runs)[:2]), set(ids(runs)[:1]))


def test_nothing_is_recorded_where_it_cannot_be_or_would_not_count(runs: Path, tmp_path: Path) -> None:
    """A store that refuses writes can still be read. A signed log gets no unsigned record."""

    class ReadOnly(LocalStore):
        def put_once(self, key: str, data: bytes) -> bool:
            raise StoreUnavailable("read only", where=key)

    record_checked(ReadOnly(runs), "demo", {ids(runs)[0]: "wrong"}, "a test")
    assert not checked(history(runs))
    public = write_signing_key(str(tmp_path / "k"))
    signed = open_bytes(
        tmp_path / "signed", guard=StoreSecurity.from_settings(sign=f"ed25519:file:{tmp_path / 'k'}", trust=public)
    )
    saved = Attempt.begin(signed, "demo").save(request(1))
    for guard in (StoreSecurity.from_settings(), StoreSecurity.from_settings(trust=public)):
        record_checked(open_bytes(tmp_path / "signed", guard=guard), "demo", {saved.id: "wrong"}, "a test")
    assert not checked(history(tmp_path / "signed"))
    record_checked(signed, "demo", {saved.id: "wrong"}, "a test")
    assert saved.id in damage(history(tmp_path / "signed"))
