"""Cost of saves of models with few changed values: adapters over a frozen base, experts, rows of an embedding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import relight
from relight.catalog.run import Run
from relight.store import open_bytes

SAVES = 6
OPTIONS: dict[str, Any] = {
    "background": True,
    "limits": relight.Limits(when_busy="queue"),
    "keep": relight.keep(last=50),
}


def adapters() -> tuple[dict[str, Any], Callable[[], int]]:
    """A frozen base of 48 MB, and 1 % of it to train, with AdamW."""
    base = nn.Linear(2000, 6000, bias=False).requires_grad_(False)
    rank = 15
    down, up = nn.Linear(2000, rank, bias=False), nn.Linear(rank, 6000, bias=False)
    model = nn.ModuleList([base, down, up])
    optimizer = torch.optim.AdamW([*down.parameters(), *up.parameters()])

    def step() -> int:
        optimizer.zero_grad()
        x = torch.randn(8, 2000)
        (base(x) + up(down(x))).square().mean().backward()
        optimizer.step()
        return 3 * sum(p.numel() * 4 for p in (*down.parameters(), *up.parameters()))

    return {"model": model, "optimizer": optimizer}, step


def experts() -> tuple[dict[str, Any], Callable[[], int]]:
    """Return eight experts of 4 MiB with AdamW's moments. Two of them receive samples in each step."""
    model = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(8))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():  # all of them have moments
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    turn = 0

    def step() -> int:
        nonlocal turn
        optimizer.zero_grad(set_to_none=True)
        for number in (turn % 8, (turn + 3) % 8):
            model[number](torch.randn(8, 1024)).square().mean().backward()
        turn += 1
        optimizer.step()
        return 2 * 3 * 1024 * 1024 * 4

    return {"model": model, "optimizer": optimizer}, step


def rows() -> tuple[dict[str, Any], Callable[[], int]]:
    """Return a table of 100,000 rows with SparseAdam's moments. Each step uses a hundredth of the rows."""
    table = nn.Embedding(100_000, 64, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=1e-2)
    table(torch.arange(100_000)).sum().backward()
    optimizer.step()

    def step() -> int:
        optimizer.zero_grad()
        table(torch.randperm(100_000)[:1000]).square().sum().backward()
        optimizer.step()
        return 3 * 1000 * 64 * 4

    return {"table": table, "optimizer": optimizer}, step


CASES = {
    "adapters": (adapters, relight.Compact(), 0.03, None),
    "experts": (experts, relight.Compact(), None, 1.1),
    "rows": (rows, relight.Compact(codecs="always", full_every=50), None, 1.1),
}


@pytest.mark.parametrize("name", CASES)
def test_little_is_stored_of_what_is_little_touched(tmp_path: Path, name: str) -> None:
    """Write at most a share of the state, or of what changed. Each save restores bit-exactly."""
    make, compact, of_state, of_changed = CASES[name]
    torch.manual_seed(0)
    parts, step = make()
    digests: dict[str, torch.Tensor] = {}
    changed = 0

    def values() -> torch.Tensor:
        first = next(iter(parts.values()))
        return torch.cat([p.detach().flatten() for p in first.parameters()]).clone()

    with relight.Checkpointer(
        tmp_path / "s" / "run", save=relight.every(steps=1), compact=compact, **parts, **OPTIONS
    ) as ckpt:
        ckpt.restore()
        for number in range(SAVES):
            changed = step()
            save = ckpt.save(number)
            assert save.id
            digests[save.id] = values()
    checkpoints = relight.open(tmp_path / "s" / "run").checkpoints()
    assert len(checkpoints) == SAVES
    stored = [checkpoint.body.new_bytes for checkpoint in checkpoints[3:]]
    if of_state is not None:
        assert max(stored) <= of_state * checkpoints[-1].body.logical_bytes, (
            stored,
            checkpoints[-1].body.logical_bytes,
        )
    if of_changed is not None:
        assert max(stored) <= of_changed * changed, (stored, changed)
    for checkpoint in (checkpoints[0], checkpoints[-1]):
        loaded = relight.load(tmp_path / "s" / "run", checkpoint.id)
        first = loaded[next(iter(parts))]
        flat = torch.cat([torch.as_tensor(value).flatten() for value in first.values()])
        assert torch.equal(flat, digests[checkpoint.id])


def test_a_chain_is_read_from_three_quarters_more_at_most(tmp_path: Path) -> None:
    """Store ten saves of slightly changed values as differences. Reading each chunk needs at most 1.75 times its bytes,
    and the saves are smaller than without differences."""
    torch.manual_seed(0)
    x = torch.randn(1_000_000)
    compact = relight.Compact(codecs="always", full_every=50)
    with relight.Checkpointer(tmp_path / "s" / "run", x=x, compact=compact, **OPTIONS) as ckpt:
        ckpt.restore()
        for number in range(11):
            x += 1e-4 * torch.randn(1_000_000)
            ckpt.save(number)
    run = Run(open_bytes(tmp_path / "s"), "run")
    longest = 0
    for checkpoint in run.history().live:
        for pack in run.open(checkpoint).parts[0].packs:
            assert pack.stored is not None
            for (length, _), piece in zip(pack.chunks, pack.stored.pieces, strict=True):
                assert piece.reach <= 1.75 * length
                longest = max(longest, len(list(piece.links())))
    assert longest > 1
    sizes = [checkpoint.body.new_bytes for checkpoint in run.history().live]
    assert sum(sizes[1:]) < 0.95 * 10 * sizes[0]
