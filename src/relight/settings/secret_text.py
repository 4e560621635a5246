"""Reads secrets that an argument or a setting names by ``env:NAME`` or ``file:PATH``, so that no argument contains one."""

from __future__ import annotations

import os

from relight.errors import ConfigError

_LENGTH_MAX = 1 << 16


def secret_text(spec: str, what: str, hint: str = "") -> str:
    """Return the first line of the variable or the file. ``what``: the secret in words.

    Raise ``ConfigError``, without the secret, if it cannot be read or is empty, or if ``spec`` has another form.
    """
    kind, _, name = spec.partition(":")
    try:
        if kind == "env":
            text = os.environ.get(name, "")
        elif kind == "file":
            with open(os.path.expanduser(name), encoding="utf-8") as file:
                text = file.read(_LENGTH_MAX)
        else:
            raise ConfigError(f"the {what} is named by env:NAME or file:PATH", hint="put it into a variable or a file")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"the {what} cannot be read there: {why}", where=spec) from None
    if not text.strip():
        raise ConfigError(f"there is no {what}", where=spec, hint=hint)
    return text.strip().splitlines()[0].strip()
