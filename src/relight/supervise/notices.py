"""Notices that a machine will be taken away, as clouds give them to who asks: an address of the machine's own, asked every few seconds."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from relight.errors import ConfigError

EVERY_S = 5.0
_TIMEOUT_S = 2.0
_BYTES_MAX = 64 << 10


class Source(NamedTuple):
    """An address, and what it takes to ask there."""

    url: str
    headers: Mapping[str, str]


CLOUDS = {
    "aws": Source("http://169.254.169.254/latest/meta-data/spot/instance-action", {}),
    "gcp": Source("http://metadata.google.internal/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}),
    "azure": Source("http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"}),
}
_QUIET = ("", "none", "false", "no", "0", "null", "{}", "[]")
_TAKEN = ("preempt", "terminate")


def sources_of(told: Sequence[str]) -> list[Source]:
    """Names of clouds, or addresses. ``ConfigError`` for anything else."""
    found = []
    for one in told:
        if one not in CLOUDS and not one.startswith(("http://", "https://")):
            raise ConfigError(f"[supervise] notices has {one!r}", hint=f"an address (http://…), or one of {', '.join(CLOUDS)}")
        found.append(CLOUDS.get(one) or Source(one, {}))
    return found


def says(body: str) -> str:
    """What an answer announces; empty if nothing. Azure lists events, of which only some take the machine; elsewhere anything is one."""
    text = body.strip()
    if text.lower() in _QUIET:
        return ""
    with contextlib.suppress(ValueError):
        told = json.loads(text)
        if isinstance(told, dict) and isinstance(told.get("Events"), list):
            kinds = [str(one.get("EventType", "")) for one in told["Events"] if isinstance(one, dict)]
            return next((kind for kind in kinds if kind.lower() in _TAKEN), "")
    return " ".join(text.split())[:200]


class Notices:
    """Asks in a thread of its own. ``heard`` is what was announced, empty until then."""

    def __init__(self, told: Sequence[str], every_s: float = EVERY_S) -> None:
        self.heard = ""
        self._sources, self._every_s = sources_of(told), every_s
        self._over = threading.Event()
        if self._sources:
            threading.Thread(target=self._ask, name="relight-notices", daemon=True).start()

    def close(self) -> None:
        """Ask no more."""
        self._over.set()

    def _ask(self) -> None:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # an address of the machine's own is not a proxy's to answer
        while not self._over.wait(self._every_s) and not self.heard:
            for url, headers in self._sources:
                with contextlib.suppress(OSError, ValueError):  # 404, no such host, no answer: nothing is announced
                    with opener.open(urllib.request.Request(url, headers=dict(headers)), timeout=_TIMEOUT_S) as answer:  # noqa: S310
                        announced = says(answer.read(_BYTES_MAX).decode(errors="replace"))
                    if announced:
                        self.heard = f"{url.split('/')[2]} announces: {announced}"
                        return
