"""State that changes in training and is in no checkpoint: attributes of components that their ``state_dict()`` leaves
out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from relight.capture.flattened import is_flattened
from relight.capture.kinds import MODULE, OPTIMIZER, SCHEDULER, STATEFUL, RankZeroComponent, kind_of, unwrap
from relight.observe import emit
from relight.torch_private.modules import saves_as_torch, set_by_torch
from relight.torch_private.tensors import version_counter

SHOWN_MAX, ELEMENTS_MAX = 5, 16
"""Most attributes that one sentence names, and most elements of a container that are compared."""
SAVES_MAX = 2
"""Number of saves after which such state is searched for. State that changes later is only reported by
``describe_state()``."""
_SKIPPED_HOMES = ("torch.", "torchdata.", "accelerate.", "lightning", "pytorch_lightning", "deepspeed.", "datasets.")
"""Packages with classes that are skipped: their objects have caches and counters, or their state has all that a resume
needs."""
_PLAIN = (bool, int, float, complex, str, type(None))


class _StatePath(NamedTuple):
    component: str
    path: str
    """Path of the object within the component; empty for the component itself."""
    attribute: str


class OutsideState:
    """Attributes of one Checkpointer's components that have changed since it was made and are in no checkpoint.

    A check costs about 2 µs for each module and attribute of a class that is not torch's. It copies nothing and keeps
    no references.
    """

    def __init__(self, components: Mapping[str, object], reports: bool) -> None:
        """``reports``: whether this rank emits events."""
        self._components, self._reports = components, reports
        self._before = {path: _mark(value) for path, value, _ in _attributes(components)}
        self._saves = 0

    @property
    def sentences(self) -> list[str]:
        """One for each component with changed attributes that are not in its state."""
        return [sentence for _, sentence, _ in self._found()]

    def saved(self) -> None:
        """Report what has changed, once, after one of the first saves."""
        if not self._reports or self._saves >= SAVES_MAX:
            return
        self._saves += 1
        for component, sentence, names in self._found():
            self._saves = SAVES_MAX
            emit("state.missed", sentence, component=component, attributes=names)

    def _found(self) -> list[tuple[str, str, list[str]]]:
        changed: dict[str, list[str]] = {}
        for path, value, owner in _attributes(self._components):
            if path in self._before and self._before[path] == _mark(value):
                continue
            if path not in self._before and value is None:
                continue
            if not _is_passing(value) and not _is_given(owner, path.attribute, value):
                changed.setdefault(path.component, []).append(
                    f"{path.path}.{path.attribute}" if path.path else path.attribute
                )
        return [(name, _sentence(name, self._components[name], names), names) for name, names in changed.items()]


def _sentence(name: str, component: object, names: list[str]) -> str:
    shown = ", ".join(names[:SHOWN_MAX]) + (f" and {len(names) - SHOWN_MAX} more" if len(names) > SHOWN_MAX else "")
    noun, verb, pronoun = ("attributes", "are", "them") if len(names) > 1 else ("attribute", "is", "it")
    remedy = (
        "register_buffer(), or get_extra_state() and set_extra_state()"
        if isinstance(component, nn.Module)
        else "its state_dict()"
    )
    return f"{name}: the {noun} {shown} changed in training and {verb} in no checkpoint; if a resume needs {pronoun}: {remedy}"


def _attributes(components: Mapping[str, object]) -> Iterator[tuple[_StatePath, Any, object]]:
    """Yield each attribute that may be state: its path, its value, and the object that has it."""
    torchs = set_by_torch()
    for name, component in components.items():
        kind = kind_of(component)
        if kind == MODULE:
            inner = unwrap(component)  # type: ignore[arg-type]
            if is_flattened(inner):
                continue
            for path, module in inner.named_modules():
                if not _is_skipped(module) and type(module).get_extra_state is nn.Module.get_extra_state:
                    for attribute, value in vars(module).items():
                        if attribute not in torchs and _is_checked(value):
                            yield _StatePath(name, path, attribute), value, module
        elif kind in (OPTIMIZER, SCHEDULER, STATEFUL) and not _is_skipped(component):
            for attribute, value in getattr(component, "__dict__", {}).items():
                if attribute not in torchs and _is_checked(value):
                    yield _StatePath(name, "", attribute), value, component


def _is_skipped(value: object) -> bool:
    if isinstance(value, RankZeroComponent):
        return True  # a tracker: it keeps what it wrote, and its caches are made again
    return f"{type(value).__module__}.".startswith(_SKIPPED_HOMES)


def _is_checked(value: object) -> bool:
    return type(value) in _PLAIN or type(value) in (list, tuple, deque, dict, set, torch.Tensor)


def _mark(value: Any) -> object:
    """Return a mark of an attribute's value that changes when the value changes."""
    if isinstance(value, torch.Tensor):
        return id(value), version_counter(value)
    if isinstance(value, (list, tuple, deque, dict, set)):
        elements = list(value.items() if isinstance(value, dict) else value) if len(value) <= ELEMENTS_MAX else []
        return type(value), len(value), repr([element for element in elements if _is_plain(element)])
    return type(value), repr(value)


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(type(element) in _PLAIN for element in value))


def _is_passing(value: object) -> bool:
    """Return whether the value is a result of the last forward pass, which the next forward pass computes again."""
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def _is_given(owner: object, attribute: str, value: object) -> bool:
    """Return whether the object's state has the attribute: under its name, or a tensor with the same memory, or an
    equal plain value.

    An optimizer's state has many numbers, so for an optimizer a plain value counts only under its name.
    """
    if isinstance(owner, nn.Module) and not _gives_state_itself(owner):
        return False
    try:
        state = owner.state_dict()  # type: ignore[attr-defined]
    except Exception:  # the object's own code failed; this check only serves a report
        return True
    keys, values = set[str](), list[object]()
    _collect(state, keys, values)
    if attribute in keys or attribute.strip("_") in {key.strip("_") for key in keys}:
        return True
    if isinstance(value, torch.Tensor):
        return any(
            each is value or (isinstance(each, torch.Tensor) and each.data_ptr() == value.data_ptr()) for each in values
        )
    if isinstance(owner, torch.optim.Optimizer) or type(value) not in (int, float, str):
        return False
    return any(type(each) is type(value) and each == value for each in values)


def _gives_state_itself(module: nn.Module) -> bool:
    cls = type(module)
    return cls.state_dict is not nn.Module.state_dict or not saves_as_torch(cls)


def _collect(value: object, keys: set[str], values: list[object], depth: int = 0) -> None:
    if isinstance(value, Mapping) and depth < 4:
        for key, element in value.items():
            keys.add(str(key))
            _collect(element, keys, values, depth + 1)
    elif isinstance(value, (list, tuple)) and depth < 4:
        for element in value:
            _collect(element, keys, values, depth + 1)
    else:
        values.append(value)
