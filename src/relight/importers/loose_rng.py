"""Find random number generators in a script's own dictionary by their values. Keys decide only between equal forms."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from relight.importers.rng_states import numpy_state, python_words
from relight.importers.tensors import is_tensor

_NAMED = re.compile(r"rng|random|seed", re.IGNORECASE)
_OWN = re.compile(r"loader|sampler|generator|dropout|data|augment", re.IGNORECASE)
"""Words in keys of generators that are not the process's own, so that they must not replace one."""
_DEVICES = (("cuda", re.compile(r"cuda|gpu", re.IGNORECASE)), ("xpu", re.compile("xpu", re.IGNORECASE)))
_CPU_BYTES = (5056, 5048)
"""Bytes of the state of torch's CPU generator, today and before torch 1.6."""
_LEVELS_MAX = 3
_NAMES = {"python": "Python's", "numpy": "numpy's", "torch": "torch's"}


@dataclass
class LooseRng:
    """The generators found: the component's state, the keys taken, and what to report."""

    node: dict[str, Any] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)


def loose_rng(entries: Mapping[Any, Any]) -> LooseRng:
    """Find the generators in a dictionary of ``torch.save``: ``rng_state``, ``cuda_rng_state``, nested dictionaries of them."""
    result = LooseRng()
    for key, value in entries.items():
        if type(key) is not str or not _NAMED.search(key) or _OWN.search(key):
            continue
        parts = dict(_parts(key, value, 0))
        if not parts or None in parts:
            if _holds_state(value):
                result.left_out.append(
                    (key, "not the state of one process's generators: kept as values, and not restored")
                )
            continue
        if parts.keys() & result.node.keys():
            result.left_out.append((key, "a second state of the same generator: kept as values"))
            continue
        result.node |= {str(kind): state for kind, state in parts.items()}
        result.used.add(key)
    if result.node:
        missing = [name for kind, name in _NAMES.items() if result.node.setdefault(kind, None) is None]
        if missing:
            result.notes.append(
                f"rng: the file has no state of {', '.join(missing)} generator, which keeps its present state"
            )
    return result


def _parts(key: str, value: Any, level: int) -> Iterator[tuple[str | None, Any]]:
    """Yield each generator in ``value`` with its name in the component; ``(None, None)`` for any other value."""
    device = next((kind for kind, pattern in _DEVICES if pattern.search(key)), "")
    if isinstance(value, dict) and "bit_generator" not in value and level < _LEVELS_MAX:
        for name, inner in value.items():
            if inner is not None and inner != []:
                yield from _parts(f"{key} {name}", inner, level + 1)
    elif is_tensor(value):
        size = _state_bytes(value)
        if device and size:
            yield device, [value]
        else:
            yield ("torch", value) if size in _CPU_BYTES else (None, None)
    elif isinstance(value, (list, tuple)) and value and all(map(is_tensor, value)):
        sizes = {_state_bytes(state) for state in value}
        if device and 0 not in sizes:
            yield device, list(value)
        elif len(value) == 1 and sizes <= set(_CPU_BYTES):
            yield "torch", value[0]
        else:
            yield None, None
    elif (words := python_words(value)) is not None:
        yield "python", words
    elif (legacy := numpy_state(value)) is not None:
        yield "numpy", legacy
    elif level and not isinstance(value, (list, tuple)):
        return  # a seed, or a device's name
    else:
        yield None, None


def _state_bytes(value: Any) -> int:
    """Return the bytes of a generator's state; 0 if the tensor cannot be one."""
    return int(value.shape[0]) if value.dtype == "uint8" and len(value.shape) == 1 and value.shape[0] else 0


def _holds_state(value: Any) -> bool:
    """Return whether the value is more than a seed or a name, so that its omission is reported."""
    return is_tensor(value) or (isinstance(value, (list, tuple, dict)) and len(value) > 0)
