"""What a checkpoint of another framework holds, in Relight's terms: components by the names that scripts give them, the rest as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from relight.errors import IncompatibleState, UnsafeContent
from relight.importers.pickles import UnpickledObject
from relight.importers.tensors import AssembledTensor, Spec
from relight.importers.tree_builder import LEVELS_MAX, VALUES_MAX, Numbers, array_of
from relight.layout import Bytes

MODULE, OPTIMIZER, SCHEDULER, SCALER, RNG, VALUE = "module", "optimizer", "scheduler", "scaler", "rng", "value"
KEPT = "imported"
"""The component of the tree that holds what belongs to none of a script's own."""
_STEPS = ("global_step", "global_steps", "step", "iteration", "iter", "steps")
_METRICS = ("loss", "train_loss", "eval_loss", "val_loss", "best_metric")
MODULES_MAX = 200_000
_WRAPPERS = ("_orig_mod.", "module.")
"""What ``torch.compile`` and ``DistributedDataParallel`` put before each name of what they hold."""


class ImportedComponent(NamedTuple):
    """One component: what it is, its state, and of a module the names that its optimizer trains."""

    kind: str
    node: Any
    trained: frozenset[str] = frozenset()


@dataclass
class Content:
    """All of a checkpoint. ``kept``: values that no component takes. ``notes``: why a resume from it is not exact."""

    kind: str
    format: str
    step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    components: dict[str, ImportedComponent] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def take(self, told: Mapping[Any, Any]) -> None:
        """Take what a script's own dict holds: what is a module's state, an optimizer's, a scheduler's … by looking at it."""
        objects = {key: pickled_module(value) for key, value in told.items()}
        told = {key: value if objects[key] is None else objects[key] for key, value in told.items()}
        self.notes += [
            f"{key}: saved as an object; its state is taken, its class is not" for key, one in objects.items() if one is not None
        ]
        told = self._generators(told)
        kinds = {key: kind_of(value) for key, value in told.items()}
        modules = [key for key, kind in kinds.items() if kind == MODULE]
        for key, value in told.items():
            kind = kinds[key]
            name = usual_name(str(key), kind, alone=list(kinds.values()).count(kind) == 1)
            if kind == VALUE or type(key) is not str or name in self.components or name in ("grad", "rank", "rng", KEPT):
                self.kept[key if type(key) is str else repr(key)[:80]] = value
                self._facts(key, value)
            elif kind == MODULE:
                self.module(name, value)
            elif kind == OPTIMIZER:
                self.components[name] = ImportedComponent(OPTIMIZER, optimizer_of(value))
            else:
                self.components[name] = ImportedComponent(kind, value)
        if not modules and not any(kind == OPTIMIZER for kind in kinds.values()) and len(told) == 1:
            (inner,) = told.values()
            if isinstance(inner, dict) and any(kind_of(one) in (MODULE, OPTIMIZER) for one in inner.values()):
                self.components = {name: part for name, part in self.components.items() if part.kind == RNG}
                self.kept.clear()
                self.take(inner)

    def _generators(self, told: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Take the process's generators as the component ``rng``; return the other entries."""
        from relight.importers.loose_rng import loose_rng  # it needs this file's functions

        found = loose_rng(told) if "rng" not in self.components else None
        if found is None or not (found.node or found.left_out):
            return told
        if found.node:
            self.components["rng"] = ImportedComponent(RNG, found.node)
        self.notes += found.notes
        self.left_out += found.left_out
        return {key: value for key, value in told.items() if key not in found.used}

    def module(self, name: str, state: Mapping[str, Any]) -> None:
        """A module's state, under the names that it has without wrappers."""
        plain, wrapper = unwrapped(state)
        if wrapper:
            self.notes.append(f"{name}: its names are without the {wrapper!r} that a wrapper had put before all of them")
        self.components[name] = ImportedComponent(MODULE, plain)

    def name_trained(self) -> None:
        """Say which of a module's tensors are trained, where an optimizer has names that are all the module's."""
        held: set[str] = set()
        for part in self.components.values():
            if part.kind == OPTIMIZER and isinstance(part.node, dict):
                held |= {one for group in part.node["groups"] for one in group["params"] if type(one) is str}
        for name, part in self.components.items():
            if part.kind == MODULE and held and held & part.node.keys():
                self.components[name] = part._replace(trained=frozenset(held & part.node.keys()))

    def indexed(self) -> list[str]:
        """Optimizers whose state is by number."""
        return [
            name
            for name, part in self.components.items()
            if part.kind == OPTIMIZER and any(type(one) is int for group in part.node["groups"] for one in group["params"])
        ]

    def _facts(self, key: Any, value: Any) -> None:
        if type(value) is int and self.step is None and key in _STEPS and 0 <= value < 10**15:
            self.step = value
        if type(key) is str and key in _METRICS:
            self.measured(key, value)

    def measured(self, name: str, value: Any) -> None:
        """A figure of the training, if it is a number."""
        if type(value) is float or (type(value) is int and abs(value) < 2**53):
            self.metrics[name] = float(value)


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor, in whatever form."""
    return isinstance(value, (Spec, AssembledTensor))


def kind_of(value: Any) -> str:
    """What a part of a checkpoint is, by what is in it."""
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
    """Whether it is a module's state: names, each of a tensor, but for what modules say besides."""
    if not isinstance(value, dict) or not all(type(key) is str for key in value):
        return False
    tensors = sum(is_tensor(one) for one in value.values())
    others = [key for key, one in value.items() if not is_tensor(one)]
    return tensors > 0 and all(key.endswith("_extra_state") for key in others)


def check_walkable(value: Any, where: str) -> None:
    """``UnsafeContent`` for dicts that are nested too deeply to be walked, or said again and again, so that it would take for ever."""
    left, count = [(value, 0)], 0
    while left:
        node, level = left.pop()
        count += 1
        if level > LEVELS_MAX or count > VALUES_MAX:
            raise UnsafeContent("values nested too deeply, or too many", where=where)
        if isinstance(node, dict):
            left += [(one, level + 1) for one in node.values() if isinstance(one, dict)]


def pickled_module(value: Any) -> dict[str, Any] | None:
    """The state of a module that was saved as an object, not by its ``state_dict()``: what its class is need not be known. Else None."""
    if not _is_pickled_module(value):
        return None
    found: dict[str, Any] = {}
    left, count = [("", value)], 0
    while left:
        prefix, one = left.pop()
        count += 1
        held = one.state
        for key, tensor in (*held["_parameters"].items(), *held["_buffers"].items()):
            if is_tensor(tensor) and key not in held.get("_non_persistent_buffers_set", ()):
                found[f"{prefix}{key}"] = tensor
        inner = [(f"{prefix}{key}.", child) for key, child in held["_modules"].items() if _is_pickled_module(child)]
        if len(prefix) > 4096 or count > MODULES_MAX:  # one may be said to be within itself
            raise UnsafeContent("modules nested without end")
        left += reversed(inner)
    return found


def _is_pickled_module(value: Any) -> bool:
    held = value.state if isinstance(value, UnpickledObject) else None
    return isinstance(held, dict) and all(isinstance(held.get(name), dict) for name in ("_parameters", "_buffers", "_modules"))


def is_optimizer(value: Any) -> bool:
    """Whether it is what an optimizer of torch says of itself."""
    if not isinstance(value, dict) or not {"state", "param_groups"} <= value.keys():
        return False
    groups = value["param_groups"]
    return (
        isinstance(value["state"], dict)
        and isinstance(groups, list)
        and all(isinstance(one, dict) and isinstance(one.get("params"), list) for one in groups)
        and all(type(key) in (int, str) for group in groups for key in group["params"])
    )


def optimizer_of(told: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state as Relight has it: by name where the groups say names, else by number."""
    names: dict[Any, Any] = {}
    groups = []
    for group in told["param_groups"]:
        given = group.get("param_names")
        if isinstance(given, list) and len(given) == len(group["params"]) and all(type(one) is str for one in given):
            names.update(zip(group["params"], given, strict=True))
    members = [one for group in told["param_groups"] for one in group["params"]]
    if names.keys() != set(members) or len(set(names.values())) != len(names):
        names = {}  # some have none: by number, all of them
    if len(set(members)) != len(members):
        raise IncompatibleState("an optimizer that has a parameter twice")
    for group in told["param_groups"]:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({**settings, "params": [names.get(one, one) for one in group["params"]]})
    extra = {key: value for key, value in told.items() if key not in ("state", "param_groups")}
    known = set(members)
    foreign = {key: value for key, value in told["state"].items() if key not in known}
    if foreign:
        extra["state"] = foreign
    return {"state": {names.get(key, key): value for key, value in told["state"].items() if key in known}, "groups": groups, "extra": extra}


def unwrapped(state: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """A module's state without what wrappers put before every name, and that."""
    found, taken = dict(state), ""
    while found:
        prefix = next((one for one in _WRAPPERS if all(key.startswith(one) for key in found)), None)
        if prefix is None or any(len(key) == len(prefix) for key in found):
            break
        found, taken = {key[len(prefix) :]: value for key, value in found.items()}, taken + prefix
    return found, taken


def usual_name(key: str, kind: str, *, alone: bool) -> str:
    """What a script would call a component that a dict calls ``key``; ``alone``: there is no other of its kind."""
    bare = key
    for ending in ("_state_dict", "_state", "_states", "_dict"):
        bare = bare.removesuffix(ending)
    if kind == MODULE and (bare in ("state", "model", "net", "network", "module", "weights", "params") or key == "state_dict"):
        return "model"
    if alone and kind == OPTIMIZER and bare in ("optimizer", "optim", "opt", "optimizers"):
        return "optimizer"
    if alone and kind == SCHEDULER:
        return "scheduler" if bare in ("scheduler", "lr_scheduler", "sched", "lr_schedulers") else bare
    if alone and kind == SCALER:
        return "scaler" if bare in ("scaler", "grad_scaler", "amp_scaler") else bare
    return bare or key


def host_rng(python: Any, numpy: Any, cpu: Any, devices: Mapping[str, list[Any]]) -> dict[str, Any] | None:
    """A process's generators as Relight has them, from what torch, numpy and Python give; None if one is not as they give it."""
    words = python_words(python)
    if words is None or not is_tensor(cpu):
        return None
    legacy = numpy_state(numpy) if numpy is not None else None
    if numpy is not None and legacy is None:
        return None
    return {"python": words, "numpy": legacy, "torch": cpu, **{kind: states for kind, states in devices.items() if states}}


def python_words(state: Any) -> dict[str, Any] | None:
    """The state of Python's generator as a component has it; None if it is another value."""
    import struct

    if not isinstance(state, (tuple, list)) or len(state) != 3 or type(state[0]) is not int or not isinstance(state[1], (tuple, list)):
        return None
    if len(state[1]) != 625 or any(type(one) is not int or not 0 <= one < 2**32 for one in state[1]):
        return None
    data = struct.pack("<625q", *state[1])
    gauss = state[2] if type(state[2]) is float or state[2] is None else None
    return {"version": state[0], "words": AssembledTensor("int64", (625,), Bytes(data), ("words", data)), "gauss": gauss}


def numpy_state(state: Any) -> dict[str, Any] | None:
    """The state of numpy's legacy generator as a component has it; None if it is another value."""
    if isinstance(state, dict) and isinstance(state.get("state"), dict):  # get_state(legacy=False)
        inner = state["state"]
        state = (state.get("bit_generator"), inner.get("key"), inner.get("pos"), state.get("has_gauss"), state.get("gauss"))
    if (
        not isinstance(state, (tuple, list))
        or len(state) != 5
        or state[0] != "MT19937"
        or not isinstance(state[1], (UnpickledObject, list))
    ):
        return None
    try:
        import numpy as np

        key = np.ascontiguousarray(array_of(state[1]) if isinstance(state[1], UnpickledObject) else np.array(state[1], dtype=np.uint32))
    except (TypeError, ValueError, KeyError, OverflowError):
        return None
    if (
        key.dtype != "uint32"
        or key.shape != (624,)
        or type(state[2]) is not int
        or type(state[3]) is not int
        or type(state[4]) is not float
    ):
        return None
    words = Numbers(key.tobytes(), key.dtype.str, key.shape)
    return {"bit_generator": "MT19937", "state": {"key": words, "pos": state[2]}, "has_gauss": state[3], "gauss": state[4]}
