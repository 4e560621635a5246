"""A restore reads each pack from the nearest tier that has it, although another tier's metadata are used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import relight
from relight.drain import drain
from relight.store import LocalStore, Reader


def opened_packs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the path of each pack that is opened."""
    paths: list[str] = []
    original = LocalStore.open

    def noted(store: LocalStore, key: str) -> Reader:
        if "/pack-" in key:
            paths.append(f"{store.url}/{key}")
        return original(store, key)

    monkeypatch.setattr(LocalStore, "open", noted)
    return paths


@pytest.mark.parametrize("lost", ["root.json", "part-00000.msgpack", "pack-00000-000.safetensors"])
def test_each_pack_comes_from_the_nearest_tier_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Without the near metadata, the far ones are read, and the near packs. Without a near pack, only that pack is read from far."""
    tiers = relight.Tiers(near=tmp_path / "near" / "run", far=tmp_path / "far" / "run")
    model = torch.nn.Linear(64, 64)
    with relight.Checkpointer(tiers, model=model, signals=False, background=False) as ckpt:
        ckpt.save(3)
    drain(LocalStore(tmp_path / "near"), "run")
    (path,) = (tmp_path / "near" / "run").glob(f"*/{lost}")
    path.unlink()
    again = torch.nn.Linear(64, 64)
    paths = opened_packs(monkeypatch)
    with relight.Checkpointer(tiers, model=again, signals=False, background=False) as ckpt:
        assert ckpt.restore() == 4
    assert torch.equal(again.weight, model.weight)
    read = [path for path in paths if Path(path.removeprefix("file://")).exists()]
    assert read and [path for path in read if ("/far/" if lost.startswith("pack") else "/near/") not in path] == []
