"""``compact=``: a run with a frozen base stores only what is trained, and resumes bit-exactly. Urgent saves are stored
raw."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import relight

QUEUE = relight.Limits(when_busy="queue")


class Adapted(nn.Module):
    """A frozen layer of 4 MB, and a small trained adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(1024, 1024)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(1024, 4, bias=False), nn.Linear(4, 1024, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of base and adapter."""
        return self.base(x) + self.up(self.down(x))


def make(seed: int = 0) -> tuple[Adapted, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Adapted()
    return model, torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-3)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int = 1024) -> float:
    loss = model(torch.randn(4, width)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def train(run: str, seed: int, until: int, background: bool) -> list[float]:
    """Return one attempt's losses."""
    model, optimizer = make(seed)
    every, compact = relight.every(steps=1), relight.Compact(codecs="never")
    with relight.Checkpointer(
        run, model=model, optimizer=optimizer, save=every, compact=compact, background=background, limits=QUEUE
    ) as ckpt:
        losses = []
        for step in range(ckpt.restore(), until):
            losses.append(one_step(model, optimizer))
            ckpt.step(step)
        return losses


def rows(run: str) -> list[Any]:
    """Return the COMMIT record of each checkpoint."""
    return [checkpoint.body for checkpoint in relight.open(run).checkpoints()]


@pytest.mark.parametrize("background", [False, True])
def test_frozen_tensors_are_stored_once(background: bool, tmp_path: Path) -> None:
    """Write only what is trained from the second save on, also in the next attempt. A resume is bit-exact."""
    run = str(tmp_path / "store" / "run")
    model, optimizer = make()
    straight = [one_step(model, optimizer) for _ in range(10)]
    losses = train(run, 0, 6, background) + train(run, 7, 10, background)
    assert losses == straight
    bodies = rows(run)
    assert [body.step for body in bodies] == list(range(10))
    assert all(findings == [] for _, findings in relight.open(run).verify())
    for number, body in enumerate(bodies):
        own = number < 1
        assert (body.requires == []) is own, number
        assert body.new_bytes > body.logical_bytes if own else body.new_bytes < 0.06 * body.logical_bytes, number
    assert {id_ for body in bodies[1:] for id_ in body.requires} == {bodies[0].id}


def test_urgent_saves_are_stored_uncoded(tmp_path: Path) -> None:
    """Skip deduplication and coding in a signal's save. The next save uses both again."""
    run = str(tmp_path / "store" / "run")
    model, optimizer = make()
    with relight.Checkpointer(
        run, save=None, model=model, optimizer=optimizer, compact=relight.Compact(codecs="always")
    ) as ckpt:
        ckpt.restore()
        for step in range(5):
            one_step(model, optimizer)
            if step == 3:
                signal.raise_signal(signal.SIGUSR1)
                ckpt.step(step)
            else:
                ckpt.save(step)
    first, _, third, urgent, after = rows(run)
    assert first.new_bytes < 0.9 * first.logical_bytes
    assert third.requires and after.requires
    assert urgent.requires == [] and urgent.new_bytes > urgent.logical_bytes


def test_differences_within_a_window(tmp_path: Path) -> None:
    """With ``full_every``, code a save as differences from the previous one, which is still in the agent's memory. A
    chain ends at a full save. Each checkpoint restores bit-exactly, and a run can resume in the middle of a chain."""
    run = str(tmp_path / "store" / "run")
    compact = relight.Compact(codecs="always", full_every=4)

    def attempt(seed: int, until: int) -> list[float]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        losses = []
        with relight.Checkpointer(
            run, save=None, model=model, optimizer=optimizer, compact=compact, background=True, limits=QUEUE
        ) as ckpt:
            for step in range(ckpt.restore(), until):
                losses.append(one_step(model, optimizer, 256))
                ckpt.save(step)  # wait until durable, so that the next save finds it in the other slot
                expected[step] = {name: value.clone() for name, value in model.state_dict().items()}
        return losses

    expected: dict[int, dict[str, torch.Tensor]] = {}
    straight = attempt(0, 7)
    store = relight.open(run)
    assert [findings for _, findings in store.verify()] == [[]] * 7
    bodies = rows(run)
    assert [len(body.requires) for body in bodies] == [0, 1, 2, 3, 0, 1, 2]
    for body in bodies:
        # A chunk with two differences in a row would exceed the bytes that a reader may read for it.
        assert body.new_bytes < (0.75 if body.step % 4 == 1 else 0.9) * body.logical_bytes
        loaded = relight.load(run, body.id)["model"]
        assert all(torch.equal(loaded[name], value) for name, value in expected[body.step].items()), body.step
    run = str(tmp_path / "store" / "again")
    assert attempt(0, 3) + attempt(9, 7) == straight


def test_a_damaged_link_is_found(tmp_path: Path) -> None:
    """Skip every checkpoint that depends on the damaged one. A restore takes the nearest one that does not."""
    run = tmp_path / "store" / "run"
    torch.manual_seed(0)
    model = nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    compact, weights = relight.Compact(codecs="always", full_every=5), []
    with relight.Checkpointer(
        run, save=None, model=model, optimizer=optimizer, compact=compact, background=True, limits=QUEUE
    ) as ckpt:
        ckpt.restore()
        for step in range(5):
            one_step(model, optimizer, 512)
            ckpt.save(step)
            weights.append(model.weight.detach().clone())
    assert [len(body.requires) for body in rows(str(run))] == [0, 1, 2, 3, 4]
    for step in (4, 2, 1):
        (file,) = run.glob(f"{step:010d}-*/*.chunks")
        data = bytearray(file.read_bytes())
        for offset in range(0, len(data), 1000):  # damage each chunk
            data[offset] ^= 16
        file.write_bytes(data)
        wrong = [bool(findings) for _, findings in relight.open(run).verify()]
        assert wrong == [False] * step + [True] * (5 - step)
        assert torch.equal(relight.load(run)["model"]["weight"], weights[step - 1])


def test_anything_else_is_refused(tmp_path: Path) -> None:
    """Accept only Compact(…), True, False or None."""
    with pytest.raises(relight.ConfigError, match="compact="):
        relight.Checkpointer(tmp_path / "run", save=None, model=nn.Linear(2, 2), compact="zstd")  # type: ignore[arg-type]
