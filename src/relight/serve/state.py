"""What stores do not say and a server must remember, in an SQLite file of its owner's alone: tokens and sessions, hashed; alarms."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relight.errors import CheckpointNotFound, ConfigError, StoreUnavailable
from relight.run_names import dir_of, is_dir
from relight.serve.scope import Caller, rank_of
from relight.serve.values import TokenRow

SESSION_S = 12 * 3600.0
TOKEN = re.compile(r"rl_([a-z0-9]{10})\.([A-Za-z0-9_-]{43})\Z")
_SCOPE = re.compile(r"([A-Za-z0-9_-]{1,40}(/.+)?)?\Z", re.DOTALL)
_TABLES = """
CREATE TABLE IF NOT EXISTS tokens(id TEXT PRIMARY KEY, hash BLOB NOT NULL, name TEXT NOT NULL, role TEXT NOT NULL, scope TEXT NOT NULL,
  made REAL NOT NULL, ends REAL, revoked REAL);
CREATE TABLE IF NOT EXISTS alarms(one INTEGER PRIMARY KEY CHECK(one=1), kept BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS sessions(hash BLOB PRIMARY KEY, token TEXT NOT NULL, csrf TEXT NOT NULL, ends REAL NOT NULL);
"""


def default_path() -> Path:
    """Where it is if nobody says: below ``XDG_STATE_HOME``, or ``~/.local/state``."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home) / "relight" / "serve.sqlite"


class TokenFile:
    """The file. Looked up at each request, so that whatever is revoked is so at once, by whichever process. Thread-safe."""

    def __init__(self, path: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self.path = path if path is not None else default_path()
        self._clock, self._lock = clock, threading.Lock()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
            if self.path.stat().st_uid != os.geteuid() or self.path.stat().st_mode & 0o077:
                raise ConfigError(
                    "others than you can read or write this file of tokens", where=str(self.path), hint="it must be yours, mode 0600"
                )
            self._db = sqlite3.connect(self.path, check_same_thread=False, timeout=5, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.executescript(_TABLES)
        except (OSError, sqlite3.Error) as error:
            hint = "name another with --state; if it is damaged, remove it: only tokens are lost, and can be made anew"
            raise StoreUnavailable(f"the server's file cannot be used: {error}", where=str(self.path), hint=hint) from error

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._db.close()

    def new_token(self, name: str, role: str, scope: str = "", lasts_s: float | None = None) -> tuple[str, str]:
        """Its id, and the token itself, which nobody can read again."""
        rank_of(role)
        if not name.strip() or len(name) > 80 or not name.isprintable():
            raise ConfigError("a token needs a name, of 1 to 80 letters", hint="whom or what it is for, such as anna or grafana")
        if not _SCOPE.match(scope) or ("/" in scope and not is_dir(dir_of(scope.partition("/")[2]))):
            raise ConfigError(f"{scope[:80]!r} is no scope", hint="STORE or STORE/RUN, as relight serve calls them; nothing for everything")
        if lasts_s is not None and not 0 < lasts_s <= 10 * 365 * 86400:
            raise ConfigError("a token lasts for more than nothing, and at most ten years")
        letters = "abcdefghijklmnopqrstuvwxyz0123456789"
        token_id, secret = "".join(secrets.choice(letters) for _ in range(10)), secrets.token_urlsafe(32)
        now = self._clock()
        ends = now + lasts_s if lasts_s is not None else None
        self._do("INSERT INTO tokens VALUES(?,?,?,?,?,?,?,NULL)", token_id, _hash(secret), name, role, scope, now, ends)
        return token_id, f"rl_{token_id}.{secret}"

    def revoke(self, token_id: str) -> TokenRow:
        """From now on it opens nothing, nor do sessions that were begun with it. ``CheckpointNotFound`` if there is none."""
        found = next((one for one in self.tokens() if one.id == token_id), None)
        if found is None:
            raise CheckpointNotFound(f"no token {token_id[:40]!r}", where=str(self.path), hint="relight token list shows them")
        self._do("UPDATE tokens SET revoked=? WHERE id=? AND revoked IS NULL", self._clock(), token_id)
        self._do("DELETE FROM sessions WHERE token=?", token_id)
        return found

    def tokens(self) -> list[TokenRow]:
        """All, without their secrets, oldest first."""
        now = self._clock()
        rows = self._do("SELECT id,name,role,scope,made,ends,revoked FROM tokens ORDER BY made,id")
        return [
            TokenRow(
                one,
                name,
                role,
                scope,
                made,
                ends,
                "revoked" if revoked is not None else "expired" if ends is not None and ends <= now else "valid",
            )
            for one, name, role, scope, made, ends, revoked in rows
        ]

    def who(self, token: str) -> Caller | None:
        """Whose token that is; None if it is nobody's, or not any more. Compared in constant time."""
        parsed = TOKEN.match(token)
        rows = self._do("SELECT hash FROM tokens WHERE id=?", parsed[1]) if parsed else []
        kept = rows[0][0] if rows else bytes(32)
        same = hmac.compare_digest(kept, _hash(parsed[2] if parsed else ""))
        return self._valid(parsed[1]) if parsed and rows and same else None

    def _valid(self, token_id: str, session: str = "") -> Caller | None:
        rows = self._do(
            "SELECT name,role,scope FROM tokens WHERE id=? AND revoked IS NULL AND (ends IS NULL OR ends>?)", token_id, self._clock()
        )
        return Caller(rows[0][0], rows[0][1], rows[0][2], token_id, session) if rows else None

    def is_valid(self, who: Caller) -> bool:
        """Whether he may still be here: neither his token nor his session is over."""
        return (self.session_user(who.session) if who.session else self._valid(who.token)) is not None

    def begin_session(self, who: Caller) -> str:
        """What the browser's cookie is to hold."""
        secret, now = secrets.token_urlsafe(32), self._clock()
        self._do("DELETE FROM sessions WHERE ends<=?", now)
        self._do("INSERT INTO sessions VALUES(?,?,?,?)", _hash(secret), who.token, secrets.token_urlsafe(32), now + SESSION_S)
        return secret

    def session_user(self, secret: str) -> tuple[Caller, str] | None:
        """Who began it, and its word for forms (CSRF); None if it is over, or its token is."""
        rows = (
            self._do("SELECT token,csrf FROM sessions WHERE hash=? AND ends>?", _hash(secret), self._clock())
            if 0 < len(secret) <= 64
            else []
        )
        who = self._valid(rows[0][0], secret) if rows else None
        return (who, rows[0][1]) if who is not None else None

    def end_session(self, secret: str) -> None:
        """The cookie is worth nothing from now on."""
        self._do("DELETE FROM sessions WHERE hash=?", _hash(secret))

    def keep_alarms(self, kept: bytes) -> None:
        """What is to be known of alerts when the next server begins, in place of what was kept before."""
        self._do("INSERT INTO alarms VALUES(1,?) ON CONFLICT(one) DO UPDATE SET kept=excluded.kept", kept)

    def alarms(self) -> bytes:
        """What was kept last; empty if nothing ever was."""
        rows = self._do("SELECT kept FROM alarms")
        return bytes(rows[0][0]) if rows and isinstance(rows[0][0], bytes) else b""

    def _do(self, words: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            with self._lock:
                return self._db.execute(words, values).fetchall()
        except sqlite3.Error as error:
            raise StoreUnavailable(f"the server's file does not answer: {error}", where=str(self.path), retryable=True) from error


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
