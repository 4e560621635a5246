"""Metrics as callers give them: checked at the call, read when a save or a trigger needs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from relight.errors import ConfigError, shown


def check_metrics(metrics: Any) -> None:
    """``ConfigError`` that names the first metric that is not a number. Waits for no device; costs a type check for each.

    Numbers are ints, floats, bools, NumPy's scalars and tensors of one element. A text or None would fail only when a save reads it,
    which may be hours later, and would look like a failed save.
    """
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"metrics= is a dict of numbers, not {shown(metrics)}", hint='metrics={"loss": loss}')
    for name, value in metrics.items():
        kind = type(value)
        if kind is float or kind is bool:
            if type(name) is str:
                continue
        elif type(name) is str and _is_number(value):
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
        raise ConfigError(f"a metric's name is a text, not {shown(name)}", where="metrics")
    if value is None:
        hint = f"pass {name}= only at the steps that have one"
    elif isinstance(value, torch.Tensor) or hasattr(value, "dtype"):
        hint = f"{name}.mean(), or one element of it"
    elif isinstance(value, int):
        hint = "a float holds numbers up to 1e308"
    else:
        hint = "plain values that are no metrics go into state={…} or metadata={…} of the Checkpointer"
    raise ConfigError(f"metric {name!r} is not a number: {shown(value)}", where=f"metric {name}", hint=hint)


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """All of them, read: tensors wait for their device."""
    return {name: as_number(name, value) for name, value in metrics.items()}


def as_number(name: str, value: Any) -> float:
    """A metric as a float; a tensor is read, which waits for its device."""
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"metric {name!r} is not a number: {error}", where=f"metric {name}") from None


def as_they_are(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics for a save of the same step that comes later: a tensor may hold another value by then. Waits for no device."""
    return {name: value.detach().clone() if hasattr(value, "detach") else value for name, value in metrics.items()}

