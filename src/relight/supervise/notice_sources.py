"""Sources of preemption notices: the addresses of the clouds, and which of their answers is a notice.

Invariant: an answer that is not a notice (an error, a page for people, garbage) never ends a job. The answers of the
named clouds are checked against their documented form; at another address any text is a notice.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

from relight.errors import ConfigError
from relight.supervise.metadata_server import NoNotice

LINK_LOCAL = "http://169.254.169.254"
_TOKEN_PATH = "/latest/api/token"  # noqa: S105 - an address
_AZURE_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_QUIET = ("", "none", "false", "no", "0", "null", "{}", "[]")
_ENDS_NOW, _ENDS_THEN = ("preempt", "terminate"), ("reboot", "redeploy")
"""Azure's events that end a machine. The first take it for good; the second leave it unchanged until their time."""


class Notice(NamedTuple):
    """The end of the machine. ``ends_at``: seconds since the epoch, if the job may continue until shortly before; else None."""

    text: str
    ends_at: float | None = None


Parser = Callable[[str, Callable[[], str]], Notice | None]
"""Takes an answer, and a function that returns this machine's name. Returns the notice; None for no notice."""


class NoticeSource(NamedTuple):
    """An address to poll, and what its answers mean.

    ``token_path``: where AWS issues session tokens (IMDSv2). ``absent``: statuses that mean "no notice". ``proof_path``:
    answers on each machine of this cloud, so that "no notice" is not taken from another server. ``flavor``: a header
    that each valid answer has. ``hint``: what to do if the source does not answer properly.
    """

    url: str
    parse: Parser
    hint: str = "correct the address in [supervise] notices, or repair the server"
    headers: Mapping[str, str] = {}
    token_path: str = ""
    absent: tuple[int, ...] = (404, 410)
    proof_path: str = ""
    name_path: str = ""
    flavor: tuple[str, str] = ("", "")


def _answer(body: str) -> Any:
    try:
        return json.loads(body)
    except (json.JSONDecodeError, RecursionError):
        raise NoNotice(f"it does not answer with valid JSON: {_short(body)!r}") from None


def _short(body: str) -> str:
    return " ".join(body.split())[:80]


def _aws(field: str) -> Parser:
    """Return the parser for a JSON object that is a notice if it has a text in ``field``."""

    def parse(body: str, name: Callable[[], str]) -> Notice | None:
        answer = _answer(body)
        if not isinstance(answer, dict) or not isinstance(answer.get(field), str) or not answer[field]:
            raise NoNotice(f"its answer has no {field!r}: {_short(body)!r}")
        return Notice(" ".join(body.split())[:200])

    return parse


def _google(what: str, notices: Sequence[str], others: Sequence[str]) -> Parser:
    """Return the parser for one of some words."""

    def parse(body: str, name: Callable[[], str]) -> Notice | None:
        word = body.strip()
        if word not in (*notices, *others):
            raise NoNotice(f"it answers neither {' nor '.join((*notices, *others))}: {_short(body)!r}")
        return Notice(f"{what}: {word}") if word in notices else None

    return parse


def _azure(body: str, name: Callable[[], str]) -> Notice | None:
    answer = _answer(body)
    if not isinstance(answer, dict) or not isinstance(answer.get("Events"), list):
        raise NoNotice(f"its answer has no list of events: {_short(body)!r}")
    return _azure_event(answer["Events"], name)


def _azure_event(events: Sequence[Any], name: Callable[[], str]) -> Notice | None:
    """Return the first end of this machine. Azure lists the events of all machines of a scale set in each of them."""
    ends: list[Notice] = []
    for event in events:
        kind = str(event.get("EventType", "")) if isinstance(event, dict) else ""
        if kind.lower() not in (*_ENDS_NOW, *_ENDS_THEN):
            continue
        resources = event.get("Resources")
        machines = {str(machine).lower() for machine in resources} if isinstance(resources, list) else set()
        if machines and (own := name().lower()) and own not in machines:
            continue
        when, ends_at = str(event.get("NotBefore") or ""), None
        if when and kind.lower() in _ENDS_THEN:
            with contextlib.suppress(ValueError, OverflowError):  # without a valid time it may begin at once
                ends_at = parsedate_to_datetime(when).timestamp()
        ends.append(Notice(f"{kind} at {when[:40]}" if ends_at else kind, ends_at))
    return min(ends, key=lambda notice: notice.ends_at or 0.0, default=None)


