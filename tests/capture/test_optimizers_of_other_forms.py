"""Optimizers with another form of state than torch's: wrappers, objects, transposed tensors, tensor subclasses."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
import torch
from roundtrip import load, restore, save
from torch import nn
from two_tensors import TwoTensors

from relight.errors import IncompatibleState

Make = Callable[[nn.Module], torch.optim.Optimizer]


def net(seed: int) -> nn.Sequential:
    """Return a small module."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Take one step on a batch that the seed determines."""
    optimizer.zero_grad()
    model(torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    optimizer.step()


class Lookahead(torch.optim.Optimizer):
    """An optimizer with slow weights around another one. The inner state is under its own key."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.n = inner, 0
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Pull the slow weights every second step."""
        self.inner.step()
        self.n += 1
        if self.n % 2 == 0:
            for slow, fast in zip(self.slow, (p for group in self.param_groups for p in group["params"]), strict=True):
                fast.copy_(slow.lerp_(fast, 0.5))

    def state_dict(self) -> dict[str, Any]:
        """Return the inner state and the slow weights."""
        return {"inner": self.inner.state_dict(), "slow": list(self.slow), "n": self.n}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the inner state and the slow weights."""
        self.inner.load_state_dict(state_dict["inner"])
        self.param_groups, self.n = self.inner.param_groups, state_dict["n"]
        for mine, theirs in zip(self.slow, state_dict["slow"], strict=True):
            mine.copy_(theirs)


class Several(torch.optim.Optimizer):
    """A list of optimizers, one for each parameter. Its state is the list of their states."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        super().__init__(parameters, {})
        self.inner = [torch.optim.Adam([parameter], lr=0.05) for parameter in parameters]

    def step(self, closure: Any = None) -> None:
        """Step each optimizer."""
        for optimizer in self.inner:
            optimizer.step()

    def state_dict(self) -> Any:
        """Return the list of states."""
        return [optimizer.state_dict() for optimizer in self.inner]

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore each state."""
        for optimizer, state in zip(self.inner, state_dict, strict=True):
            optimizer.load_state_dict(state)


class Silent(torch.optim.Optimizer):
    """An optimizer around another one that omits the inner state (as SAM does)."""

    def __init__(
        self, parameters: Any, holds: Callable[[Any], Any] = lambda inner: inner, own_loading: bool = False
    ) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.base = torch.optim.AdamW(self.param_groups, lr=0.05)
        self.param_groups = self.base.param_groups
        self.held = holds(self.base)
        if holds(self.base) is not self.base:
            self.__dict__.pop("base")
        self._step = self.base_step

    def base_step(self) -> None:
        """Step the inner optimizer, wherever it is referenced."""
        inner = self.held["one"][0] if isinstance(self.held, dict) else self.held
        inner.step()

    def step(self, closure: Any = None) -> None:
        """Step the inner optimizer."""
        self.base_step()


class LoadsItself(Silent):
    """A SAM-like optimizer with its own loading code."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore as SAM does."""
        super().load_state_dict(state_dict)
        self.held.param_groups = self.param_groups


class HidesInner(torch.optim.Optimizer):
    """An optimizer around another one, in an attribute that is called almost as torch's own ones."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self._optimizer_base = torch.optim.AdamW(self.param_groups, lr=0.05)

    def step(self, closure: Any = None) -> None:
        """Step the inner optimizer."""
        self._optimizer_base.step()


class Side(Enum):
    """Side on which a projector multiplies."""

    LEFT, RIGHT = "l", "r"


class Projector:
    """An object with tensors, as low-rank optimizers keep one for each matrix."""

    def __init__(self, rank: int) -> None:
        self.rank, self.side, self.matrix = rank, Side.LEFT, None
        self.recent: deque[torch.Tensor] = deque(maxlen=2)

    def low(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient in fewer dimensions. The basis is that of the first gradient."""
        if self.matrix is None:
            self.matrix = torch.linalg.svd(gradient, full_matrices=False)[0][:, : self.rank].clone()
        self.recent.append(gradient.norm())
        return self.matrix.T @ gradient


class LowRank(torch.optim.Optimizer):
    """Momentum in the space of a projector (GaLore's kind)."""

    projector: Callable[[int], Any] = Projector

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take one step. Vectors are stepped without a projector."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim != 2:
                    parameter -= 0.1 * parameter.grad
                    continue
                state = self.state[parameter]
                if not state:
                    state["projector"] = type(self).projector(2)
                projector = state["projector"]
                low = projector.low(parameter.grad)
                average = state.setdefault("exp_avg", torch.zeros_like(low))
                average.mul_(0.9).add_(low)
                parameter -= 0.1 * float(projector.recent[0] > 0) * (projector.matrix @ average)


class Other:
    """A projector of another class."""

    def __init__(self, rank: int) -> None:
        self.rank, self.matrix, self.recent = rank, torch.ones(1), [torch.ones(())]

    def low(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient unchanged."""
        self.matrix = torch.eye(gradient.shape[0])
        return gradient


class OtherLowRank(LowRank):
    """A low-rank optimizer with projectors of another class."""

    projector = Other


class Transposed(torch.optim.Optimizer):
    """An optimizer with a transposed matrix. The last bits of its products depend on its layout."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take one step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim == 2:
                    state = self.state[parameter]
                    state["basis"] = torch.empty(parameter.shape[::-1]).T.copy_(parameter.grad)
                parameter -= 0.1 * parameter.grad


class Halves(torch.optim.Optimizer):
    """An optimizer with its momentum in a tensor subclass with two inner tensors, as in torchao."""

    def __init__(self, parameters: Any, scale: float = 2.0) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.scale = scale

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take one step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["average"] = TwoTensors(torch.zeros_like(parameter), torch.zeros_like(parameter), self.scale)
                average = state["average"]
                average.first.mul_(0.9).add_(parameter.grad)
                average.second.add_(average.first)
                parameter -= 0.01 * (average.first + average.second)


OPTIMIZERS: dict[str, Make] = {
    "nested state": lambda model: Lookahead(torch.optim.AdamW(model.parameters(), lr=0.05)),
    "wrapper of a wrapper": lambda model: Lookahead(Lookahead(torch.optim.AdamW(model.parameters(), lr=0.05))),
    "list of inner optimizers": lambda model: Several(list(model.parameters())),
    "inner optimizer left out": lambda model: Silent(model.parameters()),
    "inner optimizer left out, loading of its own": lambda model: LoadsItself(model.parameters()),
    "inner optimizer in an attribute like torch's": lambda model: HidesInner(model.parameters()),
    "inner optimizer in containers": lambda model: Silent(model.parameters(), lambda inner: {"one": [inner]}),
    "objects with tensors": lambda model: LowRank(model.parameters()),
    "tensor subclasses": lambda model: Halves(model.parameters()),
    "transposed tensors": lambda model: Transposed(model.parameters()),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
def test_training_resumes_to_the_bit(make: Make, stepped: bool) -> None:
    """Resume bit-exactly into new objects, stepped before or not, whatever the form of the optimizer's state."""
    straight = net(0)
    optimizer = make(straight)
    for seed in range(7):
        step(straight, optimizer, seed)
    model = net(0)
    optimizer = make(model)
    for seed in range(3):
        step(model, optimizer, seed)
    stored = save({"model": model, "optimizer": optimizer})
    model = net(9)
    optimizer = make(model)
    if stepped:
        step(model, optimizer, 50)
    restore(stored, {"model": model, "optimizer": optimizer})
    for seed in range(3, 7):
        step(model, optimizer, seed)
    assert all(map(torch.equal, model.parameters(), straight.parameters()))


def test_strides_of_state_are_kept() -> None:
    """Restore a transposed tensor with its strides, because kernels may round differently for another layout."""
    model = net(0)
    optimizer = Transposed(model.parameters())
    step(model, optimizer, 0)
    stored = save({"model": model, "optimizer": optimizer})
    fresh = net(1)
    other = Transposed(fresh.parameters())
    restore(stored, {"model": fresh, "optimizer": other})
    for mine, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        if mine.ndim == 2:
            assert other.state[mine]["basis"].stride() == optimizer.state[theirs]["basis"].stride()
            assert torch.equal(other.state[mine]["basis"], optimizer.state[theirs]["basis"])


def test_nested_state_has_names() -> None:
    """Store a nested state in torch's form by parameter names instead of numbers."""
    model = net(0)
    optimizer = Lookahead(torch.optim.AdamW(model.parameters(), lr=0.05))
    step(model, optimizer, 0)
    tree = load(save({"model": model, "optimizer": optimizer}))
    inner = tree["optimizer"]["own"]["inner"]
    assert inner["param_groups"][0]["params"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert set(inner["state"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_another_order_of_parameters_is_refused() -> None:
    """Refuse unnamed state for another order of parameters. Otherwise it would silently be restored into the wrong
    ones."""
    model = net(0)
    optimizer = Lookahead(torch.optim.AdamW(model.parameters(), lr=0.05))
    step(model, optimizer, 0)
    stored = save({"model": model, "optimizer": optimizer})
    fresh = net(1)
    other = Lookahead(torch.optim.AdamW([*fresh.parameters()][::-1], lr=0.05))
    with pytest.raises(IncompatibleState, match="another order"):
        restore(stored, {"model": fresh, "optimizer": other})


def test_state_of_an_older_checkpoint_is_taken() -> None:
    """Restore a state of the optimizer's own form from an older Relight, under "extra" and without groups."""
    model = net(0)
    optimizer = Lookahead(torch.optim.AdamW(model.parameters(), lr=0.05))
    step(model, optimizer, 0)
    given = copy.deepcopy(optimizer.state_dict())
    stored = save({"model": model, "optimizer": {"state": {}, "groups": [], "extra": given}})
    fresh = net(1)
    other = Lookahead(torch.optim.AdamW(fresh.parameters(), lr=0.05))
    restore(stored, {"model": fresh, "optimizer": other})
    assert other.n == 1
    assert all(map(torch.equal, other.slow, given["slow"]))


@pytest.mark.parametrize("stepped", [False, True])
def test_an_object_of_another_class_is_refused(stepped: bool) -> None:
    """Restore an object into a live object of the stored class only. The class in the file is compared, and never
    imported."""
    model = net(0)
    optimizer = LowRank(model.parameters())
    step(model, optimizer, 0)
    stored = save({"model": model, "optimizer": optimizer})
    fresh = net(1)
    other = OtherLowRank(fresh.parameters())
    if stepped:
        step(fresh, other, 0)
    before = [parameter.detach().clone() for parameter in fresh.parameters()]
    with pytest.raises(IncompatibleState, match="Projector"):
        restore(stored, {"model": fresh, "optimizer": other})
    assert all(map(torch.equal, fresh.parameters(), before))


def test_making_objects_leaves_the_optimizer_alone() -> None:
    """Change no parameter, gradient or generator of the process in the trial step that creates objects for a
    restore."""
    model = net(0)
    optimizer = LowRank(model.parameters())
    step(model, optimizer, 0)
    stored = save({"optimizer": optimizer, "model": model}, rng=False)
    fresh = net(1)
    other = LowRank(fresh.parameters())
    weights, drawn = [parameter.detach().clone() for parameter in fresh.parameters()], torch.get_rng_state()
    restore(stored, {"model": fresh, "optimizer": other}, only=["optimizer/*"])
    assert all(map(torch.equal, fresh.parameters(), weights))
    assert all(parameter.grad is None for parameter in fresh.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert other.state[fresh[0].weight]["projector"].side is Side.LEFT


def test_a_subclass_with_other_settings_is_refused() -> None:
    """Refuse inner tensors for a live tensor with other settings, under which they would represent other values."""
    model = net(0)
    optimizer = Halves(model.parameters())
    step(model, optimizer, 0)
    stored = save({"model": model, "optimizer": optimizer})
    fresh = net(1)
    with pytest.raises(IncompatibleState, match="other settings"):
        restore(stored, {"model": fresh, "optimizer": Halves(fresh.parameters(), scale=3.0)})


def test_an_object_that_cannot_be_saved_is_refused_with_a_way_out() -> None:
    """Name what the author can do when an object in an optimizer's state is refused."""
    model = net(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, optimizer, 0)
    optimizer.state[model[0].weight]["odd"] = (value for value in ())
    with pytest.raises(IncompatibleState, match=r"0\.weight/odd.*state_dict\(\)"):
        save({"model": model, "optimizer": optimizer})
