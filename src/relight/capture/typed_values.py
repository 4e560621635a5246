"""Plain values that are stored without their class: enums, deques, named tuples. The live value determines the class."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from enum import Enum
from typing import Any

import torch

from relight.errors import IncompatibleState


def is_named_tuple(value: object) -> bool:
    """Return whether ``value`` is a named tuple, as ``collections.namedtuple`` and ``typing.NamedTuple`` make them."""
    return (
        isinstance(value, tuple)
        and type(value) is not tuple
        and hasattr(type(value), "_fields")
        and hasattr(type(value), "_make")
    )


def plain(value: Any) -> Any:
    """Return what is stored for an enum (its value), a deque (a list) or a named tuple (a tuple); None for others."""
    if isinstance(value, Enum):
        return value.value
    if type(value) is deque:
        return list(value)
    return tuple(value) if is_named_tuple(value) else None


def member(live: Enum, stored: Any, path: str) -> Enum:
    """Return the member of ``live``'s enum with the stored value. Raise ``IncompatibleState`` if there is none."""
    try:
        return type(live)(stored)
    except (ValueError, TypeError):
        names = ", ".join(option.name for option in list(type(live))[:8])
        raise IncompatibleState(
            f"no member of {type(live).__qualname__} has the stored value {stored!r:.80}",
            where=path,
            hint=f"its members are {names}",
        ) from None


def like(live: Any, stored: Any, path: str) -> Any:
    """Return ``stored`` with the classes that ``live`` has at the same places, in dicts, lists and tuples.

    The classes are enums, deques, named tuples, ``OrderedDict``, ``defaultdict`` and ``Counter``. A tensor goes to the
    device of the live one. ``live`` is not changed. Cost: one traversal of both.
    """
    if isinstance(live, Enum):
        return member(live, stored, path) if not isinstance(stored, Enum) else stored
    if isinstance(live, torch.Tensor) and isinstance(stored, torch.Tensor):
        return stored if stored.device == live.device or live.is_meta else stored.to(live.device)
    if isinstance(live, dict) and type(stored) is dict:
        entries = {key: like(live.get(key), value, f"{path}/{key}") for key, value in stored.items()}
        if type(live) is defaultdict:
            return defaultdict(live.default_factory, entries)
        return type(live)(entries) if type(live) in (OrderedDict, Counter) else entries
    if isinstance(live, (list, tuple, deque)) and type(stored) in (list, tuple):
        values = [like(live[i] if i < len(live) else None, value, f"{path}/{i}") for i, value in enumerate(stored)]
        if type(live) is deque:
            return deque(values, live.maxlen)
        if is_named_tuple(live) and len(live) == len(values):
            return type(live)._make(values)  # type: ignore[attr-defined,union-attr]
        return type(stored)(values)
    return stored
