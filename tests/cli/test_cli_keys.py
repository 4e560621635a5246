"""``relight keys`` and ``relight keys rekey``: what a schedule, a leak and a farewell need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.at_hand import request
from tests.encryption.test_key_ring import save

from relight.commit import Attempt
from relight.keys import Keychain, write_key_file
from relight.log import Log, fold, require_store
from relight.store import LocalStore
from relight.store.encrypted import EncryptedStore
from relight.transfer import keys as key_rooms


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An encrypted store with a run of two checkpoints. Its key is configured, two other keys are next to it."""
    monkeypatch.chdir(tmp_path)
    for name in ("old", "new", "third"):
        write_key_file(f"{name}.key")
    inner = EncryptedStore(LocalStore("runs"), Keychain.from_specs("file:old.key"))
    require_store(inner)
    attempt = Attempt.begin(inner, "demo")
    for step in (1, 2):
        attempt.save(request(step))
    monkeypatch.setenv("RELIGHT_KEY", "file:old.key")
    return tmp_path / "runs"


def steps_with(key: str) -> list[int]:
    """Return the steps of the checkpoints that a key opens."""
    return [
        checkpoint.step
        for checkpoint in fold(Log(EncryptedStore(LocalStore("runs"), Keychain.from_specs(key)), "demo").read()).live
    ]


def slots(relight, *keys: str) -> list[dict[str, object]]:
    """Return the slots of ``status --json``."""
    options = [part for key in keys for part in ("--key", key)]
    return json.loads(relight("keys", "status", "runs", *options, "--json").out)["slots"]


def days_later(monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    """Simulate that ``days`` have passed since each key was added."""
    usual = key_rooms.age_days
    for module in (key_rooms, __import__("relight.cli.keys", fromlist=["age_days"])):
        monkeypatch.setattr(module, "age_days", lambda created: usual(created) + days)


def test_a_key_that_is_too_old_is_an_exit_code(store: Path, relight, monkeypatch: pytest.MonkeyPatch) -> None:
    """``status --max-age`` exits with 1 for an old key, so that a scheduled job can raise an alert."""
    young = relight("keys", "status", "runs", "--max-age", "30")
    assert young.code == 0
    days_later(monkeypatch, 31)
    old = relight("keys", "status", "runs", "--max-age", "30")
    assert old.code == 1
    assert "older than 30 days" in old.out
    assert not json.loads(relight("keys", "status", "runs", "--max-age", "30", "--json").out)["ok"]


def test_a_schedule_exchanges_what_is_old_and_nothing_else(
    store: Path, relight, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``rotate --older-than`` keeps a young key. For an old key, the new key opens everything afterwards and the old
    one nothing."""
    (slot,) = slots(relight)
    early = relight("keys", "rotate", "runs", slot["kek"], "file:new.key", "--older-than", "30")
    assert early.code == 0
    assert "nothing to do" in early.out
    assert slots(relight) == [slot]
    days_later(monkeypatch, 31)
    done = json.loads(
        relight(
            "keys", "rotate", "runs", slot["kek"], "file:new.key", "--label", "spring", "--older-than", "30", "--json"
        ).out
    )
    assert len(done["added"]) == len(done["revoked"]) == 1
    assert steps_with("file:new.key") == [1, 2]
    assert relight("keys", "status", "runs").code == 1
    assert relight("ls", "runs/demo").code != 0


def test_a_key_is_taken_away_unless_it_is_the_last(store: Path, relight) -> None:
    """``revoke`` refuses to remove the only key, which would lock out every reader. With a second key it removes the
    first."""
    (slot,) = slots(relight)
    refused = relight("keys", "revoke", "runs", slot["kek"])
    assert refused.code == 2
    assert steps_with("file:old.key") == [1, 2]
    assert relight("keys", "add", "runs", "file:new.key", "--label", "team").code == 0
    gone = json.loads(relight("keys", "revoke", "runs", slot["kek"], "--key", "file:new.key", "--json").out)
    assert gone["added"] == []
    assert len(gone["revoked"]) == 1
    assert steps_with("file:new.key") == [1, 2]
    assert relight("ls", "runs/demo").code != 0


def test_rekey_all_encrypts_everything_again_or_only_counts(store: Path, relight) -> None:
    """``rekey --all --dry-run`` changes no byte and prints the size. ``--keep`` names the key that opens the store."""
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    planned = json.loads(relight("keys", "rekey", "runs", "--all", "--dry-run", "--json").out)
    assert planned["dry_run"]
    assert planned["files"] >= 6
    assert {path: path.read_bytes() for path in store.rglob("*") if path.is_file()} == before
    done = json.loads(relight("keys", "rekey", "runs", "--all", "--keep", "file:third.key", "--json").out)
    assert (done["files"], done["bytes"], done["left"]) == (planned["files"], planned["bytes"], 0)
    assert steps_with("file:third.key") == [1, 2]
    changed = [path for path, data in before.items() if path.exists() and path.read_bytes() != data]
    assert len(changed) >= planned["files"]
    assert relight("ls", "runs/demo").code != 0
    assert relight("verify", "runs/demo").code != 0
    assert relight("keys", "rekey", "runs", "--all", "--leaked", "x").code == 2


def test_rekey_names_damaged_files_and_keeps_their_key(store: Path, relight) -> None:
    """The command names the damaged file and the old key's slot, and exits with 1."""
    save(EncryptedStore(LocalStore("runs"), Keychain.from_specs("file:old.key")), 3, "demo")  # several pages
    pack = max((path for path in store.rglob("pack-*")), key=lambda path: path.stat().st_size)
    pack.write_bytes(b"?" * 9 + pack.read_bytes()[9:])
    old = str(slots(relight, "file:old.key")[0]["kek"])
    options = ["rekey", "runs", "--leaked", old, "--keep", "file:new.key", "--key", "file:new.key", "--key"]
    done = relight("keys", *options, "file:old.key")
    assert done.code == 1
    assert pack.relative_to(store).as_posix() in done.out
    assert f"file ({old[:8]}), generation 1 keeps its slot" in done.out
    again = json.loads(relight("keys", *options, "file:old.key", "--json").out)
    assert (again["damaged"], again["files"], len(again["slots_left"])) == (1, 0, 1)
    assert again["damaged_files"] == [pack.relative_to(store).as_posix()]
