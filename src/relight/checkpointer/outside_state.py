"""State that changes in training and that no checkpoint holds: attributes of components that their ``state_dict()`` leaves out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from relight.capture.flattened import is_flattened
from relight.capture.kinds import MODULE, OPTIMIZER, SCHEDULER, STATEFUL, kind_of, unwrap
from relight.observe import emit

SHOWN_MAX, ELEMENTS_MAX = 5, 16
"""Attributes that one sentence names, and elements of a container that are compared."""
SAVES_MAX = 2
"""Saves after which is looked for such state: what did not change by then is reported by ``describe_state()`` only."""
_SKIPPED_HOMES = ("torch.", "torchdata.", "accelerate.", "lightning", "pytorch_lightning", "deepspeed.", "datasets.")
"""Packages of which no class is looked at: their objects keep caches and counters, or give all that a resume needs in their state."""
_TORCHS = frozenset(vars(nn.Module())) | {
    "training", "_opt_called", "_step_count", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured",
}  # fmt: skip
"""Attributes that torch itself sets on modules and optimizers."""
_PLAIN = (bool, int, float, complex, str, type(None))


class _StatePath(NamedTuple):
    component: str
    path: str
    """Of the object within the component; empty for the component itself."""
    attribute: str


class OutsideState:
    """The attributes of one Checkpointer's components: as they were when it was made, and which of them have changed since.

    Looking costs about 2 µs for each module and attribute of a class that is not torch's. Nothing of them is copied or held.
    """

    def __init__(self, components: Mapping[str, object], reports: bool) -> None:
        """``reports``: whether this rank emits events."""
        self._components, self._reports = components, reports
        self._before = {at: _mark(value) for at, value, _ in _attributes(components)}
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
        for at, value, owner in _attributes(self._components):
            if at in self._before and self._before[at] == _mark(value):
                continue
            if at not in self._before and value is None:
                continue
            if not _is_passing(value) and not _is_given(owner, at.attribute, value):
                changed.setdefault(at.component, []).append(f"{at.path}.{at.attribute}" if at.path else at.attribute)
        return [(name, _sentence(name, self._components[name], names), names) for name, names in changed.items()]


def _sentence(name: str, component: object, names: list[str]) -> str:
    shown = ", ".join(names[:SHOWN_MAX]) + (f" and {len(names) - SHOWN_MAX} more" if len(names) > SHOWN_MAX else "")
    what, are, them = ("attributes", "are", "them") if len(names) > 1 else ("attribute", "is", "it")
    way = "register_buffer(), or get_extra_state() and set_extra_state()" if isinstance(component, nn.Module) else "its state_dict()"
    return f"{name}: the {what} {shown} changed in training and {are} in no checkpoint; if a resume needs {them}: {way}"


def _attributes(components: Mapping[str, object]) -> Iterator[tuple[_StatePath, Any, object]]:
    """Each attribute that may be state: where it is, its value, and the object that has it."""
    for name, component in components.items():
        kind = kind_of(component)
        if kind == MODULE:
            inner = unwrap(component)  # type: ignore[arg-type]
            if is_flattened(inner):
                continue
            for path, module in inner.named_modules():
                if not _is_skipped(module) and type(module).get_extra_state is nn.Module.get_extra_state:
                    for attribute, value in vars(module).items():
                        if attribute not in _TORCHS and _is_looked_at(value):
                            yield _StatePath(name, path, attribute), value, module
        elif kind in (OPTIMIZER, SCHEDULER, STATEFUL) and not _is_skipped(component):
            for attribute, value in getattr(component, "__dict__", {}).items():
                if attribute not in _TORCHS and _is_looked_at(value):
                    yield _StatePath(name, "", attribute), value, component


def _is_skipped(value: object) -> bool:
    return f"{type(value).__module__}.".startswith(_SKIPPED_HOMES)


def _is_looked_at(value: object) -> bool:
    return type(value) in _PLAIN or type(value) in (list, tuple, deque, dict, set, torch.Tensor)


def _mark(value: Any) -> object:
    """What tells two values of an attribute apart; equal for the same one."""
    if isinstance(value, torch.Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if isinstance(value, (list, tuple, deque, dict, set)):
        elements = list(value.items() if isinstance(value, dict) else value) if len(value) <= ELEMENTS_MAX else []
        return type(value), len(value), repr([one for one in elements if _is_plain(one)])
    return type(value), repr(value)


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(type(one) in _PLAIN for one in value))


def _is_passing(value: object) -> bool:
    """Whether it is a result of the last forward pass: the next one makes it again."""
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def _is_given(owner: object, attribute: str, value: object) -> bool:
    """Whether the object's state has the attribute: by its name, a tensor by its memory, a plain value by what it is.

    An optimizer's state has numbers of all kinds, so there a plain value counts by its name only.
    """
    if isinstance(owner, nn.Module) and not _gives_state_itself(owner):
        return False
    try:
        state = owner.state_dict()  # type: ignore[attr-defined]
    except Exception:  # another object's code, asked for a report only
        return True
    keys, values = set[str](), list[object]()
    _collect(state, keys, values)
    if attribute in keys or attribute.strip("_") in {key.strip("_") for key in keys}:
        return True
    if isinstance(value, torch.Tensor):
        return any(one is value or (isinstance(one, torch.Tensor) and one.data_ptr() == value.data_ptr()) for one in values)
    if isinstance(owner, torch.optim.Optimizer) or type(value) not in (int, float, str):
        return False
    return any(type(one) is type(value) and one == value for one in values)


def _gives_state_itself(module: nn.Module) -> bool:
    cls = type(module)
    return cls.state_dict is not nn.Module.state_dict or cls._save_to_state_dict is not nn.Module._save_to_state_dict


def _collect(value: object, keys: set[str], values: list[object], depth: int = 0) -> None:
    if isinstance(value, Mapping) and depth < 4:
        for key, one in value.items():
            keys.add(str(key))
            _collect(one, keys, values, depth + 1)
    elif isinstance(value, (list, tuple)) and depth < 4:
        for one in value:
            _collect(one, keys, values, depth + 1)
    else:
        values.append(value)
