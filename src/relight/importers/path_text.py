"""Names as text. On Linux a file name is bytes; what is not UTF-8 becomes lone surrogates, which no checkpoint can record."""

from __future__ import annotations


def is_utf8(name: str) -> bool:
    """Return whether a name can be recorded."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(name: str) -> str:
    """Return a name with its undecodable bytes written as ``\\udcff``."""
    return name.encode("utf-8", "backslashreplace").decode()
