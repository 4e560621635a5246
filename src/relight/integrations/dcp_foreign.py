"""Read checkpoints that ``torch.distributed.checkpoint`` saved by itself: as a plain tree, or into live objects."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from relight.capture import build_tree, kind_of, plan_restore
from relight.capture.kinds import MODULE, OPTIMIZER
from relight.capture.load_tree import selected
from relight.capture.optimizers import own_parameters, parameter_names
from relight.errors import ConfigError, IncompatibleState
from relight.format.collector import collector_paused
from relight.importers.nesting import Path, name_of
from relight.integrations.dcp_folder import Folder


def read(path: str | os.PathLike[str], only: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the state dict in a directory that ``dcp.save`` wrote, with its original nesting.

    It has whole CPU tensors and plain values. Nothing in the directory is executed. ``only=["model.*"]`` reads just the
    matches, by DCP's flat names or by paths such as ``model/*``. Chunks are read one after the other, straight to their
    places. ``UnsafeContent`` names a value that is not a plain one; exclude it with ``only``.

    Args:
        path: The directory.
        only: Patterns of what to read, by DCP's flat names or by paths. None: everything.
    """
    folder = Folder(path)

    def wanted(name: str, path: Path) -> bool:
        if only is None or selected(name_of(path), only):
            return True
        return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in only)

    plan = build_tree(folder.tensors, folder.tree(wanted), where=folder.path, check=folder.check)
    folder.fill(plan.sinks)
    result: dict[str, Any] = plan.result()
    return result


def restore(path: str | os.PathLike[str], *, strict: bool = True, **components: object) -> None:
    """Restore a checkpoint of ``dcp.save`` into live modules, optimizers and other objects.

    Their tensors may be whole, or DTensors of any layout.

    ``restore("ckpt/step-1000", model=model, optim=optimizer)``: the names are the top-level keys of the state dict. A
    state dict of a module alone goes into the only component given. Optimizers are matched by parameter names, as
    ``get_state_dict`` saves them, flattened or not, or by numbers, as in ``optimizer.state_dict()``.
    ``IncompatibleState`` lists all mismatches, and then nothing has changed; ``strict=False`` restores what fits. Each
    rank calls it for itself.

    Args:
        path: The directory.
        strict: Whether all must fit. False restores what fits.
        **components: The live objects, by the top-level keys of the state dict.
    """
    folder = Folder(path)
    tops = {path_in_tree[0] for path_in_tree, _ in folder.found.values()}
    alone = len(components) == 1 and not tops & components.keys()
    with collector_paused():
        tree = folder.tree(lambda name, position: alone or position[0] in components)
        if alone:
            tree = {next(iter(components)): tree}
        for name, value in components.items():
            if name in tree and kind_of(value) == OPTIMIZER:
                tree[name] = _optimizer(tree[name], value, components, name)
            elif name in tree and kind_of(value) == MODULE and isinstance(tree[name], dict):
                tree[name] = _unnested(tree[name])
        plan = plan_restore(components, folder.tensors, tree, strict=strict, where=folder.path, check=folder.check)
    folder.fill(plan.sinks)
    plan.finish()
    immutable = [name for name in plan.values if plan.values[name] is not components[name]]
    if immutable:
        raise ConfigError(
            f"{immutable[0]!r} cannot be changed in place",
            hint="relight.integrations.dcp.read(path) gives plain values",
        )


def _unnested(node: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return a module's state with flat names: some state dicts are nested by module."""
    state: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, dict) and not str(key).endswith("_extra_state"):
            state.update(_unnested(value, f"{prefix}{key}."))
        else:
            state[f"{prefix}{key}"] = value
    return state


def _optimizer(node: Any, optimizer: Any, components: Mapping[str, object], where: str) -> dict[str, Any]:
    """Return an optimizer's state in Relight's own form: ``{"state": {name: …}, "groups": […], "extra": {}}``."""
    if not isinstance(node, dict):
        raise IncompatibleState("saved as something other than an optimizer", where=where)
    names = parameter_names(optimizer, components)
    order = [names.get(id(parameter), "?") for parameter in own_parameters(optimizer)]
    if not isinstance(node.get("param_groups", []), list) or any(
        str(key).startswith(("state.", "param_groups.")) for key in node
    ):
        return _flat(node, optimizer, names)
    groups = []
    for group in node.get("param_groups", []):
        params = group.get("params") if isinstance(group, dict) else None
        if not isinstance(params, (list, tuple)):
            raise IncompatibleState("a parameter group without its parameters", where=where)
        groups.append({**group, "params": [_named(parameter_key, order) for parameter_key in params]})
    state = node.get("state") or {}
    return {"state": {_named(key, order): value for key, value in state.items()}, "groups": groups, "extra": {}}


def _named(key: Any, order: Sequence[str]) -> Any:
    """Return a parameter's name; for a number, the live optimizer's name."""
    number = (
        int(key) if type(key) is int or (type(key) is str and key.isascii() and key.isdigit() and len(key) < 10) else -1
    )
    return order[number] if 0 <= number < len(order) and str(key) not in order else key


def _flat(node: Mapping[Any, Any], optimizer: Any, names: Mapping[int, str]) -> dict[str, Any]:
    """Return the state from keys of ``flatten_optimizer_state_dict``.

    They are ``state.<parameter>.<key>`` and ``param_groups.<parameter>.<key>``.
    """
    state: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for key, value in node.items():
        home, _, rest = str(key).partition(".")
        name, _, entry_name = rest.rpartition(".")
        if home in ("state", "param_groups") and name:
            (state if home == "state" else settings).setdefault(name, {})[entry_name] = value
    groups = []
    for group in optimizer.param_groups:
        members = [names.get(id(parameter), "?") for parameter in group["params"]]
        group_settings = next((settings[name] for name in members if name in settings), {})
        groups.append({**group_settings, "params": [name for name in members if name in settings]})
    return {"state": state, "groups": groups, "extra": {}}
