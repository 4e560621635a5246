"""Modules with loading code that allocates: observers, lazy layers, buffers that begin as None."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from roundtrip import restore, save
from torch import nn
from two_tensors import TwoTensors

from relight.capture import capture, mismatches
from relight.errors import IncompatibleState

warnings.filterwarnings("ignore")


class Range(nn.Module):
    """An observer of the range of values, empty at first. Loading resizes its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor([]))

    def see(self, x: torch.Tensor) -> None:
        """Widen the range."""
        self.low = x.amin(1)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        if f"{prefix}low" in state_dict:
            self.low.resize_(state_dict[f"{prefix}low"].shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Hooked(nn.Module):
    """An observer that resizes its buffers in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor([]))
        self.register_load_state_dict_pre_hook(self._room)

    def see(self, x: torch.Tensor) -> None:
        """Widen the range."""
        self.low = x.amin(1)

    def _room(self, module: nn.Module, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.low.resize_(state_dict[f"{prefix}low"].shape)


class NoneAtFirst(nn.Module):
    """A module with a registered buffer that is None until the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", None)

    def see(self, x: torch.Tensor) -> None:
        """Keep the range."""
        self.low = x.amin(1)


class Gains(nn.Module):
    """A module that makes its buffer at the first batch, and by loading."""

    def see(self, x: torch.Tensor) -> None:
        """Keep the range."""
        self.register_buffer("low", x.amin(1))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        if f"{prefix}low" in state_dict and not hasattr(self, "low"):
            self.register_buffer("low", torch.empty_like(state_dict[f"{prefix}low"]))
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Narrow(Range):
    """A module with its own loading code that allocates nothing."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        nn.Module._load_from_state_dict(self, state_dict, prefix, *rest)


def around(watch: nn.Module) -> nn.Sequential:
    """Return a network that contains the module."""
    return nn.Sequential(nn.Linear(3, 4), watch)


@pytest.mark.parametrize("kind", [Range, Hooked, NoneAtFirst, Gains])
def test_a_buffer_that_grew_is_restored(kind: Any) -> None:
    """Restore a buffer that the loading code enlarges, into a module that has seen no data yet."""
    model = around(kind())
    model[1].see(model[0].weight.detach())
    fresh = around(kind())
    restore(save({"model": model}), {"model": fresh})
    assert torch.equal(fresh[1].low, model[1].low)
    assert torch.equal(fresh[0].weight, model[0].weight)


def test_loading_code_that_makes_no_room_is_found_before_a_byte_is_read() -> None:
    """Try the loading code on a copy without memory, so that a refusal leaves the live module unchanged."""
    model = around(Range())
    model[1].see(model[0].weight.detach())
    fresh = around(Narrow())
    before = fresh[0].weight.detach().clone()
    with pytest.raises(IncompatibleState, match=r"1\.low"):
        restore(save({"model": model}), {"model": fresh})
    assert torch.equal(fresh[0].weight, before)
    assert fresh[1].low.shape == (0,)


def lazy() -> nn.Sequential:
    """Return a network of layers that get their shapes from the first batch."""
    return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train some steps, and return the losses."""
    losses = []
    for seed in steps:
        loss = model(torch.randn(6, 5, generator=torch.Generator().manual_seed(seed))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_lazy_layers_are_restored_with_their_optimizer() -> None:
    """Give the stored shapes to lazy layers that have seen no data, and resume training bit for bit."""
    torch.manual_seed(0)
    model = lazy()
    model(torch.randn(6, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, range(3))
    stored = save({"model": model, "optimizer": optimizer})
    straight = train(model, optimizer, range(3, 6))
    fresh = lazy()
    other = torch.optim.AdamW(fresh.parameters(), lr=0.1)
    restore(stored, {"model": fresh, "optimizer": other})
    assert train(fresh, other, range(3, 6)) == straight


def test_a_refused_restore_leaves_layers_lazy() -> None:
    """Leave lazy parameters without a shape after a refused restore, so that the first batch can give them one."""
    model = lazy()
    model(torch.randn(6, 5))
    fresh = nn.Sequential(*lazy(), nn.Linear(2, 2))
    with pytest.raises(IncompatibleState, match=r"4\.weight"):
        restore(save({"model": model}), {"model": fresh})
    assert nn.parameter.is_lazy(fresh[0].weight)
    assert fresh(torch.randn(6, 7)).shape == (6, 2)


def test_a_lazy_layer_that_is_not_stored_is_named() -> None:
    """Refuse a lazy parameter without a stored one, with the advice to run a forward pass."""
    stored = save({"model": nn.Sequential(nn.Linear(3, 3))})
    with pytest.raises(IncompatibleState, match="run a forward pass"):
        restore(stored, {"model": nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(2))})


class Converted(nn.Module):
    """A module with a weight of a tensor subclass."""

    def __init__(self, value: float, scale: float = 2.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            TwoTensors(torch.full((2, 3), value), torch.full((2, 3), value + 1), scale), requires_grad=False
        )


def test_inner_tensors_of_a_subclass_are_restored_in_place() -> None:
    """Save a parameter with inner tensors by these, and restore them into those of the live parameter."""
    model, fresh = Converted(1.0), Converted(5.0)
    stored = save({"model": model})
    assert [tensor.name for tensor in stored.tensors[:2]] == ["model/weight/first", "model/weight/second"]
    kept = fresh.weight.first
    restore(stored, {"model": fresh})
    assert fresh.weight.first is kept
    assert torch.equal(fresh.weight.first, model.weight.first)
    assert torch.equal(fresh.weight.second, model.weight.second)


@pytest.mark.parametrize(
    "fresh", [nn.Linear(3, 2, bias=False), Converted(0.0, scale=3.0)], ids=["plain", "other settings"]
)
def test_a_subclass_goes_into_its_like_only(fresh: nn.Module) -> None:
    """Refuse inner tensors for a plain tensor, and for a subclass with other settings."""
    with pytest.raises(IncompatibleState, match="TwoTensors"):
        restore(save({"model": Converted(1.0)}), {"model": fresh})


def test_a_plain_tensor_does_not_go_into_a_subclass() -> None:
    """Refuse a plain stored tensor for a converted one, with the order that works."""
    with pytest.raises(IncompatibleState, match="load it before it is converted"):
        restore(save({"model": nn.Linear(3, 2, bias=False)}), {"model": Converted(0.0)})


class Gives(nn.Module):
    """A module with an entry in state_dict that load_state_dict refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}norm"] = self.weight.detach().norm()


def test_an_entry_that_loading_does_not_take_is_found_without_a_restore() -> None:
    """Detect such an entry by a plan of the restore, without a change."""
    model = nn.Sequential(Gives())
    (mismatch,) = mismatches({"model": model}, capture({"model": model}))
    assert "model/0.norm" in mismatch
    assert "_load_from_state_dict" in mismatch


@pytest.mark.parametrize(
    "model",
    [around(Range()), lazy(), Converted(1.0), around(NoneAtFirst())],
    ids=["observer", "lazy", "subclass", "none"],
)
def test_a_restorable_module_is_not_refused(model: nn.Module) -> None:
    """Accept, at the first save, every module that can be restored."""
    if isinstance(model, nn.Sequential):
        model(torch.randn(6, 5)) if len(model) == 4 else model[1].see(torch.randn(4, 4))
    assert mismatches({"model": model}, capture({"model": model})) == []


class Packed(nn.Parameter):
    """A parameter with its own memory and a scale, as in bitsandbytes."""

    scale: torch.Tensor


class PackedLinear(nn.Module):
    """A module that saves the scale in addition to the weight, without loading code for it."""

    def __init__(self, value: int, scale: float, blocks: int = 2) -> None:
        super().__init__()
        self.weight = torch.Tensor._make_subclass(Packed, torch.full((4,), value, dtype=torch.uint8), False)
        self.weight.scale = torch.full((2,), scale)
        self.blocks = blocks

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.scale"] = self.weight.scale
        destination[f"{prefix}weight.settings"] = torch.tensor([self.blocks])


def test_a_packed_parameter_is_restored_with_what_it_holds() -> None:
    """Restore such a parameter in place, and its scale too."""
    model, fresh = nn.Sequential(PackedLinear(7, 3.0)), nn.Sequential(PackedLinear(1, 1.0))
    assert mismatches({"model": model}, capture({"model": model})) == []
    restore(save({"model": model}), {"model": fresh})
    assert type(fresh[0].weight) is Packed
    assert fresh[0].weight.tolist() == [7] * 4
    assert fresh[0].weight.scale.tolist() == [3.0] * 2


def test_a_packed_parameter_with_other_settings_is_refused() -> None:
    """Refuse a packed parameter if the live one has other settings."""
    with pytest.raises(IncompatibleState, match="other settings"):
        restore(save({"model": PackedLinear(7, 3.0)}), {"model": PackedLinear(1, 1.0, blocks=4)})
