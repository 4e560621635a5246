"""Who is asking, and what of all runs that reaches to: set once a request, asked wherever a run is looked up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from relight.errors import ConfigError
from relight.run_names import dir_of

ROLES = ("viewer", "operator", "admin")
"""From the one who may least; each may what those before it may."""
NOTHING = "\0"
"""A scope that no run is in."""


@dataclass(frozen=True)
class Who:
    """Somebody who asks. ``scope``: empty for everything, ``STORE``, or ``STORE/RUN``; ``token`` is the id of what let him in."""

    name: str
    role: str
    scope: str = ""
    token: str = ""
    session: str = ""
    """The hash of the browser session, if it is one."""

    def may(self, role: str) -> bool:
        """Whether that role is no more than his."""
        return rank_of(self.role) >= rank_of(role)


def rank_of(role: str) -> int:
    """Of two roles the higher one may more. ``ConfigError`` for what is none."""
    if role not in ROLES:
        raise ConfigError(f"{role[:40]!r} is no role", hint=f"they are {', '.join(ROLES)}")
    return ROLES.index(role)


_scope: ContextVar[str] = ContextVar("relight_serve_scope", default="")


def reaches(store: str, run: str = "") -> bool:
    """Whether whoever is asking may know of this run; without one, of any run of that store."""
    scope = _scope.get()
    if not scope:
        return True
    in_store, _, in_run = scope.partition("/")
    return in_store == store and (not in_run or dir_of(in_run) == dir_of(run)) if run else in_store == store


def everything() -> bool:
    """Whether nothing is hidden from whoever is asking."""
    return not _scope.get()


@contextmanager
def asking(scope: str) -> Iterator[None]:
    """Within it, ``scope`` is all there is."""
    before = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(before)
