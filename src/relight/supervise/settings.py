"""``relight.toml``: the table ``[supervise]``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from relight.errors import ConfigError
from relight.settings.file import checked
from relight.supervise.decide import SuperviseRules
from relight.supervise.limits import HangTimeouts
from relight.supervise.notices import endpoints_of
from relight.supervise.prediction_thread import Foreseen


@dataclass(frozen=True, slots=True)
class Start:
    """Settings of an incarnation's start and end."""

    spares: bool = True
    """Whether spares, with their imports done, wait to replace the ranks.

    Cost: a process and its memory for each rank.
    """
    preload: tuple[str, ...] = ()
    """Modules that spares import in addition to torch and Relight."""
    grace_s: float = 0.0
    """Seconds between SIGTERM and SIGKILL when the machine is wanted back; 0: unknown.

    ``RELIGHT_GRACE_S`` overrides it.
    """

    def __post_init__(self) -> None:
        if not isinstance(self.spares, bool):
            raise ConfigError(f"[supervise] spares is true or false, not {self.spares!r}")
        grace_s = self.grace_s
        if isinstance(grace_s, bool) or not isinstance(grace_s, (int, float)) or not 0 <= grace_s <= 86400:
            raise ConfigError(f"[supervise] grace_s is a number of seconds, at most a day, not {grace_s!r}")
        names = self.preload
        if not isinstance(names, (list, tuple)) or not all(
            isinstance(name, str) and name.replace(".", "_").isidentifier() for name in names
        ):
            raise ConfigError(f"[supervise] preload is a list of modules' names, not {names!r}")
        object.__setattr__(self, "preload", tuple(names))


@dataclass(frozen=True, slots=True)
class Announced:
    """Announcements from outside the job."""

    notices: tuple[str, ...] = ()
    """Sources of preemption notices: ``aws``, ``gcp``, ``azure``, or addresses."""

    def __post_init__(self) -> None:
        names = self.notices
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"[supervise] notices is a list of addresses, not {names!r}")
        endpoints_of(names)
        object.__setattr__(self, "notices", tuple(names))


class RunSettings(NamedTuple):
    """All settings of the table."""

    rules: SuperviseRules = SuperviseRules()
    patience: HangTimeouts = HangTimeouts()
    start: Start = Start()
    announced: Announced = Announced()
    foreseen: Foreseen = Foreseen()


def read_settings(path: Path | None) -> RunSettings:
    """Return the settings from environment variables and the file, else the defaults.

    Raise ``ConfigError`` for an invalid or unknown setting, with its line or variable.
    """
    return checked("supervise", settings_of, path)[0]


def settings_of(table: dict[str, Any], where: str) -> RunSettings:
    """Return the table ``[supervise]`` as settings."""
    keys = {field.name for kind in (SuperviseRules, HangTimeouts, Start, Announced, Foreseen) for field in fields(kind)}
    unknown = sorted(set(table) - keys)
    if unknown:
        raise ConfigError(f"[supervise] has no {unknown[0]!r}", where=where, hint=f"it has {', '.join(sorted(keys))}")
    return RunSettings(
        _of(SuperviseRules, table),
        _of(HangTimeouts, table),
        _of(Start, table),
        _of(Announced, table),
        _of(Foreseen, table),
    )


def _of(kind: type[Any], table: dict[str, Any]) -> Any:
    return kind(**{field.name: table[field.name] for field in fields(kind) if field.name in table})