def any_notice(body: str, name: Callable[[], str]) -> Notice | None:
    """Return the notice in an answer of an address that is not one of the named clouds.

    Azure's list of events is recognized. Otherwise any text is a notice. Raise ``NoNotice`` for a page of HTML and for
    an error in JSON: these come from a proxy or a login page, not the source.
    """
    text = body.strip()
    if text.lower() in _QUIET:
        return None
    if text.startswith("<"):
        raise NoNotice("it answers with a page of HTML or XML, not with a notice")
    with contextlib.suppress(json.JSONDecodeError, RecursionError):
        answer = json.loads(text)
        if isinstance(answer, dict) and "error" in {key.lower() for key in answer}:
            raise NoNotice(f"it answers with an error: {' '.join(text.split())[:120]}")
        if isinstance(answer, dict) and isinstance(answer.get("Events"), list):
            return _azure_event(answer["Events"], name)
    if "\ufffd" in text or not all(letter.isprintable() or letter.isspace() for letter in text):
        raise NoNotice("it answers with binary data, not with a notice")
    return Notice(" ".join(text.split())[:200])


_AWS_HINT = (
    "check that this machine is on AWS, and allow its processes the metadata service: "
    "aws ec2 modify-instance-metadata-options --http-endpoint enabled --http-put-response-hop-limit 2"
)
_GOOGLE_HINT = "check that this machine is on Google Cloud, and that its containers may reach metadata.google.internal"
_AZURE_HINT = (
    "check that this machine is on Azure, and that its containers may reach 169.254.169.254; "
    "the first answer of a machine may take two minutes"
)


def _aws_source(path: str, field: str) -> NoticeSource:
    url, proof = f"{LINK_LOCAL}/latest/meta-data/{path}", "/latest/meta-data/instance-id"
    return NoticeSource(url, _aws(field), _AWS_HINT, token_path=_TOKEN_PATH, proof_path=proof)


def _google_source(path: str, parse: Parser) -> NoticeSource:
    flavor = ("Metadata-Flavor", "Google")
    url = f"http://metadata.google.internal/computeMetadata/v1/instance/{path}"
    return NoticeSource(url, parse, _GOOGLE_HINT, dict([flavor]), absent=(), flavor=flavor)


CLOUDS = {
    "aws": _aws_source("spot/instance-action", "action"),
    "aws-rebalance": _aws_source("events/recommendations/rebalance", "noticeTime"),
    "gcp": _google_source("preempted", _google("preempted", ["TRUE"], ["FALSE"])),
    "gcp-maintenance": _google_source(
        "maintenance-event",
        _google("maintenance", ["TERMINATE_ON_HOST_MAINTENANCE"], ["NONE", "MIGRATE_ON_HOST_MAINTENANCE"]),
    ),
    "azure": NoticeSource(
        f"{LINK_LOCAL}/metadata/scheduledevents?api-version=2020-07-01", _azure, _AZURE_HINT, {"Metadata": "true"}, absent=(),
        name_path=_AZURE_NAME,
    ),
}  # fmt: skip
"""``aws-rebalance`` and ``gcp-maintenance`` precede the end by up to an hour, so that a job uses them only by name."""


def sources_of(names: Sequence[str]) -> list[NoticeSource]:
    """Return the sources for names of clouds and for addresses. Raise ``ConfigError`` for another text."""
    sources = []
    for name in names:
        if name not in CLOUDS and not name.startswith(("http://", "https://")):
            raise ConfigError(
                f"[supervise] notices has {name!r}", hint=f"an address (http://…), or one of {', '.join(CLOUDS)}"
            )
        token_path = _TOKEN_PATH if "/latest/meta-data/" in name else ""
        sources.append(CLOUDS.get(name) or NoticeSource(name, any_notice, token_path=token_path))
    return sources
