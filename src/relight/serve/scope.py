"""The caller of a request and the runs in its scope: set once for each request, checked at each access to a run."""

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
"""Shown in place of the name of a run outside the caller's scope."""
_IN_A_RUN = re.compile(
    r"(?:(?<= \[)|(?<![^/\n]))((?:(?! \[)[^/\n])+)/(?=[0-9]{10,16}-[0-9a-z]{10}-e[0-9]|log(?![A-Za-z0-9_-]))"
)
"""A run's name before a file of it. Names may have spaces and quotes, so the match begins at a slash, a line or a bracket."""


@dataclass(frozen=True)
class Caller:
    """A caller. ``scope``: ``STORE``, ``STORE/RUN``, or empty for everything. ``token``: the id of its token."""

    name: str
    role: str
    scope: str = ""
    token: str = ""
    session: str = ""
    """Secret of its browser session, or ``proxy``; empty for a program with a token."""

    def may(self, role: str) -> bool:
        """Return whether the caller's role includes ``role``."""
        return role in ROLES and rank_of(self.role) >= rank_of(role)


def rank_of(role: str) -> int:
    """Return the rank of a role: a higher one includes the lower ones. Raise ``ConfigError`` for an unknown role."""
    if role not in ROLES:
        raise ConfigError(f"{role[:40]!r} is not a role", hint=f"the roles are {', '.join(ROLES)}")
    return ROLES.index(role)


_scope: ContextVar[str] = ContextVar("relight_serve_scope", default="")
_asker: ContextVar[str] = ContextVar("relight_serve_asker", default="")
ANONYMOUS = "anonymous "
"""Prefix of the quota key of a request without credentials; the client's address follows."""


def asker() -> str:
    """Return the quota key of this request: its token, proxy user or address. Empty for the server's own work."""
    return _asker.get()


def reaches(store: str, run: str = "") -> bool:
    """Return whether this run is in the caller's scope. Without a run: whether any run of the store is."""
    scope = _scope.get()
    if not scope:
        return True
    in_store, _, in_run = scope.partition("/")
    return in_store == store and (not in_run or dir_of(in_run) == dir_of(run)) if run else in_store == store


def require(effect: str, who: Caller, store: str = "", run: str = "") -> None:
    """Raise unless ``who`` may cause ``effect`` on that run of that store. All actions check roles and scopes here.

    Raise ``ConfigError`` for a role that is too low, and for the creation of a run outside the scope. Raise ``CheckpointNotFound`` for
    any other effect on a run outside the scope, whether or not that run exists.
    """
    role = role_of(effect)
    if not who.may(role):
        raise ConfigError(f"to {EFFECTS[effect].what} needs the role {role}; {who.name} has {who.role}")
    if store and not reaches(store, run):
        if effect == "create run":
            raise ConfigError(
                f"this token is limited to {who.scope}, so it cannot create another run",
                hint="get a token for the whole store",
            )
        raise CheckpointNotFound(f"no run {run[:80]!r} in store {store[:80]!r}")


def in_scope(scope: str, store: str, runs: Collection[str]) -> bool:
    """Return whether a change of these runs, of a whole store (no runs) or of any store (no store) concerns a caller with that scope."""
    in_store, _, in_run = scope.partition("/")
    return not scope or not store or (store == in_store and (not in_run or not runs or dir_of(in_run) in runs))


def masked(text: str) -> str:
    """Return ``text`` with ``ANOTHER`` in place of each run name before a file's path that is outside the caller's scope.

    A checkpoint of a branch has its files in the run that it was made in, so errors name that run. Masking depends only on the text and
    the scope, not on which runs exist: otherwise the result would show whether a run of a file of this name exists already.
    """
    run = _scope.get().partition("/")[2]
    if not run or "/" not in text:
        return text
    own_names = {dir_of(run), run_name(dir_of(run))}

    def hide(match: re.Match[str]) -> str:
        name = match[1]
        own_run = next((own_name for own_name in own_names if name.endswith(own_name)), None)
        if own_run is not None and name[: -len(own_run)][-1:] in ("", "'", '"', "(", "["):
            return match[0]
        return f"{ANOTHER}/"

    return _IN_A_RUN.sub(hide, text)


def masked_error(error: RelightError) -> RelightError:
    """Return ``error`` with all its texts ``masked``."""
    details = [masked(text) for text in error.details]
    return type(error)(
        masked(error.what),
        where=masked(error.where),
        hint=masked(error.hint),
        details=details,
        retryable=error.retryable,
    )


def scope_now() -> str:
    """Return the scope of the request that is being answered."""
    return _scope.get()


def everything() -> bool:
    """Return whether the caller may see everything."""
    return not _scope.get()


@contextmanager
def asking(scope: str, asker: str = "") -> Iterator[None]:
    """Within the context, limit queries to ``scope`` and count quotas for ``asker``."""
    before, asked_before = _scope.set(scope), _asker.set(asker)
    try:
        yield
    finally:
        _asker.reset(asked_before)
        _scope.reset(before)
