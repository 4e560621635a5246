"""Weights that are their masters, rounded: they take no room, come back to the bit, and are never taken for what they are not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import relight
from relight.catalog.locate import locate, locate_destination
from relight.catalog.run import Run
from relight.errors import CorruptCheckpoint
from relight.format.derived import KINDS, encode_derived, is_rounded, parse_derived, rounded
from relight.format.derived import SourceRange as Piece
from relight.reader.opened import Opened
from relight.reader.storage_stats import stored_as
from relight.store import open_bytes
from relight.testing.store_suite import refuses
from relight.transfer import execute_copy, plan_copy

TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
COMPACT = relight.Compact(codecs="always", full_every=3)


@pytest.mark.parametrize("name", KINDS)
@given(values=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300))
def test_rounding_is_torchs(name: str, values: list[int]) -> None:
    """Values that equal torch's rounding of any bits are recognised as derived.

    A NaN with another payload is not, and that is noticed.
    """
    bits = np.array(values, "<u4")
    wide = torch.from_numpy(bits.view("<f4").copy())
    narrow = wide.to(TYPES[name])
    data = memoryview(narrow.view(torch.int16).numpy().tobytes())
    source = memoryview(bits.tobytes())
    buffer = memoryview(bytearray(len(data)))
    rounded(KINDS[name], source, buffer)
    same = np.frombuffer(buffer, "<u2") == np.frombuffer(data, "<u2")
    assert (same | torch.isnan(wide).numpy()).all()
    assert is_rounded(KINDS[name], source, data) == bool(same.all())


def test_heads_that_make_no_sense() -> None:
    """Invalid chunks are refused, whatever their contents."""
    good = encode_derived(1, [Piece(0, 100), Piece(1000, 28)])
    assert parse_derived(memoryview(good), 128) == (1, [Piece(0, 100), Piece(1000, 28)])
    draw = random.Random(0)
    bad = [
        b"",
        good[:1],
        good[:-1],
        good + b"x",
        b"\1" + good[1:],
        b"\2\3" + good[2:],
        encode_derived(1, [Piece(0, 127)]),
    ]
    bad += [encode_derived(1, [Piece(1 << 63, 128)]), encode_derived(1, [Piece(0, 0), Piece(0, 128)])]
    for data in [*bad, *(draw.randbytes(draw.randrange(60)) for _ in range(300))]:
        refuses(CorruptCheckpoint, lambda data=data: parse_derived(memoryview(data), 128))  # type: ignore[misc]
    refuses(CorruptCheckpoint, lambda: parse_derived(memoryview(good), 126))
    parse_derived(memoryview(encode_derived(1, [Piece(0, 2)] * 64)), 128)
    refuses(CorruptCheckpoint, lambda: parse_derived(memoryview(encode_derived(1, [Piece(0, 2)] * 65)), 130))


class Mixed:
    """Weights in 16 bits, masters and moments in 32, as mixed precision has them."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(700, 900), nn.LayerNorm(900), nn.Linear(900, 3000), nn.Linear(3000, 10)
        ).to(dtype)
        self.master = nn.ParameterList(
            [nn.Parameter(parameter.detach().float().clone()) for parameter in self.model.parameters()]
        )
        self.optimizer = torch.optim.AdamW(self.master.parameters(), lr=1e-3)

    def step(self) -> None:
        for master in self.master:
            master.grad = torch.randn_like(master) * 1e-2
        self.optimizer.step()
        with torch.no_grad():
            for narrow, wide in zip(self.model.parameters(), self.master, strict=True):
                narrow.copy_(wide)

    @property
    def components(self) -> dict[str, Any]:
        return {"model": self.model, "master": self.master, "optimizer": self.optimizer}


def opened(url: Path) -> list[Opened]:
    run = Run(open_bytes(url.parent), "run")
    return [run.open(checkpoint) for checkpoint in run.history().live]


