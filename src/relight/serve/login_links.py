"""One-time login links for the user who starts the server: ``relight serve`` prints one. The secret is kept in memory only."""

from __future__ import annotations

import atexit
import hashlib
import hmac
import html
import secrets
import tempfile
import time
import webbrowser
from collections.abc import Callable
from pathlib import Path

from relight.audit.audit_log import user
from relight.serve.state import SESSION_S, TokenFile

LINK_S = 600.0
"""Seconds for which a login link is valid."""
_BY_LINK = ", by login link"
"""End of the names of the tokens of login links."""


class LoginLinks:
    """Secrets that begin one session each, as admin: who can read the server's output could also create a token."""

    def __init__(self, state: TokenFile, clock: Callable[[], float] = time.monotonic) -> None:
        self._state, self._clock = state, clock
        self._ends: dict[bytes, float] = {}

    def new(self) -> str:
        """Return a new secret."""
        secret = secrets.token_urlsafe(32)
        self._ends[_digest(secret)] = self._clock() + LINK_S
        return secret

    def begin_session(self, secret: str) -> str | None:
        """Use up a secret. Return the cookie's value of a new session; None if the secret is unknown, used or expired.

        The session belongs to a new token, which ends with it: admins see and can revoke it.
        """
        now = self._clock()
        given = _digest(secret)
        used = next((known for known in self._ends if hmac.compare_digest(known, given)), None)
        ends = self._ends.pop(used, 0.0) if used is not None else 0.0
        if ends <= now:
            return None
        self._state.forget_expired(_BY_LINK)
        _, token = self._state.new_token(f"{user()[:40]}{_BY_LINK}", "admin", lasts_s=SESSION_S)
        who = self._state.who(token)
        return self._state.begin_session(who) if who is not None else None


def open_in_browser(link: str, folder: Path) -> bool:
    """Open a login link in the user's browser. Return whether one could be started.

    The browser is started with a private file that leads to the link: other users can read the arguments of processes.
    """
    handle, name = tempfile.mkstemp(suffix=".html", prefix="open-", dir=folder)
    with open(handle, "w", encoding="utf-8") as file:
        file.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={html.escape(link)}">')
    atexit.register(Path(name).unlink, missing_ok=True)
    return webbrowser.open(Path(name).as_uri())


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "replace")).digest()
