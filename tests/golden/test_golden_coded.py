"""Stores with coded, shared, derived, lossy, encrypted and signed checkpoints, written once. They stay readable
forever."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from fingerprints import every_byte, hashed

import relight
from relight.catalog import Run, candidates
from relight.reader import verify_checkpoint
from relight.reader.storage_stats import stored_as
from relight.errors import ConfigError, CorruptCheckpoint, WrongKey
from relight.keys import write_key_file
from relight.keys.guard import StoreSecurity
from relight.store import open_bytes

GOLDEN = Path(__file__).parent / "v1-coded"
EVERY_BYTE = "565a24f41164105cbdf8ed8d5874c5b868ceacaf62c19247c7c2958e1ddd3855"
"""Hash over all files' names and bytes. It never changes."""
WIDTH = 48
STORES = ("coded", "encrypted")


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """Return a copy with a key file that only its owner can read, as keys require."""
    shutil.copytree(GOLDEN, tmp_path / "golden")
    (tmp_path / "golden" / "the.key").chmod(0o600)
    return tmp_path / "golden"


def keys(golden: Path, name: str) -> dict[str, str]:
    """Return the options for a Checkpointer of this store."""
    return {"encrypt": f"file:{golden / 'the.key'}", "trust": (golden / "trust").read_text().strip()} if name == "encrypted" else {}


def test_they_are_what_they_were() -> None:
    """Compare every byte of the golden files. No file changes, is added or removed."""
    assert every_byte(GOLDEN) == EVERY_BYTE


@pytest.mark.parametrize("name", STORES)
def test_every_one_of_them_restores_to_the_bit(golden: Path, name: str) -> None:
    """Restore the newest checkpoint and its donors bit-exactly into torch objects."""
    expected = json.loads((golden / f"{name}.expected.json").read_text())
    assert len(expected) == 4
    for checkpoint_id, wanted in expected.items():
        base, master, average = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        base.requires_grad_(False)
        model = torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(master.parameters())
        ckpt = relight.Checkpointer(
            golden / name / "run", base=base, model=model, master=master, optimizer=optimizer, average=average, **keys(golden, name)
        )
        ckpt.restore(checkpoint_id)
        state = optimizer.state_dict()["state"][0]
        tensors = {
            "base/weight": base.weight, "model/weight": model.weight, "master/weight": master.weight, "average/weight": average.weight,
            "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"],
        }  # fmt: skip
        assert {path: hashed(tensor) for path, tensor in tensors.items()} == wanted, checkpoint_id


@pytest.mark.parametrize("name", STORES)
def test_they_hold_every_way_of_storing(golden: Path, name: str) -> None:
    """Check that the stores contain coded, differential, shared, derived and lossy chunks, and that every checkpoint
    verifies. What they lack is not protected."""
    store = open_bytes(golden / name, guard=StoreSecurity.from_settings(**keys(golden, name)))  # type: ignore[arg-type]
    run = Run(store, "run")
    ways = [row for checkpoint in candidates(run.history()) for row in stored_as(run.open(checkpoint))]
    for way in ("coded", "differences", "elsewhere", "derived"):
        assert sum(getattr(row, way) for row in ways), way
    assert all(not verify_checkpoint(store, run.view(), checkpoint) for checkpoint in candidates(run.history()))
    assert max(len(checkpoint.body.requires) for checkpoint in run.history().live) == 2


def test_another_key_opens_none_of_it(golden: Path) -> None:
    """Refuse another key and a missing key. A run that an untrusted key has signed is refused, and training does not
    restart from scratch."""
    write_key_file(str(golden / "other.key"))
    with pytest.raises(WrongKey):
        Run(open_bytes(golden / "encrypted", guard=StoreSecurity.from_settings(f"file:{golden / 'other.key'}")), "run").history()
    with pytest.raises((WrongKey, ConfigError)):
        Run(open_bytes(golden / "encrypted"), "run").history()
    stranger = {**keys(golden, "encrypted"), "trust": "ed25519:" + "A" * 43 + "="}
    with pytest.raises(CorruptCheckpoint, match="no valid checkpoint"):
        relight.Checkpointer(golden / "encrypted" / "run", model=torch.nn.Linear(2, 2), **stranger).restore("latest", strict=False)  # type: ignore[arg-type]
