"""Names that torch does not promise: where each one is, what it is used for, and what happens without it."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Sequence
from importlib import import_module
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from relight.errors import ConfigError
from relight.observe import emit

SUPPORTED = "2.6 to 2.14"
"""Versions of torch that are supported."""


class TorchName(NamedTuple):
    """A private name of torch. ``owner``: a module, or ``module:Class`` or ``module:function`` for what these name."""

    owner: str
    name: str
    use: str = ""
    """What it is used for."""
    otherwise: str = ""
    """What happens without it."""
    seen: str = SUPPORTED
    """Versions of torch that have it."""

    @property
    def exists(self) -> bool:
        """Whether the installed torch has it. An attribute counts if its class sets or declares it."""
        module, _, inside = self.owner.partition(":")
        try:
            owner: Any = import_module(module)
            owner = getattr(owner, inside) if inside else owner
        except (ImportError, AttributeError):
            return False
        return hasattr(owner, self.name) or self.name in _mentioned(owner)

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}".replace(":", ".")


def _mentioned(owner: Any) -> set[str]:
    """Return the texts of a module, or the attributes that a function or a class's functions and annotations set."""
    if isinstance(owner, ModuleType):
        return {value for value in vars(owner).values() if type(value) is str}
    functions = vars(owner).values() if isinstance(owner, type) else [owner]
    names = set(getattr(owner, "__annotations__", ()))
    pending = [
        getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None) for function in functions
    ]
    while pending:
        code = pending.pop()
        if code is not None:
            names.update(each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR")
            pending += [each for each in code.co_consts if isinstance(each, CodeType)]
    return names


def check_torch(names: Sequence[TorchName], needed_by: str, otherwise: str = "") -> None:
    """Raise ``ConfigError`` if the installed torch lacks one of the names.

    ``needed_by``: the command, class or work that is impossible without them. ``otherwise``: what works without.
    """
    missing = [str(needed) for needed in names if not needed.exists]
    if missing:
        import torch

        raise ConfigError(
            f"{needed_by} does not support torch {torch.__version__}: it lacks {missing[0]}",
            details=missing[1:],
            hint=f"install torch {SUPPORTED}, or a release of Relight that supports this one" + otherwise,
        )


_reported: set[TorchName] = set()
"""Names that were checked when a fall-back was used: each is reported once in a process."""


def report(*names: TorchName) -> None:
    """Emit a warning for each name that is missing and was not reported yet."""
    for name in names:
        if name in _reported:
            continue
        _reported.add(name)
        if not name.exists:
            import torch

            release = str(torch.__version__)
            emit(
                "torch.name_missing",
                f"torch {release} lacks {name}: {name.otherwise}",
                missing=str(name),
                torch=release,
            )


def all_exist(names: Sequence[TorchName]) -> bool:
    """Return whether the installed torch has all these names."""
    return all(name.exists for name in names)
