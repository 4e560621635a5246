"""The secret that the nodes of one job share, and the seal (a MAC) that it puts on the values that they exchange."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import MutableMapping

from relight.errors import ConfigError
from relight.keys.chain import resolve
from relight.settings.environment import environment as settings_in
from relight.settings.environment import variable_of

VARIABLE = variable_of("environment.job_secret")
NONE = "none"
"""The value for several nodes without a secret, in a network of the job's own."""
_SEAL_BYTES = hashlib.sha256().digest_size
_KINDS = ("file", "env", "keyring")
_HINT = f"relight keys new FILE, copy it to each node, set {VARIABLE}=file:FILE there; or {VARIABLE}=none in a network of the job's own"


class Seal:
    """HMAC-SHA256 over a value and its place, with the key of one job. Without a secret anyone can make a seal."""

    def __init__(self, secret: bytes, run_id: str) -> None:
        self._key = hmac.digest(secret, b"relight rendezvous 1\0" + run_id.encode(), "sha256")

    def close(self, place: str, value: bytes) -> bytes:
        """Return ``value`` with its seal."""
        return self._over(place, value) + value

    def open(self, place: str, sealed: bytes) -> bytes:
        """Return the value. Raise ``ValueError`` if it was not sealed with this job's secret, for this place."""
        seal, value = sealed[:_SEAL_BYTES], sealed[_SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._over(place, value)):
            raise ValueError("no seal of this job")
        return value

    def _over(self, place: str, value: bytes) -> bytes:
        return hmac.digest(self._key, len(place.encode()).to_bytes(4, "big") + place.encode() + value, "sha256")


def job_secret(nodes: int, environment: MutableMapping[str, str] = os.environ) -> bytes:
    """Return the secret that ``RELIGHT_JOB_SECRET`` names; empty for one node, and for ``none``.

    Raise ``ConfigError`` if several nodes have none. A variable with the secret itself is removed from ``environment``,
    so that no rank and no process of a script inherits it.
    """
    spec = settings_in(environment).job_secret
    if nodes == 1:
        if spec.startswith("env:"):
            environment.pop(spec.removeprefix("env:"), None)
        return b""
    if spec == NONE:
        return b""
    if not spec:
        raise ConfigError(
            "several nodes need a secret of the job: without it any process that reaches the rendezvous can redirect its ranks",
            where=VARIABLE,
            hint=_HINT,
        )
    kind, _, location = spec.partition(":")
    if kind not in _KINDS or not location:
        raise ConfigError(
            "a job's secret is file:PATH, env:NAME, keyring:SERVICE/USER or none", where=VARIABLE, hint=_HINT
        )
    secret = resolve(spec).resolved()
    if kind == "env":
        environment.pop(location, None)
    assert secret is not None  # of these kinds every key is held here
    return secret
