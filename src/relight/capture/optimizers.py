"""Optimizers: state by parameter name, never by index."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from relight.capture.kinds import MODULE, kind_of, named_parameters
from relight.capture.walk import Walker
from relight.format.tree import join_path

Optimizer = torch.optim.Optimizer


def own_parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """Every parameter it holds, in its order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def parameter_names(optimizer: Optimizer, components: Mapping[str, object]) -> dict[int, str]:
    """``id(parameter) → name``: from the modules among the components, from tensors among the plain ones, from the groups themselves.

    Where parameters of several modules meet in one optimizer, names begin with the component's.
    """
    wanted = {id(parameter) for parameter in own_parameters(optimizer)}
    homes: dict[str, dict[int, str]] = {}
    for component, value in components.items():
        if kind_of(value) == MODULE:
            found: dict[int, str] = {}
            for name, parameter in named_parameters(value, repeats=True):  # type: ignore[arg-type]
                if id(parameter) in wanted:
                    found.setdefault(id(parameter), name)
            if found:
                homes[component] = found
    names: dict[int, str] = {}
    for component, found in homes.items():
        for key, name in found.items():
            names.setdefault(key, f"{component}.{name}" if len(homes) > 1 else name)
    for component, value in components.items():
        _loose(value, component, wanted, names)
    for group in optimizer.param_groups:
        for parameter, name in zip(group["params"], group.get("param_names") or (), strict=False):
            names.setdefault(id(parameter), str(name))
    return names


def _loose(value: object, path: str, wanted: set[int], names: dict[int, str]) -> None:
    if isinstance(value, torch.Tensor):
        if id(value) in wanted:
            names.setdefault(id(value), path)
    elif isinstance(value, dict):
        for key, item in value.items():
            _loose(item, join_path(path, key), wanted, names)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _loose(item, join_path(path, index, sequence=True), wanted, names)


def is_custom(optimizer: Optimizer) -> bool:
    """Whether its class or a hook has its own idea of ``state_dict``: then only through it."""
    hooks = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks",
             "_optimizer_load_state_dict_post_hooks")  # fmt: skip
    if any(getattr(optimizer, name, None) for name in hooks):
        return True
    return type(optimizer).state_dict is not Optimizer.state_dict or type(optimizer).load_state_dict is not Optimizer.load_state_dict


class Moments(NamedTuple):
    """The large part of an optimizer's node: ``{name: {key: value}}``, and each group's parameters by name."""

    state: Any
    params: list[Any]


def capture_moments(walker: Walker, optimizer: Optimizer, path: str, names: Mapping[int, str]) -> Moments | None:
    """What an optimizer without ideas of its own keeps for its parameters; None if they have no names."""
    nameless = [position for position, p in enumerate(own_parameters(optimizer)) if id(p) not in names]
    if nameless:
        walker.refuse(
            path,
            f"{len(nameless)} of its parameters belong to no component (the first is number {nameless[0]}): "
            "give the Checkpointer the module they are in, or build the optimizer with named_parameters()",
        )
        return None
    params = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    state: dict[str, Any] = {}
    if is_custom(optimizer):
        return Moments(state, params)
    for parameter in own_parameters(optimizer):
        if parameter in optimizer.state:
            name = names[id(parameter)]
            state[name] = walker.value(dict(optimizer.state[parameter]), join_path(f"{path}/state", name), "optim")
    return Moments(state, params)


def capture_optimizer(walker: Walker, optimizer: Optimizer, path: str, moments: Moments) -> Any:
    """``{"state": {name: {key: value}}, "groups": [{…, "params": [names]}], "extra": {…}}``."""
    if is_custom(optimizer):
        return _capture_custom(walker, optimizer, path, moments.params)
    groups = [
        {
            **walker.value({key: item for key, item in group.items() if key not in ("params", "param_names")}, f"{path}/groups/{i}"),
            "params": params,
        }
        for i, (group, params) in enumerate(zip(optimizer.param_groups, moments.params, strict=True))
    ]
    extra = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    return {"state": moments.state, "groups": groups, "extra": walker.value(extra, f"{path}/extra", "optim")}


def _capture_custom(walker: Walker, optimizer: Optimizer, path: str, params: list[Any]) -> Any:
    saved = dict(optimizer.state_dict())
    order = [name for group in params for name in group]
    state, groups = saved.pop("state", {}), saved.pop("param_groups", [])
    return {
        "state": walker.value({_named(key, order): value for key, value in state.items()}, f"{path}/state", "optim"),
        "groups": walker.value(
            [{**group, "params": [_named(index, order) for index in group.get("params", ())]} for group in groups], f"{path}/groups"
        ),
        "extra": walker.value(saved, f"{path}/extra", "optim"),
    }


def load_custom(optimizer: Optimizer, saved: Mapping[str, Any], names: Mapping[int, str]) -> None:
    """Give ``_capture_custom``'s tree back through the class's own ``load_state_dict``."""
    # torch gives the nth number of a group to the group's nth live parameter: numbers go in live order, whatever the stored one was.
    numbers = {names[id(parameter)]: index for index, parameter in enumerate(own_parameters(optimizer))}
    groups = []
    for live, group in zip(optimizer.param_groups, saved["groups"], strict=True):
        groups.append({**group, "params": [numbers[names[id(parameter)]] for parameter in live["params"]]})
    optimizer.load_state_dict(
        {
            **saved["extra"],
            "state": {numbers.get(key, key): value for key, value in saved["state"].items()},
            "param_groups": groups,
        }
    )


def _named(key: Any, order: list[str]) -> Any:
    return order[key] if isinstance(key, int) and 0 <= key < len(order) else key


def place_like(parameter: torch.Tensor, group: Mapping[str, Any], key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory for a state tensor the optimizer has not made yet: where and how the optimizer itself would have it.

    The rule for ``step`` is torch's (``Optimizer._process_value_according_to_param_policy``): on the parameter's device if the group is
    capturable or fused, else on the host.
    """
    if key == "step" and not (group.get("capturable") or group.get("fused")):
        return torch.empty(shape, dtype=dtype)
    if shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device=parameter.device)


_steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()


def steps_of(optimizer: Optimizer) -> int:
    """Steps since this was first asked: fused kernels move no version counter, and without state (SGD) leave no other trace."""
    if optimizer not in _steps:
        _steps[optimizer] = 0
        optimizer.register_step_post_hook(_count_step)
    return _steps[optimizer]


def _count_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _steps[optimizer] = _steps.get(optimizer, 0) + 1
