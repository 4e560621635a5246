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
    settings = decode(table, CheckpointSettings, "checkpoint", where)
    made = {name: _made(name, table[name], where) for name in _MAKERS if name in table}
    triggers = [made.pop(name) for name in ("adaptive", "every") if name in made]
    save = None if not triggers else triggers[0] if len(triggers) == 1 else triggers[0] | triggers[1]
    return Defaults(
        save=save,
        background=settings.background if "background" in table else None,
        takeover=settings.takeover if "takeover" in table else None,
        tiers=_tiers(table["tiers"], where) if table.get("tiers") else None,
        **made,
    )


def _tiers(tables: Mapping[str, Mapping[str, Any]], where: str) -> FileTiers:
    """Return the table of tiers, checked with an example run's name, so that a mistake is found before a job needs
    it."""
    example = '[checkpoint.tiers.cold] with url = "s3://bucket/runs"'
    near = [name for name, table in tables.items() if "url" not in table]
    if len(near) > 1 or (near and near[0] != next(iter(tables))):
        hint = "only the first, the script's own store, needs none"
        raise ConfigError(f"[checkpoint.tiers.{near[-1]}] has no url", where=where, hint=hint)
    if near and len(tables) == 1:
        raise ConfigError("[checkpoint.tiers] names no further store", where=where, hint=example)
    for name, table in tables.items():
        if "url" in table and not _urls(table):
            raise ConfigError(
                f"[checkpoint.tiers.{name}] url is a store, or a list of stores", where=where, hint=example
            )
        if "keep" in table:
            _made("keep", table["keep"], where)
    tiers = FileTiers(tuple((name, dict(table)) for name, table in tables.items()))
    try:
        tiers.tiers_of("/relight-checks-a-file", "run")
    except ConfigError as error:
        raise ConfigError(f"[checkpoint.tiers]: {error.what}", where=where, hint=error.hint) from None
    return tiers


def _urls(table: Mapping[str, Any]) -> list[str]:
    url = table.get("url", [])
    urls = [url] if isinstance(url, str) else list(url)
    return urls if all(each.strip() for each in urls) else []


def _place(store: str, run: str) -> str:
    return f"{store.rstrip('/')}/{run}"


def _made(name: str, table: Mapping[str, Any], where: str) -> Any:
    try:
        return _MAKERS[name](**table)
    except ConfigError as error:
        raise ConfigError(f"[checkpoint.{name}]: {error.what}", where=where, hint=error.hint) from None
