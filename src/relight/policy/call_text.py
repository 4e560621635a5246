"""Show a rule as the call that makes it, with the arguments that differ from the defaults."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any, ClassVar, cast


class ShownAsCall:
    """Base of dataclasses with a ``repr`` such as ``keep(last=3, best=1)``."""

    __slots__ = ()
    _call: ClassVar[str] = ""
    """The function that makes the object; empty: its class."""
    _arguments: ClassVar[dict[str, str]] = {}
    """The arguments of fields that have other names."""

    def __repr__(self) -> str:
        given = [(field, getattr(self, field.name)) for field in fields(cast(Any, self))]
        shown = [
            f"{self._arguments.get(field.name, field.name)}={value!r}"
            for field, value in given
            if value != _default(field)
        ]
        return f"{self._call or type(self).__name__}({', '.join(shown)})"


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None if field.default is MISSING else field.default
