"""Policies of a simulated run: the product's own policies, parsed from a line of text.

``adaptive,last=3,copies=1``: when to save, then retention (as ``relight.keep``), peers (as ``relight.Peers``),
recovery from failures (as ``[supervise]`` of relight.toml), failure prediction, further tiers.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from relight.errors import ConfigError
from relight.policy import Keep, Peers, keep
from relight.policy.adaptive import Adaptive, adaptive
from relight.policy.tiers import Tier, Tiers, tier
from relight.settings.amounts import bytes_of, seconds_of
from relight.settings.checkpoint_settings import AdaptiveSettings, KeepSettings, PeersSettings
from relight.settings.environment import typed
from relight.settings.kinds import SettingsTable
from relight.settings.supervise_settings import SuperviseRules

SCHEDULES = ("adaptive", "oracle", "young", "daly", "never")
USUAL = {
    "adaptive": "adaptive,last=3,hourly=8",
    "with peers": "adaptive,last=3,hourly=8,copies=1",
    "30 min": "30m,last=3,hourly=8",
    "3 h": "3h,last=3,hourly=8",
}
"""Policies that are compared by default."""
_STEPS = re.compile(r"([0-9]{1,12}) ?steps?\Z")


@dataclass(frozen=True, slots=True)
class PredictorModel:
    """A failure predictor: share of failures that it predicts, share of its alarms that are true, and lead time."""

    recall: float = 0.0
    precision: float = 1.0
    lead_s: float = 300.0
    """Mean of the exponential lead time."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Policy of one simulated run."""

    name: str
    text: str
    schedule: str
    """One of ``SCHEDULES``, ``every`` for a fixed time, or ``steps`` for a fixed number of steps."""
    every: float = 0.0
    """Seconds or steps."""
    adaptive: Adaptive = field(default_factory=Adaptive)
    """Bounds on the interval and on the overhead, for the adaptive schedule."""
    keep: Keep = field(default_factory=Keep)
    peers: Peers | None = None
    memory: bool = True
    """Whether an agent keeps the newest snapshot in memory and outlives the training processes."""
    local: bool = False
    """Whether the nearest store is the nodes' local disks, which are lost with a node."""
    tiers: tuple[Tier, ...] = ()
    foresee: PredictorModel | None = None
    drain: bool = False
    rules: SuperviseRules = field(default_factory=SuperviseRules)
    spares: int | None = None


_UNKNOWN = {"best", "metric", "mode", "prune_abandoned"}
"""Settings of ``keep`` that the simulator does not know: its checkpoints have no metrics."""
_KEEP = tuple(rule for rule in KeepSettings.__struct_fields__ if rule not in _UNKNOWN)
_ADAPTIVE = ("at_least", "at_most", "overhead")
_PEERS = ("copies", "data", "parity")
_RULES = SuperviseRules.__struct_fields__
_OTHERS = ("memory", "near", "far", "far_last", "recall", "precision", "lead", "drain", "spares")
KEYS = (*_ADAPTIVE, *_KEEP, *_PEERS, *_RULES, *_OTHERS)


def policy_of(text: str, name: str = "") -> Policy:
    """Return the policy that a line of text describes. Raise ``ConfigError`` if the text is invalid.

    >>> policy_of("30m,last=3,copies=1").peers.parity
    1
    """
    if len(text) > 500:
        raise ConfigError("a policy of more than 500 characters", where=f"{text[:40]}…")
    first, *pairs = [pair.strip() for pair in text.split(",")]
    values: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        key = key.strip()
        if not equals or not value.strip():
            raise ConfigError(
                f"{pair!r} is not key=value", where=text, hint=f"such as last=3; the keys: {', '.join(KEYS)}"
            )
        if key not in KEYS:
            close = difflib.get_close_matches(key, KEYS, n=1)
            raise ConfigError(
                f"a policy has no {key!r}",
                where=text,
                hint=f"did you mean {close[0]!r}?" if close else f"it has {', '.join(KEYS)}",
            )
        if key in values:
            raise ConfigError(f"{key!r} twice", where=text)
        values[key] = value.strip()
    schedule, every = _schedule(first, text)
    alone = next((key for key in _ADAPTIVE if key in values), None)
    if alone is not None and schedule != "adaptive":
        raise ConfigError(f"{alone} without adaptive", where=text, hint=f"adaptive,{alone}={values[alone]}")
    try:
        return Policy(name or text, text, schedule, every, **_parts(values))
    except ConfigError as error:
        raise ConfigError(error.what, where=text, hint=error.hint) from None


