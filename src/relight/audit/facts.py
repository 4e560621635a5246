"""Fields of an audited action in its first record: arguments, run, checkpoint, values before and after, reason."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from relight.format import hexdigest
from relight.observe.masking import MASK, cut_long, is_secret, mask_arguments, mask_users
from relight.settings.utf8 import escaped

VALUE_MAX, GIVEN_MAX = 2000, 40
"""Characters of one value, and arguments of one action."""
GIVEN = "given."
"""Prefix of an argument's name in the record."""
_TOKEN = re.compile(r"\b(rl_[a-z0-9]{10})\.[A-Za-z0-9_-]{20,}")
_NAMES = ("run", "checkpoint", "before", "after", "why")


@dataclass(frozen=True, slots=True)
class ActionFacts:
    """Fields of an action. ``before`` and ``after``: what it changes, such as the checkpoint that a tag is on; empty for nothing."""

    run: str = ""
    checkpoint: str = ""
    before: str = ""
    after: str = ""
    why: str = ""
    given: Mapping[str, object] = field(default_factory=dict)
    """The arguments, by their names, unchanged but for secrets."""

    def record(self) -> dict[str, str]:
        """Return the fields of the record: those of this class, and each argument under its own name."""
        fields = {name: cut(without_secrets(getattr(self, name))) for name in _NAMES}
        for name, value in list(self.given.items())[:GIVEN_MAX]:
            fields[f"{GIVEN}{escaped(name[:80])}"] = (
                MASK if is_secret(name, str(value)) else cut(without_secrets(_text(value)))
            )
        return fields


FIELDS = ("who", "role", "token", "what", "on", *_NAMES)
"""Fields of every action's first record, in addition to its arguments."""


def without_secrets(text: str) -> str:
    """Return ``text`` without secrets of tokens and without the user information of URLs.

    A byte of a path that is not UTF-8 becomes ``\\udcXX``, since records are UTF-8.
    """
    return mask_users(_TOKEN.sub(rf"\1.{MASK}", escaped(text)))


def cut(text: str, longest: int = VALUE_MAX) -> str:
    """Return ``text``, shortened if it is too long for a record; its length and hash then show what it was."""
    if len(text) <= longest:
        return text
    tail = f"… ({len(text)} characters, BLAKE3 {hexdigest(text.encode('utf-8', 'replace'))})"
    return text[: max(0, longest - len(tail))] + tail


def _text(value: object) -> str:
    """Return a value as text: a list's items joined. Also in a command line, values of options with a secret's name are masked."""
    if isinstance(value, (list, tuple)):
        return ", ".join(mask_arguments([str(item) for item in value]))
    text = str(value)
    try:
        words = shlex.split(text)
    except ValueError:  # an open quote
        words = text.split()
    masked = mask_arguments(words)
    # a long word is shortened, too; "cut" does that again, with its length and hash
    return text if masked == [cut_long(word) for word in words] else shlex.join(masked)
