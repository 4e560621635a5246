"""What users hand over, checked: each with an error that says what to give instead."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from relight.capture import Captured
from relight.checkpointer.beat import be_watched
from relight.checkpointer.observer import observers
from relight.errors import ConfigError
from relight.format import dtype_named
from relight.policy import Compact, Keep, Limits, Peers, Tiers, Trigger
from relight.policy.compact import LOSSY, lossy_of
from relight.store.urls import split_run

EVERY, ONE = "every rank", "rank 0"
"""Who may write."""


def where_to(path: str | os.PathLike[str] | Tiers, run: str | None) -> tuple[str, str, Tiers | None]:
    """The store that saves commit in, the run's name, and all tiers if there are further ones. Observers may have it elsewhere."""
    tiers = path if isinstance(path, Tiers) else None
    if tiers is not None and run is not None:
        raise ConfigError("run= does not go with Tiers(…)", hint="each tier's URL ends in the run's name")
    given = tiers.nearest.url if tiers is not None else path
    url, name = (os.fspath(given), run) if run is not None else split_run(given)  # type: ignore[arg-type]
    be_watched()
    meant = (url, name)
    for observer in observers:
        url, name = observer.place(url, name)
    return url, name, tiers if (url, name) == meant else None


def wants_background(option: bool | None) -> bool:
    """The option, else ``RELIGHT_BACKGROUND``, else yes."""
    if option is not None:
        return bool(option)
    text = os.environ.get("RELIGHT_BACKGROUND", "1").lower()
    if text not in ("0", "1", "false", "true", "no", "yes"):
        raise ConfigError(f"RELIGHT_BACKGROUND is 1 or 0, not {text[:40]!r}")
    return text in ("1", "true", "yes")


def check_writer(writer: str) -> str:
    """Who writes."""
    if writer not in (EVERY, ONE):
        raise ConfigError(f"writer= is {EVERY!r} or {ONE!r}, not {writer!r}")
    return writer


def check_limits(limits: Limits | None) -> Limits:
    """What saves may take; the defaults for None."""
    if limits is not None and not isinstance(limits, Limits):
        raise ConfigError(f"limits= takes relight.Limits(…), not {limits!r}")
    return limits or Limits()


def check_keep(keep: Keep | None) -> Keep | None:
    """Which to keep."""
    if keep is not None and not isinstance(keep, Keep):
        raise ConfigError(f"keep= takes relight.keep(…), not {keep!r}")
    return keep


def check_compact(compact: Compact | bool | None) -> Compact | None:
    """How saves are made smaller; ``True`` is the usual way."""
    if compact is not None and not isinstance(compact, (Compact, bool)):
        raise ConfigError(f"compact= takes relight.Compact(…), True or False, not {compact!r}")
    rules = Compact() if compact is True else compact or None
    asked = lossy_of(os.environ.get(LOSSY, ""))
    return replace(rules or Compact(reuse=False, codecs="never"), lossy=asked) if asked else rules


def check_peers(peers: Peers | None, writer: str, background: bool) -> Peers | None:
    """Who protects whom."""
    if peers is None:
        return None
    if not isinstance(peers, Peers):
        raise ConfigError(f"peers= takes relight.Peers(…), not {peers!r}")
    if writer == ONE:
        raise ConfigError('peers= do not go with writer="rank 0"', hint="one rank has all there is: let every rank write")
    if not background:
        raise ConfigError("peers= need the agent, which holds snapshots in memory", hint="leave background= and RELIGHT_BACKGROUND alone")
    return peers


def check_components(state: Mapping[str, object] | None, components: dict[str, object]) -> dict[str, object]:
    """All components by name."""
    merged = dict(state or {})
    for name, value in components.items():
        if name in merged:
            raise ConfigError(f"component {name!r} is given twice")
        merged[name] = value
    for name in merged:
        if not name or name == "rng" or name == "grad" or "/" in name:
            raise ConfigError(f"{name!r} cannot be a component's name", hint="'rng' and 'grad' are Relight's own; '/' separates levels")
    if not merged:
        raise ConfigError("nothing to save", hint="Checkpointer(path, model=model, optimizer=optimizer, …)")
    return merged


def plain_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that is JSON and nothing else."""
    try:
        return json.loads(json.dumps(dict(metadata), allow_nan=False))  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"metadata is not JSON: {error}") from None


def full_bytes(state: Captured) -> int:
    """The size of the state, of all ranks together, once an optimizer that has no state yet has two moments a parameter."""
    sizes = [(math.prod(item.shape) * dtype_named(item.dtype).itemsize, item) for item in state.items]
    trainable = sum(size for size, item in sizes if item.trainable)
    has_moments = any(item.role == "optim" for item in state.items)
    return sum(size for size, _ in sizes) + (0 if has_moments else 2 * trainable)


def numbers_for(trigger: Trigger | None, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those of ``metrics`` that the trigger asks for, read."""
    wanted = {name for name, _ in trigger.metrics} if trigger is not None else ()
    return {name: as_number(name, metrics[name]) for name in wanted if name in metrics}


def as_they_are(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics for a save of the same step that comes later: a tensor may hold another value by then. Waits for no device. What is no
    number is left out: it may not keep a last state from being saved."""
    numbers = {name: value for name, value in metrics.items() if getattr(value, "ndim", 0) == 0 and hasattr(value, "__float__")}
    return {name: value.detach().clone() if hasattr(value, "detach") else value for name, value in numbers.items()}


def as_number(name: str, value: Any) -> float:
    """A metric as a float; a tensor is read, which waits for its device."""
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"metric {name!r} is not a number: {error}") from None


