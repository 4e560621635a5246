"""Damage in some tiers is repaired from other tiers."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.commit.test_smaller import request, state

from relight.catalog import Run
from relight.catalog.tiers import announce, tiers_of
from relight.cli import cli
from relight.commit import Attempt
from relight.drain import drain, scrub
from relight.errors import Fenced, StoreUnavailable
from relight.observe import subscribe
from relight.policy import Tiers, keep
from relight.reader import verify_checkpoint
from relight.reclaim import execute, plan_prune
from relight.run_records.verification import checked, record_checked
from relight.store import Disk, LocalStore
from relight.store.durable import Replacement
from relight.store.mirror_state import DOUBTED
from relight.store.mirrored import MirroredStore
from relight.store.urls import open_bytes, split_run
from relight.testing.scenario import RUN, state_of
from relight.testing.scenario import save as save_state

TIERS = ("hot", "warm", "cold")


def begin(folder: Path) -> Attempt:
    attempt = Attempt.begin(LocalStore(folder / "hot"), RUN)
    tiers = Tiers(**{name: folder / name / RUN for name in TIERS})
    announce(attempt.place.log, tiers.tiers, attempt.epoch)
    return attempt


def sound(folder: Path) -> bool:
    for name in TIERS:
        run = Run(LocalStore(folder / name), RUN)
        view = run.view()
        if any(verify_checkpoint(run.store, view, checkpoint) for checkpoint in run.history().live):
            return False
    return True


@pytest.mark.parametrize("seed", range(24))
def test_two_of_three_damaged_at_random_are_repaired(tmp_path: Path, seed: int) -> None:
    """Two of three copies of every file may be flipped, cut, emptied or deleted.

    Afterwards every file has its old bytes.
    """
    rng = random.Random(f"scrub {seed}")
    attempt = begin(tmp_path)
    for step in range(2):
        list(save_state(attempt, f"scrub/{step}", step))
        drain(attempt.store, RUN)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    damaged = []
    by_file: dict[str, list[Path]] = {}
    for path in sorted(before):
        if path.parent.name != "log" and path.name not in ("relight.json", "draft.json"):
            step = path.parent.name.split("-")[0]
            by_file.setdefault(f"{step}/{path.name}", []).append(path)
    for paths in by_file.values():
        assert len(paths) == 3
        for path in rng.sample(paths, rng.choice((0, 1, 2, 2))):
            data = bytearray(path.read_bytes())
            how = rng.choice(("flip", "cut", "empty", "gone"))
            if how == "gone":
                path.unlink()
            else:
                if how == "flip":
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                path.write_bytes(data[: rng.randrange(len(data))] if how == "cut" else b"" if how == "empty" else data)
            damaged.append(path)
    for _ in range(3):  # a tier that was just repaired helps to repair the next
        report = scrub(attempt.store, RUN)
        if not any(not damage.repaired_from for damage in report.damage):
            break
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path in before}
    assert [path for path in damaged if after.get(path) != before[path]] == []
    assert sound(tmp_path)
    assert scrub(attempt.store, RUN).damage == []


def test_damage_without_a_sound_copy_is_reported_and_left(tmp_path: Path) -> None:
    """Damage without a sound copy is reported, and no file is deleted."""
    attempt = begin(tmp_path)
    list(save_state(attempt, "scrub/0", 0))
    drain(attempt.store, RUN)
    packs = sorted(tmp_path.rglob("pack*"))
    for pack in packs:
        pack.write_bytes(pack.read_bytes()[:-1])
    before = [pack.read_bytes() for pack in packs]
    events: list[str] = []
    report = scrub(attempt.store, RUN, notify=lambda name, message, fields: events.append(name))
    assert report.damage and not any(damage.repaired_from for damage in report.damage)
    assert set(events) == {"scrub.damaged"}
    assert [pack.read_bytes() for pack in packs] == before


def test_a_scrub_without_repair_changes_nothing(tmp_path: Path) -> None:
    """With ``repair=False`` damage is reported and unchanged."""
    attempt = begin(tmp_path)
    list(save_state(attempt, "scrub/0", 0))
    drain(attempt.store, RUN)
    (pack, *_) = sorted((tmp_path / "warm").rglob("pack*"))
    pack.write_bytes(b"")
    report = scrub(attempt.store, RUN, repair=False)
    assert {(damage.tier, Path(damage.file).name) for damage in report.damage} == {("warm", pack.name)}
    assert pack.read_bytes() == b""


def test_a_checkpoint_deleted_during_a_scrub_is_no_damage(tmp_path: Path) -> None:
    """A checkpoint that is retired while it is read is neither reported as damaged nor restored."""
    attempt = begin(tmp_path)
    for step in range(2):
        list(save_state(attempt, f"scrub/{step}", step))
        drain(attempt.store, RUN)
    first = attempt.history().live[0]
    done: list[bool] = []

    def prune_now(length: int) -> None:
        if not done:
            done.append(True)
            execute(plan_prune(attempt.store, RUN, keep(last=1)), attempt.store)

    report = scrub(attempt.store, RUN, progress=prune_now)
    assert report.damage == []
    assert not (tmp_path / "hot" / RUN / first.body.dir).exists()


def test_the_rate_is_bounded_and_a_silent_tier_is_reported(tmp_path: Path) -> None:
    """Reads keep to the bytes per second. A tier that does not answer is skipped."""
    import time

    attempt = begin(tmp_path)
    list(save_state(attempt, "scrub/0", 0))
    drain(attempt.store, RUN)
    (tmp_path / "cold" / RUN / "log").rename(tmp_path / "log away")
    (tmp_path / "cold" / RUN / "log").write_text("no directory")
    started = time.monotonic()
    report = scrub(attempt.store, RUN, bytes_per_second=100_000)
    assert time.monotonic() - started >= report.bytes / 100_000 * 0.9
    assert report.checkpoints == 2 and report.damage == []


def test_the_command(tmp_path: Path) -> None:
    """The command lists repaired damage with exit code 0, and other damage with 1."""
    attempt = begin(tmp_path)
    list(save_state(attempt, "scrub/0", 0))
    drain(attempt.store, RUN)
    (pack, *_) = sorted((tmp_path / "hot").rglob("pack*"))
    data = bytearray(pack.read_bytes())
    data[-1] ^= 1
    pack.write_bytes(data)

    def relight(*arguments: str, status: int = 0) -> str:
        command = [sys.executable, "-m", "relight", "verify", "--repair", str(tmp_path / "hot" / RUN), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == status, (done.stdout, done.stderr)
        return done.stdout

    assert "DAMAGED" in relight("--dry-run", status=1)
    result = json.loads(relight("--json"))
    assert result["ok"] and result["damage"][0]["repaired_from"] in ("warm", "cold")
    assert "as committed" in relight("--rate", "10MB")


def test_events_are_passed_to_the_callback(tmp_path: Path) -> None:
    """Events are passed to ``tell``."""
    attempt = begin(tmp_path)
    list(save_state(attempt, "scrub/0", 0))
    drain(attempt.store, RUN)
    (pack, *_) = sorted((tmp_path / "hot").rglob("pack*"))
    pack.unlink()
    events: list[tuple[str, str]] = []
    undo = subscribe(lambda event: None)
    scrub(attempt.store, RUN, notify=lambda name, message, fields: events.append((name, str(fields["repaired_from"]))))
    undo()
    assert events == [("scrub.repaired", "warm")]
    assert state_of("scrub/0")


@pytest.mark.parametrize("which", ["pack-00000-000.safetensors", "part-00000.msgpack", "root.json"])
def test_a_repair_that_is_cut_off_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """The repaired file replaces the damaged one only when it is complete: its sound chunks are still useful until
    then."""
    attempt = begin(tmp_path)
    list(save_state(attempt, "scrub/0", 0))
    drain(attempt.store, RUN)
    (path,) = (path for path in (tmp_path / "hot").rglob(which) if path.parent.name.startswith("0000000000-"))
    sound_bytes = path.read_bytes()
    bad = bytearray(sound_bytes)
    bad[-1] ^= 1
    path.write_bytes(bad)
    with monkeypatch.context() as patch:

        def cut_off(self: Replacement, size: int | None = None) -> None:
            raise StoreUnavailable("the link is down")

        patch.setattr(Replacement, "finish", cut_off)
        scrub(attempt.store, RUN)
        assert path.read_bytes() == bad
    report = scrub(attempt.store, RUN)
    assert path.read_bytes() == sound_bytes and all(damage.repaired_from for damage in report.damage)
    assert sorted(entry.name for entry in path.parent.iterdir() if entry.name.startswith(".")) == []


def test_a_superseded_attempt_does_not_define_the_tiers(tmp_path: Path) -> None:
    """An attempt was stopped between its fence and its announcement. The next attempt knows one more tier."""
    attempt = begin(tmp_path)
    Attempt.begin(attempt.store, RUN)
    with pytest.raises(Fenced):
        announce(
            attempt.place.log, Tiers(hot=tmp_path / "hot" / RUN, warm=tmp_path / "warm" / RUN).tiers, attempt.epoch
        )
    assert [tier.name for tier in tiers_of(attempt.history())] == ["warm", "cold"]


def test_copies_damaged_in_different_chunks_repair_each_other(tmp_path: Path) -> None:
    """Every copy of a pack has a damaged chunk, and each chunk is whole in some tier: all copies are repaired."""
    attempt = begin(tmp_path)
    attempt.save(request(0, state(), None))
    drain(attempt.store, RUN)
    packs = [path for name in TIERS for path in (tmp_path / name).rglob("pack*")]
    whole = packs[0].read_bytes()
    for path, place in zip(packs, (0.1, 0.9, 0.9), strict=True):
        data = bytearray(whole)
        data[int(place * len(data))] ^= 1
        path.write_bytes(data)
    report = scrub(attempt.store, RUN)
    assert [damage.repaired_from for damage in report.damage] == ["warm", "hot", "hot"]
    assert [path.read_bytes() == whole for path in packs] == [True] * 3


class BadSectors:
    """Patch ``Disk``: reads of some files fail with EIO, until they are written again."""

    def __init__(self, patch: pytest.MonkeyPatch, *paths: Path) -> None:
        inodes, read = {path.stat().st_ino for path in paths}, Disk.preadv

        def preadv(disk: Disk, fd: int, into: memoryview, offset: int) -> int:
            if os.fstat(fd).st_ino in inodes:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return read(disk, fd, into, offset)

        patch.setattr(Disk, "preadv", preadv)


def run_repair(url: Path | str, *options: str) -> tuple[int, str]:
    """Return exit code and output of ``relight verify --repair``."""
    done = CliRunner().invoke(cli, ["verify", "--repair", str(url), *options], standalone_mode=False)
    assert done.exception is None, done.exception
    return done.return_value or 0, done.output


def test_a_checkpoint_that_cannot_be_read_is_not_recorded_as_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pack gives EIO in both tiers: it is listed as unread, exit code 1, and an earlier damage record stays."""
    attempt = begin(tmp_path)
    list(save_state(attempt, "scrub/0", 0))
    drain(attempt.store, RUN)
    (checkpoint,) = attempt.history().live
    record_checked(attempt.store, RUN, {checkpoint.id: "pack: chunk 3 is damaged"}, "test")
    with monkeypatch.context() as patch:
        BadSectors(patch, *tmp_path.rglob("pack*"))
        code, text = run_repair(tmp_path / "hot" / RUN)
        assert code == 1 and "UNREAD" in text and "could not be read" in text and "to the byte" not in text
        code, text = run_repair(tmp_path / "hot" / RUN, "--json")
        report = json.loads(text)
        assert code == 1 and not report["ok"] and report["damage"] == []
        assert {row["tier"] for row in report["unread"]} == set(TIERS)
    for name in TIERS:
        results = checked(Run(LocalStore(tmp_path / name), RUN).history())
        assert all(result.damage for result in results.values()), name
    assert checked(attempt.history())[checkpoint.id].damage == "pack: chunk 3 is damaged"


