"""Names as UTF-8. On Linux a file name is bytes: a byte that is not UTF-8 becomes a lone surrogate, which no record can hold."""

from __future__ import annotations


def is_utf8(text: str) -> bool:
    """Return whether a record or JSON can hold the text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def escaped(text: str) -> str:
    """Return a text with its undecodable bytes written as ``\\udcff``."""
    return text.encode("utf-8", "backslashreplace").decode()
