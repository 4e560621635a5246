"""The content of a foreign checkpoint in Relight's terms: components under usual names, everything else as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from relight.errors import IncompatibleState, UnsafeContent
from relight.importers.loose_rng import loose_rng
from relight.importers.pickles import UnpickledObject
from relight.importers.tensors import is_tensor
from relight.importers.tree_builder import LEVELS_MAX, VALUES_MAX

MODULE, OPTIMIZER, SCHEDULER, SCALER, RNG, VALUE = "module", "optimizer", "scheduler", "scaler", "rng", "value"
KEPT = "imported"
"""The component that holds the values which belong to no other component."""
RESERVED = ("grad", "rank", "rng", KEPT)
"""Names that no component of an imported checkpoint may have: the tree uses them for other parts."""
_COUNTS = ("global_step", "global_steps")
"""Names of a count of the steps that are done. Under the other names, scripts save the number of the last step, counted from 0."""
_STEPS = ("global_step", "global_steps", "step", "iteration", "iter", "steps")
_METRICS = ("loss", "train_loss", "eval_loss", "val_loss", "best_metric")
MODULES_MAX = 200_000
_WRAPPERS = ("_orig_mod.", "module.")
"""Prefixes that ``torch.compile`` and ``DistributedDataParallel`` add to all names."""


class ImportedComponent(NamedTuple):
    """One component: its kind, its state, and for a module the names that its optimizer trains."""

    kind: str
    node: Any
    trained: frozenset[str] = frozenset()


@dataclass
class Content:
    """The content of a checkpoint. ``kept``: values that belong to no component. ``notes``: why a resume from it is
    not exact."""

    kind: str
    format: str
    step: int | None = None
    first_step: int = 0
    """1 if the source's number counts the steps that are done."""
    metrics: dict[str, float] = field(default_factory=dict)
    components: dict[str, ImportedComponent] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def take(self, entries: Mapping[Any, Any], *, unwrap: bool = True) -> None:
        """Take the entries of a script's own dict. Modules, optimizers, schedulers and so on are recognised by content.

        ``unwrap``: if there is a single entry that contains a module or an optimizer, take that entry's content. False
        if other entries of the dict were taken before: unwrapping would replace them.
        """
        objects = {key: pickled_module(value) for key, value in entries.items()}
        entries = {key: value if objects[key] is None else objects[key] for key, value in entries.items()}
        self.notes += [
            f"{key}: saved as an object; its state is taken, its class is not"
            for key, state in objects.items()
            if state is not None
        ]
        entries = self._generators(entries)
        kinds = {key: kind_of(value) for key, value in entries.items()}
        modules = [key for key, kind in kinds.items() if kind == MODULE]
        for key, value in entries.items():
            kind = kinds[key]
            name = usual_name(str(key), kind, alone=list(kinds.values()).count(kind) == 1)
            if kind == VALUE or type(key) is not str or name in self.components or name in RESERVED:
                self.kept[key if type(key) is str else repr(key)[:80]] = value
                self._facts(key, value)
            elif kind == MODULE:
                self.module(name, value)
            elif kind == OPTIMIZER:
                self.components[name] = ImportedComponent(OPTIMIZER, optimizer_of(value))
            else:
                self.components[name] = ImportedComponent(kind, value)
        if unwrap and not modules and OPTIMIZER not in kinds.values() and len(entries) == 1:
            (inner,) = entries.values()
            if isinstance(inner, dict) and any(kind_of(value) in (MODULE, OPTIMIZER) for value in inner.values()):
                self.components = {name: part for name, part in self.components.items() if part.kind == RNG}
                self.kept.clear()
                self.take(inner)

    def _generators(self, entries: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Take the process's generators as the component ``rng``; return the other entries."""
        generators = loose_rng(entries) if "rng" not in self.components else None
        if generators is None or not (generators.node or generators.left_out):
            return entries
        if generators.node:
            self.components["rng"] = ImportedComponent(RNG, generators.node)
        self.notes += generators.notes
        self.left_out += generators.left_out
        return {key: value for key, value in entries.items() if key not in generators.used}

    def module(self, name: str, state: Mapping[str, Any]) -> None:
        """Add a module's state, under its names without wrappers."""
        plain, wrapper = unwrapped(state)
        if wrapper:
            self.notes.append(
                f"{name}: its names are without the {wrapper!r} that a wrapper had put before all of them"
            )
        self.components[name] = ImportedComponent(MODULE, plain)

    def name_trained(self) -> None:
        """Record which of a module's tensors are trained, if an optimizer's names belong to the module."""
        trained: set[str] = set()
        for part in self.components.values():
            if part.kind == OPTIMIZER and isinstance(part.node, dict):
                trained |= {name for group in part.node["groups"] for name in group["params"] if type(name) is str}
        for name, part in self.components.items():
            if part.kind == MODULE and trained and trained & part.node.keys():
                self.components[name] = part._replace(trained=frozenset(trained & part.node.keys()))

    def indexed(self) -> list[str]:
        """Return the names of optimizers that identify parameters by number."""
        return [
            name
            for name, part in self.components.items()
            if part.kind == OPTIMIZER
            and any(type(key) is int for group in part.node["groups"] for key in group["params"])
        ]

    def _facts(self, key: Any, value: Any) -> None:
        if type(value) is int and self.step is None and key in _STEPS and 0 <= value < 10**15:
            self.step, self.first_step = value, int(key in _COUNTS)
        if type(key) is str and key in _METRICS:
            self.measured(key, value)

    def measured(self, name: str, value: Any) -> None:
        """Record a metric of the training, if it is a number."""
        if type(value) is float or (type(value) is int and abs(value) < 2**53):
            self.metrics[name] = float(value)


def kind_of(value: Any) -> str:
    """Return the kind of a part of a checkpoint, by its content."""
    if not isinstance(value, dict) or not value:
        return VALUE
    if is_optimizer(value):
        return OPTIMIZER
    if {"last_epoch", "_step_count"} <= value.keys():
        return SCHEDULER
    if {"scale", "growth_factor", "backoff_factor", "growth_interval"} <= value.keys():
        return SCALER
    return MODULE if is_module(value) else VALUE


def is_module(value: Any) -> bool:
    """Return whether the value is a module's state: a tensor for each name, except for extra states."""
    if not isinstance(value, dict) or not all(type(key) is str for key in value):
        return False
    tensors = sum(is_tensor(entry) for entry in value.values())
    other_keys = [key for key, entry in value.items() if not is_tensor(entry)]
    return tensors > 0 and all(key.endswith("_extra_state") for key in other_keys)


def check_walkable(value: Any, where: str) -> None:
    """Raise ``UnsafeContent`` for dicts that are nested too deeply, or repeated so often that a walk would not end."""
    pending, count = [(value, 0)], 0
    while pending:
        node, level = pending.pop()
        count += 1
        if level > LEVELS_MAX or count > VALUES_MAX:
            raise UnsafeContent("values nested too deeply, or too many", where=where)
        if isinstance(node, dict):
            pending += [(entry, level + 1) for entry in node.values() if isinstance(entry, dict)]


def pickled_module(value: Any) -> dict[str, Any] | None:
    """Return the state of a module that was pickled as an object, whatever its class; None for other values."""
    if not _is_pickled_module(value):
        return None
    state: dict[str, Any] = {}
    pending, count = [("", value)], 0
    while pending:
        prefix, current = pending.pop()
        count += 1
        attributes = current.state
        for key, tensor in (*attributes["_parameters"].items(), *attributes["_buffers"].items()):
            if is_tensor(tensor) and key not in attributes.get("_non_persistent_buffers_set", ()):
                state[f"{prefix}{key}"] = tensor
        inner = [
            (f"{prefix}{key}.", child) for key, child in attributes["_modules"].items() if _is_pickled_module(child)
        ]
        if len(prefix) > 4096 or count > MODULES_MAX:  # a module may contain itself
            raise UnsafeContent("modules nested without end")
        pending += reversed(inner)
    return state


def _is_pickled_module(value: Any) -> bool:
    attributes = value.state if isinstance(value, UnpickledObject) else None
    return isinstance(attributes, dict) and all(
        isinstance(attributes.get(name), dict) for name in ("_parameters", "_buffers", "_modules")
    )


def is_optimizer(value: Any) -> bool:
    """Return whether the value has the form of torch's ``Optimizer.state_dict()``."""
    if not isinstance(value, dict) or not {"state", "param_groups"} <= value.keys():
        return False
    groups = value["param_groups"]
    return (
        isinstance(value["state"], dict)
        and isinstance(groups, list)
        and all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)
        and all(type(key) in (int, str) for group in groups for key in group["params"])
    )


