"""The server's own state, in an SQLite file that only its owner can read: hashed tokens and sessions, and alert states."""

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
    """Return the default path: below ``XDG_STATE_HOME``, or else ``~/.local/state``."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home) / "relight" / "serve.sqlite"


class TokenFile:
    """The state file. Every request queries it, so that a revocation by any process has effect at once. Thread-safe."""

    def __init__(self, path: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self.path = path if path is not None else default_path()
        self._clock, self._lock = clock, threading.Lock()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
            if self.path.stat().st_uid != os.geteuid() or self.path.stat().st_mode & 0o077:
                raise ConfigError(
                    "this token file belongs to another user, or other users can read or write it",
                    where=str(self.path),
                    hint="it must be yours, with mode 0600",
                )
            self._db = sqlite3.connect(self.path, check_same_thread=False, timeout=5, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.executescript(_TABLES)
        except (OSError, sqlite3.Error) as error:
            hint = "name another file with --state; if this one is damaged, remove it and create new tokens: only tokens are lost"
            raise StoreUnavailable(
                f"the server's state file cannot be used: {error}", where=str(self.path), hint=hint
            ) from error

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    def new_token(self, name: str, role: str, scope: str = "", lasts_s: float | None = None) -> tuple[str, str]:
        """Create a token and return its id and the token itself, which is not stored: the file has only its hash."""
        rank_of(role)
        if not name.strip() or len(name) > 80 or not name.isprintable():
            raise ConfigError(
                "a token needs a name of 1 to 80 characters", hint="name its user, such as anna or grafana"
            )
        if not _SCOPE.match(scope) or ("/" in scope and not is_dir(dir_of(scope.partition("/")[2]))):
            raise ConfigError(
                f"{scope[:80]!r} is not a scope",
                hint="STORE or STORE/RUN, as relight serve names them; omit it for everything",
            )
        if lasts_s is not None and not 0 < lasts_s <= 10 * 365 * 86400:
            raise ConfigError("a token must last longer than 0 s, and at most ten years")
        letters = "abcdefghijklmnopqrstuvwxyz0123456789"
        token_id, secret = "".join(secrets.choice(letters) for _ in range(10)), secrets.token_urlsafe(32)
        now = self._clock()
        ends = now + lasts_s if lasts_s is not None else None
        self._execute(
            "INSERT INTO tokens VALUES(?,?,?,?,?,?,?,NULL)", token_id, _hash(secret), name, role, scope, now, ends
        )
        return token_id, f"rl_{token_id}.{secret}"

    def revoke(self, token_id: str) -> TokenRow:
        """Revoke a token and end its sessions, at once. Raise ``CheckpointNotFound`` if there is no such token."""
        row = next((token for token in self.tokens() if token.id == token_id), None)
        if row is None:
            raise CheckpointNotFound(
                f"no token {token_id[:40]!r}", where=str(self.path), hint="relight token list shows them"
            )
        self._execute("UPDATE tokens SET revoked=? WHERE id=? AND revoked IS NULL", self._clock(), token_id)
        self._execute("DELETE FROM sessions WHERE token=?", token_id)
        return row

    def tokens(self) -> list[TokenRow]:
        """Return all tokens without their secrets, oldest first."""
        now = self._clock()
        rows = self._execute("SELECT id,name,role,scope,made,ends,revoked FROM tokens ORDER BY made,id")
        return [
            TokenRow(
                token_id,
                name,
                role,
                scope,
                created,
                ends,
                "revoked" if revoked is not None else "expired" if ends is not None and ends <= now else "valid",
            )
            for token_id, name, role, scope, created, ends, revoked in rows
        ]

    def forget_expired(self, ending: str) -> None:
        """Delete the expired tokens with names that end with ``ending``. The audit log still has their use."""
        self._execute("DELETE FROM tokens WHERE ends<=? AND substr(name,-length(?))=?", self._clock(), ending, ending)

    def who(self, token: str) -> Caller | None:
        """Return the caller with this token; None if it is unknown, expired or revoked. Compared in constant time."""
        parsed = TOKEN.match(token)
        rows = self._execute("SELECT hash FROM tokens WHERE id=?", parsed[1]) if parsed else []
        stored_hash = rows[0][0] if rows else bytes(32)
        same = hmac.compare_digest(stored_hash, _hash(parsed[2] if parsed else ""))
        return self._valid(parsed[1]) if parsed and rows and same else None

    def _valid(self, token_id: str, session: str = "") -> Caller | None:
        rows = self._execute(
            "SELECT name,role,scope FROM tokens WHERE id=? AND revoked IS NULL AND (ends IS NULL OR ends>?)",
            token_id,
            self._clock(),
        )
        return Caller(rows[0][0], rows[0][1], rows[0][2], token_id, session) if rows else None

    def is_valid(self, who: Caller) -> bool:
        """Return whether neither the caller's token nor its session has ended."""
        return (self.session_user(who.session) if who.session else self._valid(who.token)) is not None

    def begin_session(self, who: Caller) -> str:
        """Start a browser session and return the value for its cookie. Delete expired sessions."""
        secret, now = secrets.token_urlsafe(32), self._clock()
        self._execute("DELETE FROM sessions WHERE ends<=?", now)
        self._execute(
            "INSERT INTO sessions VALUES(?,?,?,?)", _hash(secret), who.token, secrets.token_urlsafe(32), now + SESSION_S
        )
        return secret

    def session_user(self, secret: str) -> tuple[Caller, str] | None:
        """Return the caller and the CSRF token of a session; None if the session or its token has ended."""
        rows = (
            self._execute("SELECT token,csrf FROM sessions WHERE hash=? AND ends>?", _hash(secret), self._clock())
            if 0 < len(secret) <= 64
            else []
        )
        who = self._valid(rows[0][0], secret) if rows else None
        return (who, rows[0][1]) if who is not None else None

    def end_session(self, secret: str) -> None:
        """End a session: its cookie is invalid from now on."""
        self._execute("DELETE FROM sessions WHERE hash=?", _hash(secret))

    def keep_alarms(self, kept: bytes) -> None:
        """Store the alert states for the next server, in place of the earlier ones."""
        self._execute("INSERT INTO alarms VALUES(1,?) ON CONFLICT(one) DO UPDATE SET kept=excluded.kept", kept)

    def alarms(self) -> bytes:
        """Return the alert states that were stored last; empty if there are none."""
        rows = self._execute("SELECT kept FROM alarms")
        return bytes(rows[0][0]) if rows and isinstance(rows[0][0], bytes) else b""

    def _execute(self, words: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            with self._lock:
                return self._db.execute(words, values).fetchall()
        except sqlite3.Error as error:
            raise StoreUnavailable(
                f"query of the server's state file failed: {error}", where=str(self.path), retryable=True
            ) from error


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
