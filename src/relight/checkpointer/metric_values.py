"""Metrics as callers give them: checked at the call, read when a save or a trigger needs them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from relight.errors import ConfigError, shown
from relight.observe import emit
from relight.settings.utf8 import is_utf8
from relight.units import size_text

NAME_MAX = 500
"""Characters of a metric's name."""
METRICS_BYTES_MAX = 256 << 10
"""Bytes that the metrics of one save take as JSON: a record of the log, which holds them, has a limit."""
_NUMBER_BYTES = 32
_FEW = 64
"""Number of metrics that always fit within the limit, whatever their names."""
_reported: set[str] = set()
"""Names of omitted metrics that this process has reported."""


def check_metrics(metrics: Any) -> None:
    """Raise ``ConfigError`` for the first metric that is not a number. Does not wait for a device; costs a type check for each metric.

    Numbers are ints, floats, bools, NumPy's scalars and tensors of one element. A text or None would fail only when a save reads it,
    which may be hours later, and would look like a failed save.
    """
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"metrics= must be a dict of numbers, not {shown(metrics)}", hint='metrics={"loss": loss}')
    for name, value in metrics.items():
        kind = type(value)
        if kind is float or kind is bool:
            if type(name) is str and len(name) <= NAME_MAX and (name.isascii() or is_utf8(name)):
                continue
        elif type(name) is str and len(name) <= NAME_MAX and (name.isascii() or is_utf8(name)) and _is_number(value):
            continue
        _refuse(name, value)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex() and value.device.type != "meta"
    dtype = getattr(value, "dtype", None)
    if dtype is not None:
        return getattr(dtype, "kind", "") in "biuf" and getattr(value, "size", 0) == 1
    if isinstance(value, int):
        return abs(value) < 1 << 1023
    return hasattr(value, "__float__")


def _refuse(name: Any, value: Any) -> None:
    if not isinstance(name, str):
        raise ConfigError(f"a metric's name must be a text, not {shown(name)}", where="metrics")
    if len(name) > NAME_MAX or not is_utf8(name):
        raise ConfigError(
            f"a metric's name must be a text of at most {NAME_MAX} characters, not {name[:40]!a}", where="metrics"
        )
    if value is None:
        hint = f"pass {name}= only at the steps that have one"
    elif isinstance(value, torch.Tensor) or hasattr(value, "dtype"):
        hint = f"{name}.mean(), or one element of it"
    elif isinstance(value, int):
        hint = "a float holds numbers up to 1e308"
    else:
        hint = "plain values that are not metrics go into state={…} or metadata={…} of the Checkpointer"
    raise ConfigError(f"metric {name!r} is not a number: {shown(value)}", where=f"metric {name}", hint=hint)


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics as floats. Reading a tensor waits for its device. Omit unreadable or surplus metrics, with a warning.

    A save must not fail for one of its metrics: it may be the only one before a machine is taken away.
    """
    numbers = {name: number for name, value in metrics.items() if (number := number_of(name, value)) is not None}
    if len(numbers) <= _FEW:
        return numbers
    bytes_left, fitting = METRICS_BYTES_MAX, dict[str, float]()
    for name, number in numbers.items():
        bytes_left -= len(json.dumps(name)) + _NUMBER_BYTES
        if bytes_left < 0:
            excess = f"{len(numbers) - len(fitting)} of {len(numbers)} metrics, from {name!r} on, are left out"
            _report(name, f"{excess}: a save records {size_text(METRICS_BYTES_MAX)} of metrics")
            break
        fitting[name] = number
    return fitting


def number_of(name: str, value: Any) -> float | None:
    """Return a metric as a float; None, with a warning, if it cannot be read. Reading a tensor waits for its device."""
    try:
        return float(value.item() if hasattr(value, "dtype") and hasattr(value, "item") else value)
    except Exception as error:  # the script's own type may raise anything, hours into training
        _report(
            name,
            f"metric {name!r} is left out: it cannot be read as a number ({type(error).__name__}: {str(error)[:200]})",
        )
        return None


def is_finite(name: str, value: Any) -> bool:
    """Return whether a metric has a finite value. Reading a tensor waits for its device."""
    number = number_of(name, value)
    return number is not None and math.isfinite(number)


def _report(name: str, text: str) -> None:
    if name not in _reported:
        _reported.add(name)
        emit("metric.unreadable", text, metric=name)


def as_they_are(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of metrics for a later save of the same step, because tensors and arrays may change.

    Does not wait for a device.
    """
    return {name: _copied(value) for name, value in metrics.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if hasattr(value, "dtype") and hasattr(value, "copy") else value
