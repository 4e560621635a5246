"""Polls for preemption notices: addresses of the machine's cloud announce that the machine will be taken away.

Invariants: A source that does not answer properly is reported once, with the reason, and once more when it answers
again. An answer that is not a notice (an error, a redirect, a page for people) never ends a job.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from relight.comm import new_threads
from relight.errors import ConfigError
from relight.http_request import NoRedirect, why_no_answer
from relight.observe import emit

EVERY_S = 5.0
_TIMEOUT_S = 2.0
_BYTES_MAX = 64 << 10
_TRIES = 2
"""Failed polls in a row before a source is reported. The metadata server may have restarted during a single one."""
_TOKEN_S = 21600
_ABSENT = (404, 410)
"""Statuses that mean "no notice": most servers have the address only once there is a notice."""


class NoticeEndpoint(NamedTuple):
    """An address to poll, and its headers.

    ``token_url``: address of a session token, requested after a status 401 (IMDSv2).
    """

    url: str
    headers: Mapping[str, str]
    token_url: str = ""


CLOUDS = {
    "aws": NoticeEndpoint(
        "http://169.254.169.254/latest/meta-data/spot/instance-action", {}, "http://169.254.169.254/latest/api/token"
    ),
    "gcp": NoticeEndpoint("http://metadata.google.internal/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}),
    "azure": NoticeEndpoint("http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"}),
}  # fmt: skip
_QUIET = ("", "none", "false", "no", "0", "null", "{}", "[]")
_TAKEN = ("preempt", "terminate")
_FORBIDDEN = "the metadata service may be disabled, or its hop limit too small for a container"


class NoNotice(ValueError):
    """An answer that is neither a notice nor the absence of a notice."""


def endpoints_of(names: Sequence[str]) -> list[NoticeEndpoint]:
    """Return the endpoints for names of clouds and for addresses. Raise ``ConfigError`` for another text."""
    endpoints = []
    for name in names:
        if name not in CLOUDS and not name.startswith(("http://", "https://")):
            raise ConfigError(
                f"[supervise] notices has {name!r}", hint=f"an address (http://…), or one of {', '.join(CLOUDS)}"
            )
        endpoints.append(CLOUDS.get(name) or NoticeEndpoint(name, {}))
    return endpoints


def announcement_of(body: str) -> str:
    """Return the announcement in an answer; empty for no notice.

    Azure lists events, and only some kinds of them take the machine. For other sources any text is a notice. Raise
    ``NoNotice`` for a page of HTML and for an error in JSON: these come from a proxy or a login page, not the source.
    """
    text = body.strip()
    if text.lower() in _QUIET:
        return ""
    if text.startswith("<"):
        raise NoNotice("it answers with a page of HTML or XML, not with a notice")
    with contextlib.suppress(json.JSONDecodeError):
        answer = json.loads(text)
        if isinstance(answer, dict) and "error" in {key.lower() for key in answer}:
            raise NoNotice(f"it answers with an error: {' '.join(text.split())[:120]}")
        if isinstance(answer, dict) and isinstance(answer.get("Events"), list):
            kinds = [str(event.get("EventType", "")) for event in answer["Events"] if isinstance(event, dict)]
            return next((kind for kind in kinds if kind.lower() in _TAKEN), "")
    if "\ufffd" in text or not all(letter.isprintable() or letter.isspace() for letter in text):
        raise NoNotice("it answers with binary data, not with a notice")
    return " ".join(text.split())[:200]


class Notices:
    """Polls the sources in its own thread. ``announcement`` is the announcement; empty until one is received."""

    def __init__(self, names: Sequence[str], every_s: float = EVERY_S) -> None:
        self.announcement = ""
        self._sources, self._every_s = endpoints_of(names), every_s
        self._over = threading.Event()
        self._tokens: dict[str, str] = {}
        self._failed: dict[str, tuple[int, str]] = {}
        """For each address that does not answer properly: failed polls in a row, and the reason that was reported."""
        # no proxy: the sources are addresses of this machine's own network
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), NoRedirect())
        if self._sources:
            new_threads.start(threading.Thread(target=self._ask, name="relight-notices", daemon=True))

    def close(self) -> None:
        """Stop polling."""
        self._over.set()

    def _ask(self) -> None:
        while not self._over.wait(self._every_s) and not self.announcement:
            for source in self._sources:
                try:
                    announced = announcement_of(self._body(source))
                except (OSError, ValueError, http.client.HTTPException) as error:
                    self._note_failed_poll(source, why_no_answer(error, _TIMEOUT_S, _FORBIDDEN))
                    continue
                self._answered(source)
                if announced:
                    self.announcement = f"{source.url.split('/')[2]} announces: {announced}"
                    return

    def _body(self, source: NoticeEndpoint) -> str:
        try:
            return self._get(source)
        except urllib.error.HTTPError as error:
            if error.code in _ABSENT:
                return ""
            if error.code != 401 or not source.token_url:
                raise
        ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
        put = urllib.request.Request(source.token_url, headers=ttl, method="PUT")  # noqa: S310 - one of our own addresses
        with self._opener.open(put, timeout=_TIMEOUT_S) as answer:
            self._tokens[source.url] = answer.read(_BYTES_MAX).decode("ascii", "strict").strip()
        try:
            return self._get(source)
        except urllib.error.HTTPError as error:
            if error.code in _ABSENT:
                return ""
            raise

    def _get(self, source: NoticeEndpoint) -> str:
        headers = dict(source.headers)
        if source.url in self._tokens:
            headers["X-aws-ec2-metadata-token"] = self._tokens[source.url]
        get = urllib.request.Request(source.url, headers=headers)  # noqa: S310 - checked by endpoints_of
        with self._opener.open(get, timeout=_TIMEOUT_S) as answer:
            return str(answer.read(_BYTES_MAX).decode(errors="replace"))

    def _note_failed_poll(self, source: NoticeEndpoint, why: str) -> None:
        count, reported = self._failed.get(source.url, (0, ""))
        if count + 1 >= _TRIES and why != reported:
            text = f"notices cannot be received from {source.url}: {why}; if the machine is taken away, this source does not warn the job"
            emit("run.notices", text, url=source.url, why=why)
            reported = why
        self._failed[source.url] = count + 1, reported

    def _answered(self, source: NoticeEndpoint) -> None:
        _, reported = self._failed.pop(source.url, (0, ""))
        if reported:
            emit("run.notices", f"{source.url} answers again: notices are received from it", url=source.url, why="")
