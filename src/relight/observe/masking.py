"""Secrets in texts that are stored or sent: values are replaced by ``…``. Pure. A mask is a safety net: it knows names, not secrets."""

from __future__ import annotations

import re
from collections.abc import Sequence

MASK = "…"
_URL_USER = re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]*://)[^/\s@]*@")
_SECRET_TEXT = re.compile(
    r"(?i)\b([\w-]*(?:secret|token|passw(?:or)?d|passphrase|api_?key|access_?key|signature|credential)[\w-]*)(\s*[=:]\s*)\S+"
)
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_ALWAYS = frozenset({"secret", "secrets", "password", "passwords", "passwd", "passphrase", "credential", "credentials", "apikey", "pwd"})
_UNLESS_PLAIN = frozenset({"key", "token", "auth", "authorization", "bearer", "signature"})
"""Words of a name whose value is secret, unless it is a number or a truth value, as in ``pad_token=0``."""
_PLAIN = re.compile(r"[+-]?[\d.eE_+-]*|true|false|none|null", re.IGNORECASE)
_FLAG = re.compile(r"--?([A-Za-z][\w./-]*)")
_NAMED = re.compile(r"([A-Za-z][\w./-]*)[\"']?\s*[=:]\s*")
_END = re.compile(r"[,;&}]|$")


def mask_text(text: str) -> str:
    """Return ``text`` without users and passwords of URLs, and without values that a name such as ``api_key=`` precedes."""
    return _SECRET_TEXT.sub(rf"\1\2{MASK}", mask_users(text))


def mask_users(text: str) -> str:
    """Return ``text`` without users and passwords of URLs."""
    return _URL_USER.sub(rf"\1{MASK}@", text)


def mask_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command's arguments without the values of ``--api-key VALUE``, ``--password=VALUE``, ``db.secret=VALUE`` and their like."""
    masked: list[str] = []
    flag = None
    for argument in arguments:
        if flag is not None and not argument.startswith("--") and is_secret(flag, argument):
            masked.append(MASK)
            flag = None
            continue
        found = _FLAG.fullmatch(argument)
        flag = found[1] if found is not None else None
        masked.append(_mask_named(mask_users(argument)))
    return masked


def _mask_named(text: str) -> str:
    kept, at = [], 0
    for found in _NAMED.finditer(text):
        end = _END.search(text, found.end())
        assert end is not None
        if found.start() >= at and is_secret(found[1], text[found.end() : end.start()]):
            kept += [text[at : found.end()], MASK]
            at = end.start()
    return "".join([*kept, text[at:]])


def is_secret(name: str, value: str) -> bool:
    """Return whether the value of an option or setting of that name is secret."""
    words = {word.lower() for word in _WORD.findall(name)}
    joined = re.sub(r"[^a-z]", "", name.lower())
    if words & _ALWAYS or "apikey" in joined or "accesskey" in joined:
        return bool(value)
    return bool(words & _UNLESS_PLAIN) and not _PLAIN.fullmatch(value)