def optimizer_of(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state in Relight's form: by name if the groups have names, otherwise by number."""
    names: dict[Any, Any] = {}
    groups = []
    for group in state_dict["param_groups"]:
        given = group.get("param_names")
        if isinstance(given, list) and len(given) == len(group["params"]) and all(type(name) is str for name in given):
            names.update(zip(group["params"], given, strict=True))
    members = [key for group in state_dict["param_groups"] for key in group["params"]]
    if names.keys() != set(members) or len(set(names.values())) != len(names):
        names = {}  # some have no name: use numbers for all
    if len(set(members)) != len(members):
        raise IncompatibleState("an optimizer that has a parameter twice")
    for group in state_dict["param_groups"]:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({**settings, "params": [names.get(key, key) for key in group["params"]]})
    extra = {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")}
    member_keys = set(members)
    foreign = {key: value for key, value in state_dict["state"].items() if key not in member_keys}
    if foreign:
        extra["state"] = foreign
    return {
        "state": {names.get(key, key): value for key, value in state_dict["state"].items() if key in member_keys},
        "groups": groups,
        "extra": extra,
    }


def unwrapped(state: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return a module's state without the prefixes of wrappers, and the removed prefixes."""
    entries, removed = dict(state), ""
    while entries:
        prefix = next((candidate for candidate in _WRAPPERS if all(key.startswith(candidate) for key in entries)), None)
        if prefix is None or any(len(key) == len(prefix) for key in entries):
            break
        entries, removed = {key[len(prefix) :]: value for key, value in entries.items()}, removed + prefix
    return entries, removed


def usual_name(key: str, kind: str, *, alone: bool) -> str:
    """Return the usual component name for a dict's ``key``. ``alone``: there is no other component of its kind."""
    bare = key
    for ending in ("_state_dict", "_state", "_states", "_dict"):
        bare = bare.removesuffix(ending)
    if kind == MODULE and (
        bare in ("state", "model", "net", "network", "module", "weights", "params") or key == "state_dict"
    ):
        return "model"
    if alone and kind == OPTIMIZER and bare in ("optimizer", "optim", "opt", "optimizers"):
        return "optimizer"
    if alone and kind == SCHEDULER:
        return "scheduler" if bare in ("scheduler", "lr_scheduler", "sched", "lr_schedulers") else bare
    if alone and kind == SCALER:
        return "scaler" if bare in ("scaler", "grad_scaler", "amp_scaler") else bare
    return bare or key
