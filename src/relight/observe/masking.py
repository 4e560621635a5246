"""Secrets in texts that are stored or sent: values are replaced by ``…``. Pure. A mask is a safety net: it knows names, not secrets."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

MASK = "…"
LENGTH_MAX = 4000
"""Characters of one argument or text that are searched.

The rest is cut off, so it can contain no secret, and no text takes long.
"""
_URL_USER = re.compile(r"(?<![A-Za-z0-9+.-])([A-Za-z][A-Za-z0-9+.-]*+://)(?:[^\s?#]*|[^/\s@]*)@")
_TEXT_NAME = re.compile(r"(?<![\w-])([\w-]++)\s*+[=:]\s*+")
_TEXT_END = re.compile(r"\s|$")
_SECRET_PART = re.compile(r"(?i)secret|token|passw(?:or)?d|passphrase|api_?key|access_?key|signature|credential")
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_ALWAYS = re.compile(
    r"secret|passw|passphrase|credential|apikey|accesskey|privatekey|cookie|hftoken|authtoken|accesstoken"
)
"""If the letters of a name contain one of these, its value is always secret."""
_UNLESS_PLAIN = frozenset(
    {"key", "keys", "token", "tokens", "auth", "authorization", "bearer", "signature", "sig", "pass", "pwd"}
)
"""If a name has one of these words, its value is secret.

Not if the value is a number or a truth value, as in ``pad_token=0`` or ``--max-tokens 4096``.
"""
_PLAIN = re.compile(r"[+-]?[\d.eE_+-]*|true|false|none|null", re.IGNORECASE)
_FLAG = re.compile(r"--?([A-Za-z][\w./-]*)")
_NAMED = re.compile(r"(?<![\w./-])([\w./-]++)[\"']?\s*+[=:]\s*+")
_END = re.compile(r"[,;&}]|$")
_DASH, _NEXT = re.compile("-"), re.compile(r"--[A-Za-z][\w./-]*+(=|$)")
_WHOLE = re.compile(r"--?([A-Za-z][\w./-]*+)=(.*)", re.DOTALL)


def mask_text(text: str) -> str:
    """Return ``text`` without users and passwords of URLs, and without values that a name such as ``api_key=`` precedes."""
    return _mask_named(
        mask_users(cut_long(text)), _TEXT_NAME, _TEXT_END, lambda name, value: bool(value and _SECRET_PART.search(name))
    )


def mask_users(text: str) -> str:
    """Return ``text`` without users and passwords of URLs."""
    return _URL_USER.sub(rf"\1{MASK}@", text)


def mask_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command's arguments without the values of ``--api-key VALUE``, ``--password=VALUE``, ``db.secret=VALUE`` and their like."""
    masked: list[str] = []
    flag = ""
    for argument in arguments:
        if flag and not (_NEXT if _is_always(flag) else _DASH).match(argument) and is_secret(flag, argument):
            masked.append(MASK)  # also the arguments after it, up to the next flag
            continue
        option, whole = _FLAG.fullmatch(argument), _WHOLE.fullmatch(argument)
        flag = option[1] if option is not None else ""
        if whole is not None and is_secret(whole[1], whole[2]):
            masked.append(f"{argument[: whole.start(2)]}{MASK}")
        else:
            masked.append(_mask_named(mask_users(cut_long(argument)), _NAMED, _END, is_secret))
    return masked


def cut_long(text: str) -> str:
    """Return the text, cut after ``LENGTH_MAX`` characters."""
    return text if len(text) <= LENGTH_MAX else f"{text[:LENGTH_MAX]}{MASK}"


def _mask_named(text: str, named: re.Pattern[str], ends: re.Pattern[str], judge: Callable[[str, str], bool]) -> str:
    """Mask what follows each name that ``named`` finds, up to what ``ends`` finds, where ``judge(name, value)`` is true."""
    kept, position = [], 0
    for match in named.finditer(text):
        if match.start() < position:
            continue
        end = ends.search(text, match.end())
        assert end is not None
        if judge(match[1], text[match.end() : end.start()]):
            kept += [text[position : match.end()], MASK]
            position = end.start()
    return "".join([*kept, text[position:]])


def is_secret(name: str, value: str) -> bool:
    """Return whether the value of an option or setting of that name is secret."""
    if _is_always(name):
        return bool(value)
    words = {word.lower() for word in _WORD.findall(name)}
    return bool(words & _UNLESS_PLAIN) and not _PLAIN.fullmatch(value)


def _is_always(name: str) -> bool:
    return _ALWAYS.search(re.sub(r"[^a-z]", "", name.lower())) is not None