@pytest.mark.parametrize("name", TYPES)
def test_a_run_in_mixed_precision(tmp_path: Path, name: str) -> None:
    """Low-precision weights take almost no bytes in plain and delta saves. The checkpoint restores, loads and copies
    exactly."""
    url = tmp_path / "s" / "run"
    mixed = Mixed(TYPES[name])
    wanted = []
    with relight.Checkpointer(
        url,
        **mixed.components,
        save=relight.every(steps=1),
        compact=COMPACT,
        background=True,
        limits=relight.Limits(when_busy="queue"),
    ) as ckpt:
        ckpt.restore()
        for step in range(5):
            mixed.step()
            ckpt.save(step)
            wanted.append([parameter.detach().clone() for parameter in mixed.model.parameters()])
    checkpoints = opened(url)
    assert len(checkpoints) == 5
    for checkpoint in checkpoints:
        rows = {(row.dtype, row.role): row for row in stored_as(checkpoint)}
        narrow = rows[name, "param"]
        assert narrow.derived == narrow.chunks and narrow.stored_bytes < narrow.bytes / 1000
        assert not any(row.derived for key, row in rows.items() if key[0] == "float32")
    assert checkpoints[0].root.stored_bytes < 0.74 * checkpoints[0].root.logical_bytes
    assert not any(findings for _, findings in relight.open(url).verify())
    for step in range(5):
        loaded = relight.load(url, step)["model"]
        assert all(torch.equal(tensor, other) for tensor, other in zip(wanted[step], loaded.values(), strict=True))
    again = Mixed(TYPES[name])
    with torch.no_grad():
        for tensor in [*again.model.parameters(), *again.master]:
            tensor.zero_()
    ckpt = relight.Checkpointer(url, **again.components, background=False)
    assert ckpt.restore() == 5
    assert all(torch.equal(tensor, other) for tensor, other in zip(wanted[4], again.model.parameters(), strict=True))
    ckpt.close(save=False)
    copied = tmp_path / "copy" / "run"
    source = Run(locate(str(url)).store, "run")
    execute_copy(plan_copy(source, source.history().live, locate_destination(str(copied), "run").store, "run"))
    assert all(
        torch.equal(tensor, other)
        for tensor, other in zip(wanted[4], relight.load(copied)["model"].values(), strict=True)
    )


def test_a_chunk_that_differs_from_its_master_is_stored(tmp_path: Path) -> None:
    """If one bit of a weight differs, only its chunk is stored."""
    url = tmp_path / "s" / "run"
    mixed = Mixed(torch.bfloat16)
    mixed.step()
    with torch.no_grad():
        mixed.model[2].weight.view(torch.int16)[7, 7] ^= 1
    wanted = [parameter.detach().clone() for parameter in mixed.model.parameters()]
    with relight.Checkpointer(url, **mixed.components, compact=COMPACT, background=True) as ckpt:
        ckpt.restore()
        ckpt.save(0)
    row = next(row for row in stored_as(opened(url)[0]) if row.dtype == "bfloat16")
    assert row.derived == row.chunks - 1
    assert all(
        torch.equal(tensor, other) for tensor, other in zip(wanted, relight.load(url)["model"].values(), strict=True)
    )


def test_a_damaged_master_is_damage_to_both(tmp_path: Path) -> None:
    """The damage is found and reported for both tensors."""
    url = tmp_path / "s" / "run"
    mixed = Mixed(torch.bfloat16)
    mixed.step()
    with relight.Checkpointer(url, **mixed.components, compact=COMPACT, background=True) as ckpt:
        ckpt.restore()
        ckpt.save(0)
    pack = next(url.glob("*/pack-*.chunks"))
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    findings = [finding for _, listed in relight.open(url).verify() for finding in listed]
    assert findings and all(finding.kind == "corrupt" for finding in findings)
    refuses(CorruptCheckpoint, lambda: relight.load(url))


@pytest.mark.parametrize("offset", [0, 60, 64, 100, 128, 200, 1 << 40])
def test_what_is_derived_of_itself_or_of_nothing(offset: int) -> None:
    """A tensor derived from itself, from a derived one, or from beyond the end is refused at once."""
    from relight.format import Digest
    from relight.format.chunk_locations import ChunkLocation as StoredPiece
    from relight.format.chunk_locations import PackChunks
    from relight.format.manifest import Pack
    from relight.reader.pack_reader import StoredReader
    from relight.store import MemoryStore, put

    store, body = MemoryStore(), encode_derived(1, [Piece(offset, 64)])
    put(store, "run/x/pack-00000-000.chunks", bytes(64) + body + body)
    value = Digest(body).digest()
    pieces = [StoredPiece(0, 0, 64, False, Digest(bytes(64)).digest())]
    pieces += [StoredPiece(0, 64 + number * len(body), len(body), 2, value) for number in range(2)]
    stored = PackChunks(64 + 2 * len(body), [], pieces)
    pack = Pack("pack-00000-000.safetensors", 192, [(64, bytes(32))] * 3, stored)
    reader = StoredReader(store, "run/x", pack)
    for begin in (64, 128):
        refuses(CorruptCheckpoint, lambda begin=begin: reader.read_into(begin, memoryview(bytearray(64))))  # type: ignore[misc]
    reader.close()
