"""Markup of pictures: elements with attributes, everything in them escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from markupsafe import Markup

from relight.run_names import shown as with_names

_TEXT_MAX = 200


def element(tag: str, *inside: Markup | str, **attributes: object) -> Markup:
    """Return an element. ``klass`` stands for class, ``_`` for a dash; None omits an attribute. Text other than markup is escaped."""
    words = "".join(
        f' {"class" if name == "klass" else name.replace("_", "-")}="{escape(_value(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    content = "".join(str(child) if isinstance(child, Markup) else escape(printable(child)) for child in inside)
    return Markup(f"<{tag}{words}>{content}</{tag}>")  # noqa: S704 - every part of it was escaped above


def picture(width: float, height: float, description: str, parts: Iterable[Markup], klass: str = "") -> Markup:
    """Return a picture that scales with its container. ``description``: text alternative for screen readers."""
    inside = Markup("").join([element("title", description), *parts])
    return element(
        "svg",
        inside,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_value(width)} {_value(height)}",
        role="group" if "<a " in inside else "img",
        aria_label=printable(description),
        klass=f"picture {klass}".strip(),
        preserveAspectRatio="xMidYMid meet",
    )


def link(inside: Sequence[Markup], href: str) -> Markup:
    """Return a link around ``inside``. Tab skips it, because each picture's page has the same links in a table."""
    return element("a", *inside, href=href, tabindex=-1)


def text(x: float, y: float, content: str, *, klass: str | None = None, anchor: str | None = None) -> Markup:
    """Return a text element at a position."""
    return element("text", content, x=x, y=y, klass=klass, text_anchor=anchor)


def fitting(content: str, width: float, letter: float = 6.2) -> str:
    """Return the text shortened to ``width``. The middle is cut: the ends of a tensor's path are more informative."""
    letters = int(width / letter)
    content = printable(content)
    if len(content) <= letters:
        return content
    if letters < 4:
        return ""
    head_length = (letters - 1) // 3
    return f"{content[:head_length]}…{content[len(content) - (letters - 1 - head_length) :]}"


def printable(content: str) -> str:
    """Return untrusted text without invisible and bidirectional control characters, with at most ``_TEXT_MAX`` characters."""
    content = with_names(content)
    shown = "".join(letter if letter.isprintable() else "�" for letter in content[: _TEXT_MAX + 1])
    return shown if len(content) <= _TEXT_MAX else shown[:_TEXT_MAX] + "…"


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".") if value == value and abs(value) < 1e12 else "0"
    return "".join(letter if letter.isprintable() else "�" for letter in str(value))