def test_a_file_with_bad_sectors_is_repaired_from_another_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pack that gives EIO in one tier is written again from the next tier."""
    attempt = begin(tmp_path)
    list(save_state(attempt, "scrub/0", 0))
    drain(attempt.store, RUN)
    (pack, *_) = sorted((tmp_path / "hot").rglob("pack*"))
    with monkeypatch.context() as patch:
        BadSectors(patch, pack)
        code, text = run_repair(tmp_path / "hot" / RUN)
        assert code == 0 and "REPAIRED" in text and "UNREAD" not in text
    assert sound(tmp_path)


@pytest.mark.parametrize("in_both", [False, True])
def test_bad_sectors_of_a_mirrored_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_both: bool) -> None:
    """A file that gives EIO on one drive is written again from the other. If both give EIO, a new drive stays doubted."""
    drives = [tmp_path / name for name in ("n0", "n1")]
    url = f"stripe:mirrors=2,{drives[0]},{drives[1]},/demo"
    attempt = Attempt.begin(open_bytes(split_run(url)[0]), RUN)
    list(save_state(attempt, "scrub/0", 0))
    url = f"stripe:mirrors=2,{drives[0]},{drives[1]},/{RUN}"
    (first, *_) = sorted(drives[0].rglob("pack*"))
    packs = [drive / first.relative_to(drives[0]) for drive in drives]
    mirrored = open_bytes(split_run(url)[0])
    assert isinstance(mirrored, MirroredStore)
    mirrored.change({1: DOUBTED}, "test")
    with monkeypatch.context() as patch:
        BadSectors(patch, *packs[0 if in_both else 1 :])
        code, text = run_repair(url)
    again = open_bytes(split_run(url)[0])
    assert isinstance(again, MirroredStore)
    if in_both:
        assert code == 1 and "UNREAD" in text
        assert [drive.status for drive in again.statuses()] == ["good", "doubted"]
        assert not any(not result.damage for result in checked(attempt.history()).values())
    else:
        assert code == 0 and "REPAIRED" in text
        assert packs[0].read_bytes() == packs[1].read_bytes()
        assert [drive.status for drive in again.statuses()] == ["good", "good"]
