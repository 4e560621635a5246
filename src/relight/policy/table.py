"""``[checkpoint]`` of relight.toml: what a Checkpointer does where its caller does not say. Pure: the table comes parsed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from relight.errors import ConfigError
from relight.policy.adaptive import adaptive
from relight.policy.compact import Compact
from relight.policy.keep import Keep, keep
from relight.policy.limits import Limits
from relight.policy.peers import Peers
from relight.policy.when import Trigger, every


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the file says; None: nothing."""

    save: Trigger | None = None
    keep: Keep | None = None
    limits: Limits | None = None
    compact: Compact | None = None
    peers: Peers | None = None
    background: bool | None = None
    takeover: str | None = None


WAYS = ("ask", "refuse", "take")
"""What a start may do if another process still trains its run."""

_MAKERS: dict[str, Callable[..., Any]] = {
    "adaptive": adaptive, "every": every, "keep": keep, "limits": Limits, "compact": Compact, "peers": Peers,
}  # fmt: skip
_NOT_IN_A_FILE = {"adaptive": {"risk"}}


def defaults_of(table: Mapping[str, Any], where: str) -> Defaults:
    """The table's values: ``background``, ``takeover``, and the tables ``adaptive``, ``every``, ``keep``, ``limits``, ``compact``,
    ``peers``, each with the arguments of the function of that name. ``adaptive`` and ``every`` together: whichever comes first."""
    known = [*_MAKERS, "background", "takeover"]
    for name in table:
        if name not in known:
            raise ConfigError(f"[checkpoint] has no {name!r}", where=where, hint=f"it has {', '.join(known)}")
    background = table.get("background")
    if background is not None and not isinstance(background, bool):
        raise ConfigError(f"[checkpoint] background is true or false, not {background!r}", where=where)
    takeover = table.get("takeover")
    if takeover is not None and takeover not in WAYS:
        raise ConfigError(f'[checkpoint] takeover is "ask", "refuse" or "take", not {takeover!r}', where=where)
    made = {name: _made(name, table[name], where) for name in _MAKERS if name in table}
    triggers = [made.pop(name) for name in ("adaptive", "every") if name in made]
    save = None if not triggers else triggers[0] if len(triggers) == 1 else triggers[0] | triggers[1]
    return Defaults(save=save, background=background, takeover=takeover, **made)


def _made(name: str, given: object, where: str) -> Any:
    make = _MAKERS[name]
    parameters = inspect.signature(make).parameters.items()
    names = [one for one, how in parameters if how.kind is not how.POSITIONAL_ONLY and one not in _NOT_IN_A_FILE.get(name, ())]
    if not isinstance(given, Mapping):
        raise ConfigError(f"[checkpoint.{name}] is a table", where=where, hint=f"it has {', '.join(names)}")
    for one in given:
        if one not in names:
            raise ConfigError(f"[checkpoint.{name}] has no {one!r}", where=where, hint=f"it has {', '.join(names)}")
    try:
        return make(**given)
    except ConfigError as error:
        raise ConfigError(f"[checkpoint.{name}]: {error.what}", where=where, hint=error.hint) from None
    except TypeError as error:
        raise ConfigError(f"[checkpoint.{name}]: {error}", where=where, hint=f"it has {', '.join(names)}") from None