def _schedule(first: str, text: str) -> tuple[str, float]:
    if first in SCHEDULES:
        return first, 0.0
    if (steps := _STEPS.match(first)) and int(steps[1]):
        return "steps", float(steps[1])
    try:
        return "every", seconds_of(first, "a policy's schedule")
    except ConfigError:
        close = difflib.get_close_matches(first, SCHEDULES, n=1)
        hint = (
            f"did you mean {close[0]!r}?"
            if close
            else f"a policy begins with one of {', '.join(SCHEDULES)}, a time (30m), or 500steps"
        )
        raise ConfigError(f"{first[:40]!r} does not state when to save", where=text, hint=hint) from None


def _parts(settings: dict[str, str]) -> dict[str, Any]:

    def given(table: type[SettingsTable], keys: Sequence[str]) -> dict[str, Any]:
        return {key: typed(table, key, settings[key], key) for key in keys if key in settings}

    peers, schedule = given(PeersSettings, _PEERS), adaptive(**given(AdaptiveSettings, _ADAPTIVE))
    assert isinstance(schedule, Adaptive)
    return {
        "adaptive": schedule,
        "keep": keep(**given(KeepSettings, _KEEP)),
        "peers": Peers(**peers) if peers else None,
        "rules": SuperviseRules(**given(SuperviseRules, _RULES)),
        "memory": _choice("memory", settings.get("memory", "on"), {"on": True, "off": False}),
        "local": _choice("near", settings.get("near", "shared"), {"shared": False, "local": True}),
        "tiers": _tiers(settings),
        "foresee": _foreseeing(settings),
        "drain": _choice("drain", settings.get("drain", "off"), {"on": True, "off": False}),
        "spares": _whole("spares", settings["spares"], least=0) if "spares" in settings else None,
    }


def _tiers(settings: dict[str, str]) -> tuple[Tier, ...]:
    """Return the further tiers, nearest first: at most one."""
    if "far" not in settings:
        if "far_last" in settings:
            raise ConfigError(
                "far_last without far", hint="set far, such as far=20GB: bytes a second to the further tier"
            )
        return ()
    far_rules = keep(last=_whole("far_last", settings["far_last"])) if "far_last" in settings else None
    rate = bytes_of(settings["far"].removesuffix("/s"), "far")
    return Tiers(near="near", far=tier("far", keep=far_rules, bytes_per_second=float(rate))).further


def _foreseeing(settings: dict[str, str]) -> PredictorModel | None:
    if "recall" not in settings:
        alone = next((key for key in ("precision", "lead", "drain") if key in settings), None)
        if alone is not None:
            raise ConfigError(f"{alone} without recall", hint="recall=0.3: the share of failures that are foreseen")
        return None
    recall, precision = _share("recall", settings["recall"]), _share("precision", settings.get("precision", "1"))
    if not precision:
        raise ConfigError("precision is a share above 0")
    return PredictorModel(recall, precision, seconds_of(settings.get("lead", "5m"), "lead"))


def _choice(key: str, value: str, choices: dict[str, bool]) -> bool:
    if value not in choices:
        raise ConfigError(f"{key} must be {' or '.join(choices)}, not {value[:40]!r}")
    return choices[value]


def _whole(key: str, value: str, least: int = 1) -> int:
    if not re.fullmatch(r"[0-9]{1,12}", value) or int(value) < least:
        raise ConfigError(f"{key} must be a whole number from {least} up, not {value[:40]!r}")
    return int(value)


def _share(key: str, value: str) -> float:
    share = _number(key, value)
    if not 0 <= share <= 1:
        raise ConfigError(f"{key} must be a share from 0 to 1, not {value[:40]!r}")
    return share


def _number(key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{key} must be a number, not {value[:40]!r}")
    return number
