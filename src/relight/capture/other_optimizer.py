"""Recognise a state that another class of optimizer has stored."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, NamedTuple

from relight.capture.classes import class_path, inner_of, is_of, is_torchs, lineage
from relight.capture.optimizers import is_custom
from relight.format.class_names import name_in

_ENTRIES: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    name: (frozenset(always.split()), frozenset(sometimes.split()))
    for name, always, sometimes in (
        ("Adam", "step exp_avg exp_avg_sq", "max_exp_avg_sq"),
        ("AdamW", "step exp_avg exp_avg_sq", "max_exp_avg_sq"),
        ("RAdam", "step exp_avg exp_avg_sq", ""),
        ("SparseAdam", "step exp_avg exp_avg_sq", ""),
        ("NAdam", "step exp_avg exp_avg_sq mu_product", ""),
        ("Adamax", "step exp_avg exp_inf", ""),
        ("Adagrad", "step sum", ""),
        ("Adadelta", "step square_avg acc_delta", ""),
        ("RMSprop", "step square_avg", "momentum_buffer grad_avg"),
        ("Rprop", "step prev step_size", ""),
        ("ASGD", "step eta mu ax", ""),
        ("SGD", "", "momentum_buffer"),
        ("Muon", "momentum_buffer", ""),
    )
}
"""State entries of torch's optimizers for a parameter: always, and with some settings only."""
_FLAGS = frozenset(("foreach", "fused", "capturable", "differentiable", "maximize", "decoupled_weight_decay"))
"""Settings that depend on torch's version, choose an implementation, or belong to the class."""
_SCHEDULERS = frozenset(
    ("params", "param_names", "initial_lr", "swa_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")
)
"""Entries of groups that schedulers and torch itself add."""


class Other(NamedTuple):
    """Result of ``other_optimizer``: the state was stored by another class than the live optimizer's."""

    stored: str
    live: str
    fits: bool
    """Whether its entries are the live optimizer's, so that they can be restored."""
    entries: str

    def __str__(self) -> str:
        if self.fits:
            return f"stored by {self.stored}, the live optimizer is {self.live}, which updates in another way"
        return (
            f"stored by {self.stored}{self.entries}, the live optimizer is {self.live}: neither state nor settings fit"
        )


def other_optimizer(
    optimizer: Any, node: Mapping[str, Any], stored: str | None, *, imported: bool = False
) -> Other | None:
    """Return what is known of the class that stored ``node``; None if it is the live optimizer's.

    ``stored``: its recorded path, or None for an older checkpoint, which is judged by its entries. ``imported``:
    another framework stored it, so its groups may lack settings. If not both classes are torch's, only their entries
    count: a subclass may have been renamed.
    """
    live = inner_of(optimizer)
    if stored is not None and is_of(optimizer, stored):
        return None
    entries = {
        key for entry in node["state"].values() if isinstance(entry, dict) for key in entry if isinstance(key, str)
    }
    settings = {key for group in node["groups"] for key in group if isinstance(key, str)}
    differs = stored is not None and is_torchs(stored) and any(map(is_torchs, lineage(optimizer)))
    if not (differs or _foreign_entries(live, entries) or (not imported and _foreign_settings(live, settings))):
        return None
    shown = f" ({', '.join(sorted(entries - {'step'}))})" if entries - {"step"} else ""
    fits = bool(entries) and not is_custom(optimizer) and _is_complete_state(live, entries)
    return Other(
        name_in(stored) if stored is not None else _guess(entries, settings),
        name_in(class_path(optimizer)),
        fits,
        shown,
    )


def _kept_by(live: Any) -> Set[str]:
    """Return the entries that the live optimizer has for its parameters now."""
    return {key for entry in live.state.values() if isinstance(entry, dict) for key in entry if isinstance(key, str)}


def _known(live: Any) -> tuple[frozenset[str], frozenset[str]] | None:
    path = lineage(live)[-1]
    return _ENTRIES.get(name_in(path)) if is_torchs(path) and type(live).__name__ == name_in(path) else None


def _is_complete_state(live: Any, entries: Set[str]) -> bool:
    """Return whether a state of exactly these entries is complete for the live optimizer."""
    kept, known_settings = _kept_by(live), _known(live)
    if known_settings is not None:
        return known_settings[0] <= entries <= known_settings[0] | known_settings[1]
    return kept == entries


def _foreign_entries(live: Any, entries: Set[str]) -> bool:
    kept, known_settings = _kept_by(live), _known(live)
    if not entries - {"step"}:
        return False
    if known_settings is not None:
        always, sometimes = known_settings
        return bool(entries - always - sometimes) and not (always <= entries and entries & (always | sometimes))
    if is_custom(live):
        return False  # its state_dict may have other entries than its state
    return bool(kept and entries - kept and kept - entries)


def _foreign_settings(live: Any, settings: Set[str]) -> bool:
    live_keys = {key for group in live.param_groups for key in group}
    lacking = live.defaults.keys() - _FLAGS - settings
    return bool(lacking and settings - live_keys - _FLAGS - _SCHEDULERS)


def _guess(entries: Set[str], settings: Set[str]) -> str:
    """Return the likely name of the class, for a checkpoint that has not recorded it."""
    if {"exp_avg", "exp_avg_sq"} <= entries and "mu_product" not in entries:
        return "Adam or AdamW"
    for name, (always, sometimes) in _ENTRIES.items():
        if entries and always <= entries <= always | sometimes:
            return name
    if not entries:
        return (
            "SGD"
            if "dampening" in settings
            else "Adam or AdamW"
            if {"betas", "amsgrad"} <= settings
            else "another optimizer"
        )
    return "another optimizer"


def settings_of_both(optimizer: Any, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored group with only the settings that the live optimizer also has, without those of its class."""
    live_keys = {key for group in optimizer.param_groups for key in group}
    return {key: value for key, value in saved.items() if key == "params" or (key in live_keys and key not in _FLAGS)}
