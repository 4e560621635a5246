"""Capture and restore optimizers: state by parameter name, never by index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from relight.capture.flat_params import FlatParams, contains_storage, declared_among, declared_of, own_values
from relight.capture.flattened import FLAT, Original, is_flattened, originals_of
from relight.capture.kinds import MODULE, kind_of, named_parameters
from relight.capture.own_state import INNER, OWN, has_torchs_form, left_out, own_form_of, with_names, with_numbers
from relight.capture.walk import Walker
from relight.format.tree import join_path
from relight.torch_private.optimizers import has_state_hooks

Optimizer = torch.optim.Optimizer


def own_parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return every parameter of the optimizer, in its order."""
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def trained_by(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters that the optimizer steps, including those in its flattened ranges."""
    parameters = own_parameters(optimizer)
    return (
        [original for parameter in parameters for original in contains_storage(parameter)]
        if declared_among(parameters)
        else parameters
    )


def parameter_names(optimizer: Optimizer, components: Mapping[str, object]) -> dict[int, str]:
    """Return ``id(parameter) → name``.

    Names come from the modules among the components, then from tensors in plain components, then from the groups. If
    parameters of several modules are in one optimizer, names begin with the component's.
    """
    wanted = set(map(id, trained_by(optimizer)))
    homes: dict[str, dict[int, str]] = {}
    for component, value in components.items():
        if kind_of(value) == MODULE:
            pairs = named_parameters(value, repeats=True)[::-1]  # type: ignore[arg-type]
            ids = map(id, map(itemgetter(1), pairs))
            own_names = dict(zip(ids, map(itemgetter(0), pairs), strict=True))  # the first of several names
            if not own_names.keys() <= wanted:
                own_names = {key: name for key, name in own_names.items() if key in wanted}
            if own_names:
                homes[component] = own_names
    names: dict[int, str] = {}
    for component, own_names in homes.items():
        if len(homes) == 1:
            names = own_names
        else:
            for key, name in own_names.items():
                names.setdefault(key, f"{component}.{name}")
    for component, value in components.items():
        _loose(value, component, wanted, names)
    for group in optimizer.param_groups:
        for parameter, name in zip(group["params"], group.get("param_names") or (), strict=False):
            names.setdefault(id(parameter), str(name))
    if len(set(names.values())) < len(names):
        names = _distinct(names, optimizer)
    names.update((id(flat), FLAT) for flat in declared_among(own_parameters(optimizer)))
    return names


def _distinct(names: Mapping[int, str], optimizer: Optimizer) -> dict[int, str]:
    """Return the names, with a mark on each that several parameters have: otherwise they would share one stored state.

    Examples: a component ``w`` and a module's parameter ``w``; two groups of ``named_parameters()`` of equal modules.
    The first parameter in the optimizer's order keeps the name.
    """
    distinct: dict[int, str] = {}
    taken: set[str] = set()
    for key in dict.fromkeys(map(id, trained_by(optimizer))):
        if (name := names.get(key)) is None:
            continue
        while name in taken:
            name += "~"
        taken.add(name)
        distinct[key] = name
    return distinct


def _loose(value: object, path: str, numbers: set[int], names: dict[int, str]) -> None:
    if isinstance(value, torch.Tensor):
        if id(value) in numbers:
            names.setdefault(id(value), path)
    elif isinstance(value, dict):
        for key, item in value.items():
            _loose(item, join_path(path, key), numbers, names)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _loose(item, join_path(path, index, sequence=True), numbers, names)


def holder_of(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that holds the state.

    ``ZeroRedundancyOptimizer`` has an inner one for the parameters that this rank steps.
    """
    inner = getattr(optimizer, "optim", None) if type(optimizer).__name__ == "ZeroRedundancyOptimizer" else None
    return inner if isinstance(inner, Optimizer) else optimizer


def why_not_apart(optimizer: Optimizer) -> str:
    """Return why the state of a ``ZeroRedundancyOptimizer`` cannot be read; empty if it can, and for other optimizers."""
    if type(optimizer).__name__ != "ZeroRedundancyOptimizer":
        return ""
    if holder_of(optimizer) is optimizer:
        return "its inner optimizer's state cannot be read: use overlap_with_ddp=False"
    return "its inner optimizer has its own state_dict" if is_custom(optimizer) else ""


def is_custom(optimizer: Optimizer) -> bool:
    """Return whether the class or a hook changes ``state_dict`` or ``load_state_dict``, so that these must be used."""
    optimizer = holder_of(optimizer)
    return (
        has_state_hooks(optimizer)
        or type(optimizer).state_dict is not Optimizer.state_dict
        or type(optimizer).load_state_dict is not Optimizer.load_state_dict
    )


def flattened_in(optimizer: Optimizer, components: Mapping[str, object]) -> dict[int, list[Original]]:
    """Return the original parameters in each of the optimizer's flattened parameters, by ``id``."""
    modules = [value for value in components.values() if isinstance(value, torch.nn.Module) and is_flattened(value)]
    wanted = set(map(id, own_parameters(optimizer))) if modules else set()
    wrapped = {key: originals for module in modules for key, originals in originals_of(module).items() if key in wanted}
    return {**wrapped, **{key: declared.originals for key, declared in declared_in(optimizer, components).items()}}


def declared_in(optimizer: Optimizer, components: Mapping[str, object]) -> dict[int, FlatParams]:
    """Return the declared content (``relight.flattened``) of the optimizer's parameters, by ``id``."""
    flats = declared_among(own_parameters(optimizer))
    names = parameter_names(optimizer, components) if flats else {}
    return {id(flat): declared for flat in flats if (declared := declared_of(flat, names)) is not None}


def names_of(
    parameter: torch.Tensor, names: Mapping[int, str], flattened: Mapping[int, Sequence[Original]]
) -> list[str]:
    """Return a live parameter's name, or the names of the parameters that were flattened into it."""
    name = names.get(id(parameter), "?")
    originals = flattened.get(id(parameter))
    return [name] if originals is None else [original.named(name) for original in originals]


class Moments(NamedTuple):
    """The large part of an optimizer's node: ``{name: {key: value}}``, and each group's parameters by name."""

    state: Any
    params: list[Any]
    masters: Any
    """``{name: values}`` of the flattened copies that have another dtype than their parameters."""


def capture_moments(
    walker: Walker, optimizer: Optimizer, path: str, components: Mapping[str, object]
) -> Moments | None:
    """Capture the per-parameter state of a plain optimizer.

    Return None, and record a refusal, if parameters have no names or the state cannot be read.
    """
    flattened = flattened_in(optimizer, components)
    names = parameter_names(optimizer, components)
    nameless = [position for position, p in enumerate(trained_by(optimizer)) if id(p) not in names]
    if why_not_apart(optimizer):
        walker.refuse(path, why_not_apart(optimizer))
        return None
    if nameless:
        walker.refuse(
            path,
            f"{len(nameless)} of its parameters belong to no component (the first is number {nameless[0]}): "
            "give the Checkpointer the module they are in, or build the optimizer with named_parameters()",
        )
        return None
    params = [
        [name for parameter in group["params"] for name in names_of(parameter, names, flattened)]
        for group in optimizer.param_groups
    ]
    state: dict[str, Any] = {}
    if is_custom(optimizer):
        if flattened:
            walker.refuse(
                path, "it has its own state_dict, and its parameters were flattened: fully_shard() keeps them apart"
            )
            return None
        return Moments(state, params, {})
    live = holder_of(optimizer).state
    walker.gather(value for entries in live.values() if isinstance(entries, dict) for value in entries.values())
    for parameter in own_parameters(optimizer):
        if parameter in live:
            name, entries = names[id(parameter)], dict(live[parameter])
            if id(parameter) not in flattened:
                state[name] = walker.value(entries, join_path(f"{path}/state", name), "optim")
                continue
            mismatched = [
                key for key, value in entries.items() if _is_like(key, value) and value.shape != parameter.shape
            ]
            if mismatched:
                walker.refuse(
                    join_path(f"{path}/state", name),
                    f"{mismatched[0]} is neither like the flattened parameter nor a scalar",
                )
                continue
            for original in flattened[id(parameter)]:
                if original.here:
                    own_entries = {
                        key: original.of(value, value) if _is_like(key, value) else value
                        for key, value in entries.items()
                    }
                    state[original.named(name)] = walker.value(
                        own_entries, join_path(f"{path}/state", original.named(name)), "optim"
                    )
    masters: dict[str, Any] = {}
    declared = declared_in(optimizer, components)
    for flat in declared_among(own_parameters(optimizer)):
        for name, run in own_values(flat, declared[id(flat)]).items():
            masters[name] = walker.value(run, join_path(f"{path}/masters", name), "optim")
    return Moments(state, params, masters)


def _is_like(key: str, value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and key != "step"


def capture_optimizer(walker: Walker, optimizer: Optimizer, path: str, moments: Moments) -> Any:
    """``{"state": {name: {key: value}}, "groups": [{…, "params": [names]}], "extra": {…}}``."""
    if is_custom(optimizer):
        return _capture_custom(walker, optimizer, path, moments.params)
    inner = _capture_inner(walker, optimizer, path, None)
    groups = [
        {
            **walker.value(
                {key: item for key, item in group.items() if key not in ("params", "param_names")}, f"{path}/groups/{i}"
            ),
            "params": params,
        }
        for i, (group, params) in enumerate(zip(optimizer.param_groups, moments.params, strict=True))
    ]
    extra = {key: value for key, value in holder_of(optimizer).state.items() if not isinstance(key, torch.Tensor)}
    masters = {"masters": moments.masters} if moments.masters else {}
    return {
        "state": moments.state,
        "groups": groups,
        "extra": walker.value(extra, f"{path}/extra", "optim"),
        **masters,
        **inner,
    }


def _capture_custom(walker: Walker, optimizer: Optimizer, path: str, params: list[Any]) -> Any:
    given = optimizer.state_dict()
    inner = _capture_inner(walker, optimizer, path, given)
    if not has_torchs_form(optimizer, given):
        node = walker.value(with_names(given, params), f"{path}/{OWN}", "optim")
        return {"state": {}, "groups": [{"params": names} for names in params], "extra": {}, OWN: node, **inner}
    saved = dict(given)
    order = [name for group in params for name in group]
    state, groups = saved.pop("state", {}), saved.pop("param_groups", [])
    return {
        "state": walker.value({_named(key, order): value for key, value in state.items()}, f"{path}/state", "optim"),
        "groups": walker.value(
            [{**group, "params": [_named(index, order) for index in group.get("params", ())]} for group in groups],
            f"{path}/groups",
        ),
        "extra": walker.value(saved, f"{path}/extra", "optim"),
        **inner,
    }


def _capture_inner(walker: Walker, optimizer: Optimizer, path: str, given: Any) -> dict[str, Any]:
    """Return the nodes of inner optimizers that ``given``, its ``state_dict``, leaves out; empty if there are none."""
    nodes: dict[str, Any] = {}
    for attribute, inner in left_out(
        optimizer, given if given is not None else list(holder_of(optimizer).state.values())
    ).items():
        below = join_path(f"{path}/{INNER}", attribute)
        names = parameter_names(inner, walker.components)
        if all(id(parameter) in names for parameter in trained_by(inner)):
            moments = capture_moments(walker, inner, below, walker.components)
            nodes[attribute] = capture_optimizer(walker, inner, below, moments) if moments is not None else None
        else:  # its parameters are copies of the model's
            nodes[attribute] = {
                "state": {},
                "groups": [],
                "extra": {},
                OWN: walker.value(inner.state_dict(), f"{below}/{OWN}", "optim"),
            }
    return {INNER: nodes} if nodes else {}


def live_custom(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return the live state in the form of ``_capture_custom``'s tree: stored objects are restored into its objects."""
    given = optimizer.state_dict()
    params = [[names.get(id(parameter), "?") for parameter in group["params"]] for group in optimizer.param_groups]
    if not has_torchs_form(optimizer, given):
        return {OWN: with_names(given, params)}
    saved, order = dict(given), [name for group in params for name in group]
    state, groups = saved.pop("state"), saved.pop("param_groups")
    return {"state": {_named(key, order): value for key, value in state.items()}, "groups": groups, "extra": saved}


def load_custom(optimizer: Optimizer, saved: Mapping[str, Any], names: Mapping[int, str]) -> None:
    """Load ``_capture_custom``'s tree through the class's own ``load_state_dict``."""
    whole = own_form_of(saved)
    if whole is not None:
        optimizer.load_state_dict(
            with_numbers(whole, [names[id(parameter)] for parameter in own_parameters(optimizer)])
        )
        return
    # torch assigns the nth number of a group to the group's nth live parameter, so numbers must follow the live order.
    numbers = {names[id(parameter)]: index for index, parameter in enumerate(own_parameters(optimizer))}
    groups = []
    for live, group in zip(optimizer.param_groups, saved["groups"], strict=True):
        groups.append({**group, "params": [numbers[names[id(parameter)]] for parameter in live["params"]]})
    state = {numbers.get(key, key): value for key, value in _apart(saved["state"]).items()}
    optimizer.load_state_dict({**saved["extra"], "state": state, "param_groups": groups})


def _apart(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the state with a tensor of its own for each entry: flattened parameters share their step counter."""
    met: set[int] = set()

    def own(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and id(value) in met:
            return value.clone()
        met.add(id(value))
        return value

    return {
        key: {name: own(entry) for name, entry in value.items()} if isinstance(value, dict) else value
        for key, value in state.items()
    }


def state_dict_of(node: Any) -> Any:
    """Return an optimizer's loaded node as its ``load_state_dict`` takes it: for torch's own, with names as the parameters' ids.

    A part of a node, as ``only=`` selects it, has the keys of that part.
    """
    if not isinstance(node, dict):
        return node
    if {"state", "groups", "extra"} <= node.keys() and (own := own_form_of(node)) is not None:
        return with_numbers(own, [name for group in node["groups"] for name in group["params"]])
    torchs = {"state": _apart(node["state"])} if isinstance(node.get("state"), dict) else {}
    groups = {"param_groups": node["groups"]} if "groups" in node else {}
    extra = node["extra"] if isinstance(node.get("extra"), dict) else {}
    return {**extra, **{key: node[key] for key in node if key not in ("groups", "extra")}, **torchs, **groups}


def _named(key: Any, order: list[str]) -> Any:
    return order[key] if isinstance(key, int) and 0 <= key < len(order) else key


def place_like(
    parameter: torch.Tensor, group: Mapping[str, Any], key: str, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Allocate a state tensor that the optimizer has not created yet, on the device and in the layout it would use.

    The rule for ``step`` is that of torch's ``load_state_dict``: on the parameter's device if the group is capturable or
    fused, otherwise on the host.
    """
    if key == "step" and not (group.get("capturable") or group.get("fused")):
        return torch.empty(shape, dtype=dtype, device="cpu")
    if shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device=parameter.device)


_steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
"""Steps of each optimizer, counted by a hook that torch calls with the optimizer alone."""


def steps_of(optimizer: Optimizer) -> int:
    """Return the number of the optimizer's steps since the first call.

    Fused kernels do not increment version counters, and SGD without state leaves no other trace.
    """
    if optimizer not in _steps:
        _steps[optimizer] = 0
        optimizer.register_step_post_hook(_count_step)
    return _steps[optimizer]


def _count_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _steps[optimizer] = _steps.get(optimizer, 0) + 1
