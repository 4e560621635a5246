"""Class names of components: recorded with each checkpoint, compared when it is restored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from relight.capture.kinds import MODULE, RNG, VALUE, kind_of, unwrap
from relight.format.class_names import name_in
from relight.torch_private.modules import DERIVING

_INNER = {
    "ZeroRedundancyOptimizer": "optim",
    "PostLocalSGDOptimizer": "optim",
    "AcceleratedOptimizer": "optimizer",
    "AcceleratedScheduler": "scheduler",
}
"""Wrappers around an optimizer or scheduler: by class name, the attribute that holds it."""


def inner_of(value: Any) -> Any:
    """Return the optimizer or scheduler inside wrappers; any other value unchanged."""
    seen: set[int] = set()
    while id(value) not in seen:
        seen.add(id(value))
        value = getattr(value, _INNER.get(type(value).__name__, ""), None) or value
    return value


def class_path(value: Any) -> str:
    """Return ``module:qualified name`` of a component's class, without wrappers."""
    own = unwrap(value) if isinstance(value, torch.nn.Module) else inner_of(value)
    bases = [base for base in type(own).__mro__ if not f"{base.__module__}.".startswith(DERIVING)]
    return f"{bases[0].__module__}:{bases[0].__qualname__}"


def class_paths(components: Mapping[str, object]) -> dict[str, str]:
    """Return the class of each component that is an object with a state, by the component's name."""
    return {name: class_path(value) for name, value in components.items() if kind_of(value) not in (VALUE, RNG)}


def renamed_classes(classes: Mapping[str, str], rename: Callable[[str], str]) -> dict[str, str]:
    """Return the classes under the live names of their components."""
    return {rename(f"{name}/").partition("/")[0]: path for name, path in classes.items()}


def is_torchs(path: str) -> bool:
    """Return whether the class is one of torch's own optimizers or schedulers."""
    return path.partition(":")[0].startswith("torch.optim")


def lineage(value: Any) -> list[str]:
    """Return the paths of a component's class and its bases, up to the first one of ``torch.optim`` or to torch's base of modules.

    A subclass of AdamW counts as AdamW. AdamW itself, which is a subclass of Adam in torch, does not count as Adam.
    """
    own = unwrap(value) if kind_of(value) == MODULE else inner_of(value)
    paths: list[str] = []
    for base in type(own).__mro__:
        path = f"{base.__module__}:{base.__qualname__}"
        if path in ("torch.nn.modules.module:Module", "builtins:object"):
            break
        paths.append(path)
        if is_torchs(path):
            break
    return paths


def is_of(value: Any, stored: str | None) -> bool:
    """Return whether ``value`` is of the recorded class, by its name, or of a subclass. True if none was recorded."""
    return stored is None or name_in(stored) in map(name_in, lineage(value))
