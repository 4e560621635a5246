"""Who is asking, and what of all runs that reaches to: set once a request, asked wherever a run is looked up."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from relight.audit.effects import EFFECTS, role_of
from relight.audit.effects import ROLES as ROLES
from relight.errors import CheckpointNotFound, ConfigError, RelightError
from relight.run_names import dir_of, run_name

NOTHING = "\0"
"""A scope that no run is in."""
ANOTHER = "(another run)"
"""Shown in place of the name of a run that the asker does not reach."""
_IN_A_RUN = re.compile(r"(?:(?<= \[)|(?<![^/\n]))((?:(?! \[)[^/\n])+)/(?=[0-9]{10,16}-[0-9a-z]{10}-e[0-9]|log(?![A-Za-z0-9_-]))")
"""A run's name before a file of it. Names may have spaces and quotes, so the match begins at a slash, a line or a bracket."""


@dataclass(frozen=True)
class Caller:
    """Somebody who asks. ``scope``: empty for everything, ``STORE``, or ``STORE/RUN``; ``token`` is the id of what let him in."""

    name: str
    role: str
    scope: str = ""
    token: str = ""
    session: str = ""
    """The hash of the browser session, if it is one."""

    def may(self, role: str) -> bool:
        """Whether that role is no more than his."""
        return role in ROLES and rank_of(self.role) >= rank_of(role)


def rank_of(role: str) -> int:
    """Of two roles the higher one may more. ``ConfigError`` for what is none."""
    if role not in ROLES:
        raise ConfigError(f"{role[:40]!r} is no role", hint=f"they are {', '.join(ROLES)}")
    return ROLES.index(role)


_scope: ContextVar[str] = ContextVar("relight_serve_scope", default="")
_asker: ContextVar[str] = ContextVar("relight_serve_asker", default="")
ANONYMOUS = "anonymous "
"""How the asker of a request without credentials begins; the client's address follows."""


def asker() -> str:
    """Return what quotas count this request by: a token, a user of a proxy, or an address. Empty for the server's own work."""
    return _asker.get()


def reaches(store: str, run: str = "") -> bool:
    """Whether whoever is asking may know of this run; without one, of any run of that store."""
    scope = _scope.get()
    if not scope:
        return True
    in_store, _, in_run = scope.partition("/")
    return in_store == store and (not in_run or dir_of(in_run) == dir_of(run)) if run else in_store == store


def require(effect: str, who: Caller, store: str = "", run: str = "") -> None:
    """Raise unless ``who`` may cause ``effect`` on that run of that store: the one check of roles and scopes that actions make.

    ``ConfigError`` for a role that is too low, and for a run outside the token's scope that would be made.
    """
    role = role_of(effect)
    if not who.may(role):
        raise ConfigError(f"to {EFFECTS[effect].what} takes the role {role}; {who.name} has {who.role}")
    if store and not reaches(store, run):
        if effect == "create run":
            raise ConfigError(f"this token is for {who.scope} alone, so it makes no other run", hint="ask for a token of the whole store")
        raise CheckpointNotFound(f"no run {run[:80]!r} in store {store[:80]!r}")


def in_scope(scope: str, store: str, runs: Collection[str]) -> bool:
    """Return whether a change of these runs, of a whole store (no runs) or of anything (no store) concerns an asker of that scope."""
    in_store, _, in_run = scope.partition("/")
    return not scope or not store or (store == in_store and (not in_run or not runs or dir_of(in_run) in runs))


def masked(text: str) -> str:
    """Return ``text`` with ``ANOTHER`` for each run before a file's path that the asker does not reach.

    A checkpoint of a branch has its files in the run that it was made in, so errors name that run. What is masked depends on the text and
    the scope alone, not on which runs there are: else it would show whether a run of that name exists.
    """
    run = _scope.get().partition("/")[2]
    if not run or "/" not in text:
        return text
    own = {dir_of(run), run_name(dir_of(run))}

    def hide(match: re.Match[str]) -> str:
        name = match[1]
        mine = next((one for one in own if name.endswith(one)), None)
        if mine is not None and name[: -len(mine)][-1:] in ("", "'", '"', "(", "["):
            return match[0]
        return f"{ANOTHER}/"

    return _IN_A_RUN.sub(hide, text)


def masked_error(error: RelightError) -> RelightError:
    """Return ``error`` with all its texts ``masked``."""
    details = [masked(one) for one in error.details]
    return type(error)(masked(error.what), where=masked(error.where), hint=masked(error.hint), details=details, retryable=error.retryable)


def scope_now() -> str:
    """Return the scope of the request that is being answered."""
    return _scope.get()


def everything() -> bool:
    """Whether nothing is hidden from whoever is asking."""
    return not _scope.get()


@contextmanager
def asking(scope: str, asker: str = "") -> Iterator[None]:
    """Within it, ``scope`` is all there is, and quotas count ``asker``."""
    before, asked_before = _scope.set(scope), _asker.set(asker)
    try:
        yield
    finally:
        _asker.reset(asked_before)
        _scope.reset(before)
