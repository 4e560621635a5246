"""Text form of a value, in which golden stores record the contents of their trees."""

from __future__ import annotations

from typing import Any

from relight.format import Leaf


def render(value: Any) -> str:
    """Return ``value`` as text with its types: floats bit-exact, sets sorted, leaves as ``@kind``."""
    if isinstance(value, Leaf):
        value = ("@", value.kind, value.tensors, value.meta)
    if isinstance(value, tuple) and value[:1] == ("@",) and len(value) == 4:
        return f"@{value[1]}{list(value[2])}{render(value[3])}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{render(key)}: {render(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}<{', '.join(sorted(render(item) for item in value))}>"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(render(item) for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, complex):
        return f"complex({value.real.hex()}, {value.imag.hex()})"
    return ascii(value)
