"""Stores with coded, shared, derived, lossy, encrypted and signed checkpoints, written once: they stay readable for ever."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from fingerprints import every_byte, hashed

import relight
from relight.catalog import Run, candidates, verify_checkpoint
from relight.catalog.storage_stats import stored_as
from relight.errors import ConfigError, CorruptCheckpoint, WrongKey
from relight.keys import write_key_file
from relight.keys.guard import StoreSecurity
from relight.store import open_bytes

GOLDEN = Path(__file__).parent / "v1-coded"
EVERY_BYTE = "565a24f41164105cbdf8ed8d5874c5b868ceacaf62c19247c7c2958e1ddd3855"
"""Over all files' names and bytes. It never changes: what was stored is stored."""
WIDTH = 48
STORES = ("coded", "encrypted")


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A copy whose key its owner alone can read, as keys have to be."""
    shutil.copytree(GOLDEN, tmp_path / "golden")
    (tmp_path / "golden" / "the.key").chmod(0o600)
    return tmp_path / "golden"


def keys(golden: Path, name: str) -> dict[str, str]:
    """What a Checkpointer of this store needs."""
    return {"encrypt": f"file:{golden / 'the.key'}", "trust": (golden / "trust").read_text().strip()} if name == "encrypted" else {}


def test_they_are_what_they_were() -> None:
    """Not a bit of the golden files ever changes, and none comes or goes."""
    assert every_byte(GOLDEN) == EVERY_BYTE


@pytest.mark.parametrize("name", STORES)
def test_every_one_of_them_restores_to_the_bit(golden: Path, name: str) -> None:
    """The newest, and those that others need; into objects of torch."""
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
        found = {
            "base/weight": base.weight, "model/weight": model.weight, "master/weight": master.weight, "average/weight": average.weight,
            "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"],
        }  # fmt: skip
        assert {path: hashed(one) for path, one in found.items()} == wanted, checkpoint_id


@pytest.mark.parametrize("name", STORES)
def test_they_hold_every_way_of_storing(golden: Path, name: str) -> None:
    """Coded, as differences, with others, derived, lossy: what is in no golden file is not guarded. And each is as it was committed."""
    store = open_bytes(golden / name, guard=StoreSecurity.from_settings(**keys(golden, name)))  # type: ignore[arg-type]
    run = Run(store, "run")
    ways = [row for one in candidates(run.history()) for row in stored_as(run.open(one))]
    for way in ("coded", "differences", "elsewhere", "derived"):
        assert sum(getattr(row, way) for row in ways), way
    assert all(not verify_checkpoint(store, run.view(), one) for one in candidates(run.history()))
    assert max(len(one.body.requires) for one in run.history().live) == 2


def test_another_key_opens_none_of_it(golden: Path) -> None:
    """Nor none at all; and a run that somebody has signed who is not trusted is refused, not begun anew."""
    write_key_file(str(golden / "other.key"))
    with pytest.raises(WrongKey):
        Run(open_bytes(golden / "encrypted", guard=StoreSecurity.from_settings(f"file:{golden / 'other.key'}")), "run").history()
    with pytest.raises((WrongKey, ConfigError)):
        Run(open_bytes(golden / "encrypted"), "run").history()
    stranger = {**keys(golden, "encrypted"), "trust": "ed25519:" + "A" * 43 + "="}
    with pytest.raises(CorruptCheckpoint, match="no checkpoint that counts"):
        relight.Checkpointer(golden / "encrypted" / "run", model=torch.nn.Linear(2, 2), **stranger).restore("latest", strict=False)  # type: ignore[arg-type]
