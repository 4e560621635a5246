"""In, out, and in again: what frameworks wrote is, to the bit, what comes back from each format that it went out in."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import relight
from relight.catalog import open_run
from relight.export import Options, execute_export, plan_export
from relight.importers import detect, import_checkpoint
from relight.store import open_bytes

GOLDEN = Path(__file__).parents[1] / "importers" / "golden"
SOURCES = (
    "accel/state", "deep/stage1", "deep/stage2", "deep/stage3", "deep/universal1", "hugging/checkpoint-3", "hugging/sharded", "light/last.ckpt",
    "mega/iter_0000100", "orb/files", "snap/snapshot",
)  # fmt: skip


def tensors_in(node: Any, path: str = "") -> dict[str, torch.Tensor]:
    """All of a tree's tensors by their paths."""
    if isinstance(node, torch.Tensor):
        return {path: node}
    pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, (list, tuple)) else ()
    return {name: tensor for key, value in pairs for name, tensor in tensors_in(value, f"{path}/{key}").items()}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the bit, also where it is no number."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8))


def brought(source: Path, store: Path, run: str) -> dict[str, Any]:
    """Imported, and loaded."""
    import_checkpoint(detect(source), open_bytes(store), run)
    return relight.load(store / run)


@pytest.mark.parametrize("to", ["safetensors", "pt", "dcp"])
@pytest.mark.parametrize("source", SOURCES)
def test_in_and_out_and_in_again(tmp_path: Path, source: str, to: str) -> None:
    """The model's tensors (Orbax has no models, but trees), by the same names."""
    first = brought(GOLDEN / source, tmp_path / "store", "first")
    name = "model" if "model" in first else "params"
    out = tmp_path / {"safetensors": "model.safetensors", "pt": "model.pt", "dcp": "out"}[to]
    run = open_run(open_bytes(tmp_path / "store"), "first")
    execute_export(plan_export(run.open(run.history().live[-1]), out, Options(to=to, component=name, tied="each")))
    second = brought(out, tmp_path / "store", "second")
    mine, theirs = tensors_in(first[name]), tensors_in(second.get("model", second))
    assert mine and mine.keys() == theirs.keys()
    assert all(same(mine[name], theirs[name]) for name in mine), [
        name for name in mine if not same(mine[name], theirs[name])
    ]
    assert "transformers" not in sys.modules
