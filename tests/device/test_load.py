"""``relight.load(device=)`` puts tensors on an accelerator, through page-locked memory, and generators' states on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.device.kind import KIND, keep_busy, marks
from tests.device.test_state import bits, values

import relight
from relight.capture import tensors
from relight.errors import ConfigError

pytestmark = marks


def saved(path: Path) -> dict[str, torch.Tensor]:
    """Save tensors of every dtype, a module with its optimizer, and a generator. Return the tensors' bytes."""
    torch.manual_seed(0)
    things, model = values("cpu"), torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(64)).sum().backward()
    optimizer.step()
    generator = torch.Generator().manual_seed(3)
    with relight.Checkpointer(
        path, background=False, save=None, things=things, model=model, optimizer=optimizer, draws=generator
    ) as ckpt:
        ckpt.restore()
        assert ckpt.save(0).error is None
    return {name: bits(tensor) for name, tensor in things.items()}


@pytest.mark.parametrize("lazy", [False, True])
def test_every_tensor_lands_on_the_device(tmp_path: Path, lazy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of every dtype and layout are as saved. Bytes go through page-locked memory."""
    expected, locked = saved(tmp_path / "r"), list[int]()
    page_locked = tensors._page_locked
    monkeypatch.setattr(tensors, "_page_locked", lambda n, dtype: locked.append(n) or page_locked(n, dtype))
    keep_busy()
    if lazy:
        with relight.load(tmp_path / "r", lazy=True, device=KIND) as checkpoint:
            things = {name: checkpoint.get_tensor(f"things/{name}") for name in expected}
            row = checkpoint.get_slice("things/large")[1 << 20 : 2 << 20]
            block = checkpoint.get_slice("things/strided")[5:9, 3:7]
        assert row.device.type == block.device.type == KIND
        assert torch.equal(row.cpu(), things["large"][1 << 20 : 2 << 20].cpu())
        assert torch.equal(block.cpu(), things["strided"][5:9, 3:7].cpu())
    else:
        loaded = relight.load(tmp_path / "r", device=f"{KIND}:0")
        things = loaded["things"]
        assert loaded["model"]["weight"].device == torch.device(KIND, 0)
        torch.Generator().set_state(
            loaded["draws"]["state"] if "state" in loaded["draws"] else next(iter(loaded["draws"].values()))
        )
    assert all(tensor.device.type == KIND for tensor in things.values())
    assert {name: bits(tensor).tolist() for name, tensor in things.items()} == {
        name: value.tolist() for name, value in expected.items()
    }
    assert locked


def test_mmap_and_a_device_do_not_go_together(tmp_path: Path) -> None:
    """Mappings are on the CPU."""
    saved(tmp_path / "r")
    with pytest.raises(ConfigError, match="mmap"):
        relight.load(tmp_path / "r", mmap=True, device=KIND)


@pytest.mark.parametrize("lazy", [False, True])
def test_tensors_are_cast_on_their_way_to_the_device(tmp_path: Path, lazy: bool) -> None:
    """With ``dtype=``, floating-point tensors have the values of ``Tensor.to``, on the device; others are unchanged."""
    saved(tmp_path / "r")
    stored = relight.load(tmp_path / "r")
    keep_busy()
    if lazy:
        with relight.load(tmp_path / "r", lazy=True, device=KIND, dtype="bfloat16") as checkpoint:
            weight, large = checkpoint.get_tensor("model/weight"), checkpoint.get_slice("things/large")[: 1 << 20]
    else:
        loaded = relight.load(tmp_path / "r", device=KIND, dtype="bfloat16")
        weight, large = loaded["model"]["weight"], loaded["things"]["large"][: 1 << 20]
        for name, value in stored["things"].items():
            wanted = torch.bfloat16 if value.is_floating_point() and not value.is_quantized else value.dtype
            assert (loaded["things"][name].dtype, loaded["things"][name].device.type) == (wanted, KIND), name
    assert weight.device.type == large.device.type == KIND
    assert torch.equal(weight.cpu(), stored["model"]["weight"].bfloat16())
    assert torch.equal(large.cpu(), stored["things"]["large"][: 1 << 20].bfloat16())
