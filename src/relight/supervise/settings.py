"""``relight.toml``: the table ``[supervise]``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from relight.errors import ConfigError
from relight.settings.file import checked
from relight.supervise.decide import SuperviseRules
from relight.supervise.limits import HangTimeouts
from relight.supervise.notices import sources_of
from relight.supervise.prediction_thread import Foreseen


@dataclass(frozen=True, slots=True)
class Start:
    """How a life begins."""

    spares: bool = True
    """Whether processes wait, with their imports done, to take the place of the ranks: a process and its memory for each rank."""
    preload: tuple[str, ...] = ()
    """What they import besides torch and Relight."""
    grace_s: float = 0.0
    """How long there is between SIGTERM and SIGKILL when the machine is wanted back; 0: nobody knows. ``RELIGHT_GRACE_S`` beats it."""

    def __post_init__(self) -> None:
        if not isinstance(self.spares, bool):
            raise ConfigError(f"[supervise] spares is true or false, not {self.spares!r}")
        grace_s = self.grace_s
        if isinstance(grace_s, bool) or not isinstance(grace_s, (int, float)) or not 0 <= grace_s <= 86400:
            raise ConfigError(f"[supervise] grace_s is a number of seconds, at most a day, not {grace_s!r}")
        names = self.preload
        if not isinstance(names, (list, tuple)) or not all(isinstance(one, str) and one.replace(".", "_").isidentifier() for one in names):
            raise ConfigError(f"[supervise] preload is a list of modules' names, not {names!r}")
        object.__setattr__(self, "preload", tuple(names))


@dataclass(frozen=True, slots=True)
class Announced:
    """What is heard of that comes from outside."""

    notices: tuple[str, ...] = ()
    """Where it is announced that the machine will be taken: ``aws``, ``gcp``, ``azure``, or addresses."""

    def __post_init__(self) -> None:
        told = self.notices
        if not isinstance(told, (list, tuple)) or not all(isinstance(one, str) for one in told):
            raise ConfigError(f"[supervise] notices is a list of addresses, not {told!r}")
        sources_of(told)
        object.__setattr__(self, "notices", tuple(told))


class RunSettings(NamedTuple):
    """All of it."""

    rules: SuperviseRules = SuperviseRules()
    patience: HangTimeouts = HangTimeouts()
    start: Start = Start()
    announced: Announced = Announced()
    foreseen: Foreseen = Foreseen()


def read_settings(path: Path | None) -> RunSettings:
    """As variables and the file say; as usual, if neither does. ``ConfigError`` for what is no setting, with its line or variable."""
    return checked("supervise", settings_of, path)[0]


def settings_of(table: dict[str, Any], where: str) -> RunSettings:
    """The table ``[supervise]`` as settings."""
    known = {one.name for kind in (SuperviseRules, HangTimeouts, Start, Announced, Foreseen) for one in fields(kind)}
    unknown = sorted(set(table) - known)
    if unknown:
        raise ConfigError(f"[supervise] has no {unknown[0]!r}", where=where, hint=f"it has {', '.join(sorted(known))}")
    return RunSettings(_of(SuperviseRules, table), _of(HangTimeouts, table), _of(Start, table), _of(Announced, table), _of(Foreseen, table))


def _of(kind: type[Any], table: dict[str, Any]) -> Any:
    return kind(**{one.name: table[one.name] for one in fields(kind) if one.name in table})
