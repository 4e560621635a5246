"""State of optimizers with their own form of ``state_dict``, and of optimizers inside other optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from relight.capture.kinds import memory_in
from relight.capture.tensors import identity
from relight.torch_private.optimizers import OPTIMIZER_HOOKS

Optimizer = torch.optim.Optimizer

OWN = "own"
"""Key of an optimizer's node: the whole ``state_dict``, if it does not have torch's form."""
INNER = "inner"
"""Key of an optimizer's node: the nodes of optimizers inside it that its ``state_dict`` leaves out, by attribute."""
_TORCHS = OPTIMIZER_HOOKS | {"state", "param_groups", "defaults"}
DEPTH = 4
"""Levels of attributes and containers in which inner optimizers are searched for."""


def has_torchs_form(optimizer: Optimizer, saved: Any) -> bool:
    """Return whether a ``state_dict`` numbers the optimizer's parameters, group by group, as torch's own does."""
    return (
        isinstance(saved, Mapping)
        and _is_torchs(saved)
        and _sizes(saved["param_groups"]) == _sizes(optimizer.param_groups)
    )


def _is_torchs(saved: Mapping[Any, Any]) -> bool:
    state, groups = saved.get("state"), saved.get("param_groups")
    if not isinstance(state, Mapping) or not isinstance(groups, list):
        return False
    if not groups or not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in groups
    ):
        return False
    numbers = [number for group in groups for number in group["params"]]
    return all(type(number) is int for number in numbers) and sorted(numbers) == list(range(len(numbers)))


def _sizes(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def with_names(saved: Any, params: Sequence[Sequence[str]]) -> Any:
    """Return a ``state_dict`` of the optimizer's own form with names instead of numbers of parameters.

    Only parts that have torch's form for the same groups are changed.
    """
    return _renamed(saved, [len(group) for group in params], [name for group in params for name in group])


def _renamed(value: Any, sizes: list[int], order: list[str]) -> Any:
    if isinstance(value, Mapping):
        if _is_torchs(value) and _sizes(value["param_groups"]) == sizes and all(map(_is_number, value["state"])):
            groups = [
                {**group, "params": [order[number] for number in group["params"]]} for group in value["param_groups"]
            ]
            state = {order[key] if key < len(order) else key: entry for key, entry in value["state"].items()}
            return {**value, "state": state, "param_groups": groups}
        return {key: _renamed(entry, sizes, order) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_renamed(item, sizes, order) for item in value)
    return value


def _is_number(key: Any) -> bool:
    return type(key) is int


def with_numbers(saved: Any, order: Sequence[str]) -> Any:
    """Invert ``with_names``, for an optimizer that holds its parameters in this order."""
    numbers = {name: number for number, name in enumerate(order)}

    def numbered(value: Any) -> Any:
        if isinstance(value, dict):
            groups = value.get("param_groups")
            if isinstance(value.get("state"), dict) and isinstance(groups, list) and _is_named(groups, numbers):
                groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups]
                return {
                    **value,
                    "state": {numbers.get(key, key): entry for key, entry in value["state"].items()},
                    "param_groups": groups,
                }
            return {key: numbered(entry) for key, entry in value.items()}
        if type(value) in (list, tuple):
            return type(value)(numbered(item) for item in value)
        return value

    return numbered(saved)


def _is_named(groups: list[Any], numbers: Mapping[str, int]) -> bool:
    named = [
        group["params"]
        for group in groups
        if isinstance(group, dict) and isinstance(group.get("params"), (list, tuple))
    ]
    return (
        len(named) == len(groups)
        and any(named)
        and all(type(name) is str and name in numbers for group in named for name in group)
    )


def own_form_of(node: Mapping[str, Any]) -> Any:
    """Return the ``state_dict`` of the optimizer's own form in a node, or None if the node has torch's form."""
    if OWN in node:
        return node[OWN]
    # Older checkpoints have such a state below "extra", and no groups.
    return node["extra"] if not node["groups"] and not node["state"] and node["extra"] else None


def inner_optimizers(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return the optimizers that this one holds as attributes, in lists or in dicts, by path."""
    optimizers: dict[str, Optimizer] = {}
    seen = {id(optimizer), id(optimizer.state), id(optimizer.param_groups)}

    def search(path: str, value: Any, depth: int) -> None:
        if id(value) in seen or depth > DEPTH:
            return
        if isinstance(value, (Optimizer, dict, list, tuple)):
            seen.add(id(value))
        if isinstance(value, Optimizer):
            optimizers[path] = value
            return
        for key, child in _below(value):
            search(f"{path}/{key}" if path else key, child, depth + 1)

    for key, value in vars(optimizer).items():
        if key not in _TORCHS:
            search(key, value, 0)
    return optimizers


def _below(value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) in (list, tuple):
        yield from ((str(index), item) for index, item in enumerate(value))
    elif isinstance(value, dict):
        yield from ((key, item) for key, item in value.items() if isinstance(key, str))


def left_out(optimizer: Optimizer, saved: Any) -> dict[str, Optimizer]:
    """Return the inner optimizers with tensors that are not in ``saved``, the outer optimizer's ``state_dict``."""
    inner = inner_optimizers(optimizer)
    if not inner:
        return {}
    saved_memory = {identity(nested) for nested in memory_in(saved) if _has_memory(nested)}
    missing = {}
    for path, nested in inner.items():
        tensors = (
            []
            if nested.state is optimizer.state
            else [tensor for tensor in memory_in(list(nested.state.values())) if _has_memory(tensor)]
        )
        if any(identity(tensor) not in saved_memory for tensor in tensors):
            missing[path] = nested
    return missing


def _has_memory(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided
