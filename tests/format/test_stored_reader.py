"""Coded chunks follow docs/format.md: a reader written only from that page finds the same bytes."""

from __future__ import annotations

from pathlib import Path

import msgpack
import pytest
import torch
from stored_reader import pack_bytes
from torch import nn

import relight


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Save four times: coded, with donors, as deltas, with elements of several widths."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64).bfloat16(), nn.Linear(64, 8).double())
    model.register_buffer("still", torch.randint(0, 5, (30_000,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    path = tmp_path / "store" / "run"
    compact = relight.Compact(codecs="always", full_every=4)
    with relight.Checkpointer(path, model=model, optimizer=optimizer, compact=compact, background=True) as ckpt:
        ckpt.restore()
        for step in range(4):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            ckpt.save(step)
    return path


def test_another_reader_finds_the_same_bytes(run: Path) -> None:
    """The reader agrees on every tensor of every checkpoint."""
    seen = {"coded": 0, "differences": 0, "elsewhere": 0}
    for checkpoint in relight.open(run).checkpoints():
        (folder,) = run.glob(f"*-{checkpoint.id}-*")
        part = msgpack.unpackb((folder / "part-00000.msgpack").read_bytes())
        packs = []
        for entry in part["packs"]:
            if len(entry) == 3:
                packs.append((folder / entry[0]).read_bytes())
                continue
            packs.append(pack_bytes(run, folder, entry))
            seen["coded"] += sum(piece[3] for piece in entry[3][2])
            seen["differences"] += sum(piece[5] is not None for piece in entry[3][2])
            seen["elsewhere"] += sum(piece[0] > 0 for piece in entry[3][2])
        loaded = relight.load(run, checkpoint.id)["model"]
        stored = {row[0]: packs[row[4]][row[5] : row[5] + row[6]] for row in part["tensors"] if row[6]}
        for name, value in loaded.items():
            assert bytes(value.contiguous().view(torch.uint8).numpy().tobytes()) == stored[f"model/{name}"], (
                checkpoint.step,
                name,
            )
    assert all(seen.values()), seen


def test_a_bit_is_noticed(run: Path) -> None:
    """The reader detects damage, too."""
    newest = relight.open(run).latest()
    (folder,) = run.glob(f"*-{newest.id}-*")
    part = msgpack.unpackb((folder / "part-00000.msgpack").read_bytes())
    (file,) = folder.glob("*.chunks")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match="stored bytes"):
        for entry in part["packs"]:
            pack_bytes(run, folder, entry)
