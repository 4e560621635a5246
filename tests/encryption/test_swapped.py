"""Checkpoints with files exchanged for others of the same length, kind and key, with files truncated at the tags, or
with a record that states that the store is not encrypted.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

import relight
from relight.errors import CheckpointNotFound, CorruptCheckpoint, WrongKey
from relight.format.cipher import TAG_BYTES, TRAILER_BYTES
from relight.format.records import decode_store, encode_store

STEPS = (1, 2, 3)


def saved(url: Path, key_file: str, seed: int) -> None:
    """Save four checkpoints of a run. All of them, also those of other seeds, have files of the same lengths."""
    x = torch.zeros(20_000)
    with relight.Checkpointer(url, x=x, encrypt=key_file, background=False, save=relight.every(steps=1)) as ckpt:
        for step in (0, *STEPS):
            x.copy_(torch.randn(20_000, generator=torch.Generator().manual_seed(100 * seed + step)))
            ckpt.save(step)


@pytest.fixture
def stores(tmp_path: Path, key_file: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Return runs ``a`` and ``b`` of one store, and ``a`` of another store with the same key; and a directory for
    damaged copies.
    """
    monkeypatch.setenv("RELIGHT_KEY", key_file)
    for seed, run in enumerate(("one/a", "one/b", "two/a")):
        saved(tmp_path / run, key_file, seed)
    return {"whole": tmp_path, "broken": tmp_path / "broken"}


def files_of(run: Path, step: int) -> Iterator[Path]:
    """Return root, part and pack."""
    return (path for path in sorted(next(run.glob(f"{step:010d}-*")).iterdir()) if path.is_file())


def attempt(run: Path, step: int) -> torch.Tensor:
    """Return the restored value."""
    tree = relight.load(run, step)
    return tree["x"]


def found_damaged(run: Path) -> set[int]:
    """Return the steps of the checkpoints that do not verify."""
    return {checkpoint.step for checkpoint, findings in relight.open(run).verify() if findings}


def twins(whole: Path, step: int) -> Iterator[tuple[str, Path]]:
    """Return directories with files of the same kind: of another step, of another run, of another store."""
    yield "another step", next((whole / "one/a").glob(f"{step % 3 + 1:010d}-*"))
    yield "another run", next((whole / "one/b").glob(f"{step:010d}-*"))
    yield "another store", next((whole / "two/a").glob(f"{step:010d}-*"))


@pytest.mark.parametrize("step", STEPS)
def test_another_checkpoints_file_is_refused(stores: dict[str, Path], step: int) -> None:
    """Root, part, pack, or all of them are exchanged for those of another step, run or store, with the same key and
    length. Each is reported as damage.
    """
    whole, broken = stores["whole"], stores["broken"]
    expected = attempt(whole / "one/a", step)
    exchanged = 0
    for key, other in twins(whole, step):
        kinds = [path.name for path in files_of(whole / "one/a", step)]
        assert len(kinds) == 3
        for names in ([name] for name in [*kinds, ""]):
            shutil.rmtree(broken, ignore_errors=True)
            shutil.copytree(whole / "one", broken)
            mine = next((broken / "a").glob(f"{step:010d}-*"))
            for name in kinds if names == [""] else names:
                assert (other / name).stat().st_size == (mine / name).stat().st_size, key
                shutil.copyfile(other / name, mine / name)
                exchanged += 1
            with pytest.raises(CorruptCheckpoint):
                attempt(broken / "a", step)
            assert found_damaged(broken / "a") == {step}, (key, names)
    assert exchanged == 18
    assert torch.equal(attempt(whole / "one/a", step), expected)


def test_another_runs_records_have_no_effect(stores: dict[str, Path]) -> None:
    """A record from another run or store, or from another place in this log, has no effect:

    one checkpoint is missing, and no other one appears.
    """
    whole, broken = stores["whole"], stores["broken"]
    records = sorted((whole / "one/a/log").iterdir())
    commits = [path for path in records if attempt_of(whole / "one/a", path, broken, path.read_bytes())]
    assert len(commits) == len(STEPS) + 1  # without one of them there is one less
    for path in commits:
        number = records.index(path)
        others = [
            records[number - 1],
            sorted((whole / "one/b/log").iterdir())[number],
            sorted((whole / "two/a/log").iterdir())[number],
        ]
        for other in others:
            steps = steps_with(whole / "one/a", path, broken, other.read_bytes())
            assert set(steps) < {0, *STEPS}
            for step in steps:
                assert torch.equal(attempt(broken / "a", step), attempt(whole / "one/a", step))


def steps_with(run: Path, record: Path, broken: Path, data: bytes) -> list[int]:
    """Return the steps of the checkpoints, with ``data`` in the place of a record."""
    shutil.rmtree(broken, ignore_errors=True)
    shutil.copytree(run.parent, broken)
    (broken / run.name / "log" / record.name).write_bytes(data)
    return [checkpoint.step for checkpoint in relight.open(broken / run.name).checkpoints()]


def attempt_of(run: Path, record: Path, broken: Path, data: bytes) -> bool:
    """Return whether a record is a COMMIT: with one bit changed, one checkpoint is missing."""
    return len(steps_with(run, record, broken, bytes([data[0] ^ 1]) + data[1:])) < len(STEPS) + 1


@pytest.mark.parametrize("cut", [1, TAG_BYTES, TAG_BYTES + 1, TRAILER_BYTES, TRAILER_BYTES + TAG_BYTES])
def test_what_is_cut_at_its_tags_is_refused(stores: dict[str, Path], cut: int) -> None:
    """A file is refused if its trailer, or its trailer and some of the tags before it, are cut off."""
    whole, broken = stores["whole"], stores["broken"]
    for name in [path.name for path in files_of(whole / "one/a", 1)]:
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(whole / "one", broken)
        path = next((broken / "a").glob(f"{1:010d}-*")) / name
        path.write_bytes(path.read_bytes()[:-cut])
        with pytest.raises(CorruptCheckpoint):
            attempt(broken / "a", 1)
        assert found_damaged(broken / "a") == {1}


def test_a_store_with_a_forged_record_of_no_encryption(
    stores: dict[str, Path], key_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attacker with write access changes the store's record to unencrypted, and may delete the key slots.

    With a key, readers and writers do not accept the record, and write no plaintext. Without a key nothing can be read,
    because no file is plaintext.
    """
    whole, broken = stores["whole"], stores["broken"]
    for without_keys in (False, True):
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(whole / "one", broken)
        record = decode_store((broken / "relight.json").read_bytes(), "relight.json")
        assert record.encrypted
        (broken / "relight.json").write_bytes(encode_store(msgspec.structs.replace(record, encrypted=False)))
        if without_keys:
            shutil.rmtree(broken / ".keys")
        before = {path: path.read_bytes() for path in broken.rglob("*") if path.is_file()}
        for key in (key_file, ""):
            monkeypatch.setenv("RELIGHT_KEY", key)
            with pytest.raises(WrongKey if key else CheckpointNotFound):
                attempt(broken / "a", 1)
            with (
                pytest.raises((WrongKey, CorruptCheckpoint)),
                relight.Checkpointer(broken / "a", x=torch.zeros(9), background=False) as ckpt,
            ):
                ckpt.restore()
        assert {path: path.read_bytes() for path in broken.rglob("*") if path.is_file()} == before
        monkeypatch.setenv("RELIGHT_KEY", key_file)
