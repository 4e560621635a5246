"""State on an accelerator is saved and restored exactly: dtypes, layouts, optimizers, scalers, generators. ``make device``, ``make gpu``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.device.kind import KIND, keep_busy, marks
from torch import nn

import relight

pytestmark = marks
QUEUE = relight.Limits(when_busy="queue")
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8,
    torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in host memory, in row-major order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()


def values(device: str) -> dict[str, torch.Tensor]:
    """Tensors of every dtype and layout, from a seed."""
    generator = torch.Generator(device).manual_seed(7)
    made = {}
    for dtype in DTYPES:
        raw = torch.randint(
            0,
            2 if dtype == torch.bool else 256,
            (3000 * dtype.itemsize,),
            generator=generator,
            device=device,
            dtype=torch.uint8,
        )
        made[str(dtype)] = raw.view(dtype).reshape(30, 100)
    base = torch.randn(64, 48, generator=generator, device=device)
    return made | {
        "transposed": base.t(),
        "strided": torch.randn(400, 900, generator=generator, device=device)[::3, 1::2],
        "expanded": base[:1].expand(5, 48),
        "scalar": torch.tensor(3.5, device=device),
        "empty": torch.empty(0, 4, device=device),
        "large": torch.randn(3 << 20, generator=generator, device=device),
        "channels last": torch.randn(2, 8, 16, 16, generator=generator, device=device).to(
            memory_format=torch.channels_last
        ),
    }


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("saved_on,restored_on", [(KIND, KIND), (KIND, "cpu"), ("cpu", KIND)])
def test_every_dtype_and_layout(tmp_path: Path, background: bool, saved_on: str, restored_on: str) -> None:
    """The values are equal with and without the agent, and between device and host memory."""
    live = values(saved_on)
    expected = {name: bits(tensor) for name, tensor in live.items()}
    with relight.Checkpointer(tmp_path / "r", background=background, save=None, limits=QUEUE, things=live) as ckpt:
        ckpt.restore()
        assert ckpt.save(0).error is None
    blank = {
        name: torch.zeros_like(tensor, device=restored_on) if tensor.numel() else tensor.to(restored_on)
        for name, tensor in live.items()
    }
    blank["strided"] = torch.zeros(400, 900, device=restored_on)[::3, 1::2]
    blank["expanded"] = torch.zeros(1, 48, device=restored_on).expand(5, 48)
    with relight.Checkpointer(tmp_path / "r", background=background, save=None, limits=QUEUE, things=blank) as ckpt:
        assert ckpt.restore() == 1
        for name, tensor in blank.items():
            assert tensor.device.type == restored_on, name
            assert torch.equal(bits(tensor), expected[name]), name


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW capturable": lambda p: torch.optim.AdamW(p, lr=1e-2, capturable=True),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2, device=KIND), fused=True),
}


def network(seed: int, width: int = 512) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(64, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width)
    ).to(KIND)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all bytes of the state, in order."""
    state = optimizer.state_dict()["state"]
    moments = [value for entry in state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return [bits(tensor) for tensor in (*model.state_dict().values(), *moments)]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_continues_to_the_bit(tmp_path: Path, name: str, scaled: bool) -> None:
    """A save at every step while training continues, a restart, and the same losses, weights and moments as without either."""
    if scaled and name in ("AdamW capturable", "tensor lr"):
        pytest.skip("one scaled case for each kind of step is enough")
    torch.use_deterministic_algorithms(True)

    def run(
        steps: range, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, ckpt: Any = None
    ) -> list[float]:
        losses = []
        for step in steps:
            with torch.autocast(KIND, torch.float16, enabled=scaled):
                loss = model(torch.randn(16, 64, device=KIND)).float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
            if ckpt is not None:
                ckpt.step(step)
        return losses

    def objects(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
        model = network(seed)
        return (
            model,
            OPTIMIZERS[name](model.parameters()),
            torch.amp.GradScaler(KIND, init_scale=2.0**20, growth_interval=3, enabled=scaled),
        )

    try:
        straight = objects(0)
        expected = run(range(12), *straight)
        losses = []
        for seed, end in ((0, 7), (99, 12)):
            live = objects(seed)
            with relight.Checkpointer(
                tmp_path / "r",
                model=live[0],
                optimizer=live[1],
                scaler=live[2],
                save=relight.every(steps=1),
                limits=QUEUE,
            ) as ckpt:
                begin = ckpt.restore()
                losses[begin:] = run(range(begin, end), *live, ckpt)
        assert losses == expected
        for tensor, other in zip(digest(*live[:2]), digest(*straight[:2]), strict=True):
            assert torch.equal(tensor, other)
    finally:
        torch.use_deterministic_algorithms(False)


def test_generators_of_the_device_continue(tmp_path: Path) -> None:
    """The default generator of the device, and one that is a component."""
    own = torch.Generator(KIND).manual_seed(3)
    torch.get_device_module(KIND).manual_seed_all(5)
    with relight.Checkpointer(tmp_path / "r", save=None, limits=QUEUE, state={"n": 1}, noise=own) as ckpt:
        ckpt.restore()
        torch.randn(1000, device=KIND), torch.randn(77, device=KIND, generator=own)
        ckpt.save(0)
        expected = torch.randn(1000, device=KIND).cpu(), torch.randn(1000, device=KIND, generator=own).cpu()
    again = torch.Generator(KIND).manual_seed(99)
    torch.get_device_module(KIND).manual_seed_all(98)
    with relight.Checkpointer(tmp_path / "r", save=None, limits=QUEUE, state={"n": 1}, noise=again) as ckpt:
        assert ckpt.restore() == 1
        assert torch.equal(torch.randn(1000, device=KIND).cpu(), expected[0])
        assert torch.equal(torch.randn(1000, device=KIND, generator=again).cpu(), expected[1])


def test_training_on_a_stream_of_its_own(tmp_path: Path) -> None:
    """Weights are written by kernels that still wait in the trainer's stream, when a save reads them and when a restore writes them."""
    stream = torch.Stream(device=KIND)
    for background in (True, False):
        with torch.get_device_module(KIND).stream(stream):
            weight = torch.zeros(8 << 20, device=KIND)
            keep_busy()
            weight.add_(1)
            with relight.Checkpointer(
                tmp_path / f"{background}", save=None, background=background, limits=QUEUE, weight=weight
            ) as ckpt:
                ckpt.restore()
                assert ckpt.save(0).error is None
            target = torch.zeros(8 << 20, device=KIND)
            keep_busy()
            target.fill_(5)
            with relight.Checkpointer(
                tmp_path / f"{background}", save=None, background=background, limits=QUEUE, weight=target
            ) as ckpt:
                assert ckpt.restore() == 1
            assert bool((target == 1).all()), background


def test_a_write_outside_an_optimizer_is_refused(tmp_path: Path) -> None:
    """If training changes weights before the next step, the save fails. The next save copies before it returns."""
    model = nn.Linear(4096, 4096).to(KIND)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with relight.Checkpointer(tmp_path / "r", save=None, model=model, optimizer=optimizer, limits=QUEUE) as ckpt:
        ckpt.restore()
        ckpt.save(0)  # the agent is started, and memory is allocated
        keep_busy()  # the copies wait for this kernel
        save = ckpt.save(1, block=False)
        with torch.no_grad():
            model.weight.mul_(2)
        optimizer.step()
        with pytest.raises(relight.RelightError, match="wrote to tensors"):
            save.wait(60)
        after = ckpt.save(2, block=False)
        expected = bits(model.weight)
        with torch.no_grad():
            model.weight.mul_(2)
        after.wait(60)
    assert torch.equal(bits(relight.load(tmp_path / "r", 2)["model"]["weight"]), expected)


def test_tensors_larger_than_what_is_pinned_at_once(tmp_path: Path) -> None:
    """A tensor of 700 MiB between small ones is copied in pieces."""
    weights = [torch.randn(size, device=KIND) for size in (1000, 700 << 18, 5, 90 << 18)]
    with relight.Checkpointer(tmp_path / "r", save=None, limits=QUEUE, weights=weights) as ckpt:
        ckpt.restore()
        assert ckpt.save(0).error is None
    target = [torch.zeros_like(tensor) for tensor in weights]
    with relight.Checkpointer(tmp_path / "r", save=None, limits=QUEUE, weights=target) as ckpt:
        assert ckpt.restore() == 1
    assert all(torch.equal(tensor, other) for tensor, other in zip(target, weights, strict=True))
