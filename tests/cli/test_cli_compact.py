"""Output of commands for checkpoints that share chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from relight import Checkpointer, Compact


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with three saves of a model. The model's first layer is frozen."""
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 2))
    optimizer = torch.optim.AdamW(model[1].parameters())
    path = tmp_path / "store" / "run"
    with Checkpointer(path, model=model, optimizer=optimizer, compact=Compact(codecs="always")) as ckpt:
        ckpt.restore()
        for step in range(3):
            model(torch.randn(2, 512)).sum().backward()
            optimizer.step()
            ckpt.save(step)
    return path


def test_shared_chunks_and_codecs_are_shown(run: Path, relight: Any) -> None:
    """``show --codecs`` states how chunks are stored and why. ``ls`` shows new bytes and needed checkpoints."""
    output = relight("show", run, "--codecs").out
    assert "stored so" in output and "of the last two saves was equal; codecs are on" in output
    assert "elsewhere" in output and "relight.compact" not in output
    rows = relight("show", run, "--codecs", "--json").json["codecs"]
    assert {row["role"] for row in rows} >= {"param", "optim"}
    (codec_row,) = [row for row in rows if row["role"] == "param" and row["bytes"] > 1 << 20] or [None]
    assert (
        codec_row is not None and codec_row["elsewhere"] >= 1 and codec_row["stored_bytes"] < 0.9 * codec_row["bytes"]
    )
    listed = relight("ls", run).out
    assert "new" in listed and "needs 1" in listed


def test_an_independent_checkpoint_shows_no_shared_chunks(run: Path, relight: Any) -> None:
    """The first checkpoint's chunks are coded, and all of them are its own."""
    first = relight("ls", run, "--json").json[0]
    rows = relight("show", f"{run}@{first['id']}", "--codecs", "--json").json["codecs"]
    assert all(row["elsewhere"] == 0 for row in rows) and any(row["coded"] for row in rows)
