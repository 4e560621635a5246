"""Values of ``[checkpoint]`` of relight.toml: defaults for options that the caller of a Checkpointer does not give.
Pure: works on a parsed table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from relight.errors import ConfigError
from relight.policy.adaptive import adaptive
from relight.policy.compact import Compact
from relight.policy.keep import Keep, keep
from relight.policy.limits import Limits
from relight.policy.peers import Peers
from relight.policy.tiers import Tier, Tiers, tier
from relight.policy.triggers import Trigger, every
from relight.settings.checkpoint_settings import CheckpointSettings
from relight.settings.error_location import Keys, located
from relight.settings.validation import decode


@dataclass(frozen=True, slots=True)
class FileTiers:
    """``[checkpoint.tiers]``: stores, near to far, without the run's name, which the script gives."""

    tables: tuple[tuple[str, Mapping[str, Any]], ...]
    """Each tier's name, and the arguments of ``relight.tier``."""

    def tiers_of(self, store: str, run: str) -> Tiers:
        """Return the tiers of a run. A table without ``url`` is the store that the script names; without such a table it is ``near``."""
        made: dict[str, Tier] = {}
        if not any("url" not in table for _, table in self.tables):
            made["near"] = tier(_place(store, run))
        for name, table in self.tables:
            urls = _urls(table) or [store]
            rest = {key: value for key, value in table.items() if key not in ("url", "keep")}
            kept = keep(**table["keep"]) if "keep" in table else None
            made[name] = tier(*(_place(url, run) for url in urls), keep=kept, **rest)
        return Tiers(**made)


@dataclass(frozen=True, slots=True)
class Defaults:
    """The file's values; None: the file has none."""

    save: Trigger | None = None
    keep: Keep | None = None
    limits: Limits | None = None
    compact: Compact | None = None
    peers: Peers | None = None
    background: bool | None = None
    takeover: str | None = None
    tiers: FileTiers | None = None


_MAKERS: dict[str, Callable[..., Any]] = {
    "adaptive": adaptive, "every": every, "keep": keep, "limits": Limits, "compact": Compact, "peers": Peers,
}  # fmt: skip


def defaults_of(table: Mapping[str, Any], where: str) -> Defaults:
    """Return the values of the table ``CheckpointSettings``. Raise ``ConfigError`` for an invalid one.

    With ``adaptive`` and ``every``, a save is due when either trigger is.
    """
    decode(table, CheckpointSettings, "checkpoint", where)
    made = {name: _made((name,), table[name], where) for name in _MAKERS if name in table}
    triggers = [made.pop(name) for name in ("adaptive", "every") if name in made]
    save = None if not triggers else triggers[0] if len(triggers) == 1 else triggers[0] | triggers[1]
    tiers = _tiers(table["tiers"], where) if table.get("tiers") else None
    return Defaults(save=save, background=table.get("background"), takeover=table.get("takeover"), tiers=tiers, **made)


def _tiers(tables: Mapping[str, Mapping[str, Any]], where: str) -> FileTiers:
    """Return the table of tiers, checked with an example run's name, so that a mistake is found before a job needs
    it."""
    near = [name for name, table in tables.items() if "url" not in table]
    with located(tables, ("tiers",), where, "[checkpoint.tiers]: "):
        if len(near) > 1 or (near and near[0] != next(iter(tables))):
            raise ConfigError(f"{near[-1]} has no url", hint="only the first, the script's own store, needs none")
        if near and len(tables) == 1:
            example = '[checkpoint.tiers.cold] with url = "s3://bucket/runs"'
            raise ConfigError(f"{near[0]} has no url, so there is no further store", hint=example)
        for name, table in tables.items():
            if "keep" in table:
                _made(("tiers", name, "keep"), table["keep"], where)
        tiers = FileTiers(tuple((name, dict(table)) for name, table in tables.items()))
        tiers.tiers_of("/relight-checks-a-file", "run")
    return tiers


def _urls(table: Mapping[str, Any]) -> list[str]:
    url = table.get("url", [])
    return [url] if isinstance(url, str) else list(url)


def _place(store: str, run: str) -> str:
    return f"{store.rstrip('/')}/{run}"


def _made(keys: Keys, table: Mapping[str, Any], where: str) -> Any:
    with located(table, keys, where, f"[{'.'.join(('checkpoint', *keys))}]: "):
        return _MAKERS[keys[-1]](**table)
