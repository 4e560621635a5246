"""Names of exported tensors: renaming rules and patterns. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from relight.errors import ConfigError

PATTERN = "re:"
"""Prefix of a rule with a regular expression on its left side. Other rules have a prefix of names there."""


def renamed(name: str, rules: Sequence[str]) -> str:
    """Apply all rules to ``name``, one after the other.

    >>> renamed("model.layers.0.weight", ["model.=", "re:layers\\\\.([0-9]+)=h.\\\\1"])
    'h.0.weight'
    >>> renamed("layers.0.weight", ["=model."])
    'model.layers.0.weight'
    """
    for rule in rules:
        old, _, new = rule.rpartition("=")
        if old.startswith(PATTERN):
            name = _compiled(rule).sub(new, name)
        elif name.startswith(old):
            name = new + name[len(old) :]
    return name


def check_rules(rules: Sequence[str]) -> None:
    """Raise ``ConfigError`` for an invalid rule."""
    for rule in rules:
        if "=" not in rule:
            raise ConfigError(
                f"{rule[:80]!r} is not a renaming rule",
                hint="FROM=TO: beginnings of names; re:PATTERN=TO: a regular expression",
            )
        if rule.startswith(PATTERN):
            old, new = _compiled(rule), rule.rpartition("=")[2]
            try:
                re.sub(f"(?:{old.pattern})?", new, "", count=1)  # a template's mistakes show only when it is used
            except (re.error, IndexError) as error:
                raise ConfigError(f"{rule[:80]!r}: {error}", hint="groups are written \\1, \\2") from None


def _compiled(rule: str) -> re.Pattern[str]:
    pattern = rule.rpartition("=")[0].removeprefix(PATTERN)
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{pattern[:80]!r} is not a regular expression: {error}") from None


def is_meant(names: Sequence[str], only: Sequence[str]) -> bool:
    """Return whether a pattern matches one of a tensor's ``names`` or a parent of it."""
    return not only or any(
        fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}/*") or fnmatchcase(name, f"{pattern}.*")
        for pattern in only
        for name in names
    )
