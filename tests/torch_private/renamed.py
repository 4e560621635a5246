"""A torch that calls private names otherwise: its own sources are changed at their import.

The names are replaced consistently, so that torch works, and Relight finds none of them. Names in C are removed from
their objects while Relight is imported, as torch needs them itself.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

PACKAGES = ("torch", "torchdata")


class _Loader(SourceFileLoader):
    """Compiles a source with other names."""

    names: re.Pattern[str]

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the changed source."""
        source = self.get_data(self.path).decode()
        return compile(self.names.sub(r"\g<0>_renamed", source), self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    """Finds modules of torch that have one of the names."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = re.compile(rf"\b(?:{'|'.join(map(re.escape, names))})\b")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that has the names; None for others."""
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        if not self._names.search(spec.loader.get_data(spec.loader.path).decode()):
            return None
        loader = _Loader(spec.loader.name, spec.loader.path)
        loader.names = self._names
        spec.loader = loader
        return spec


class _Gone:
    """An attribute that its class does not have."""

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError


def rename(names: Sequence[str]) -> None:
    """Have torch call its names otherwise. Call it before torch is imported."""
    assert "torch" not in sys.modules
    sys.meta_path.insert(0, _Finder(names))


def remove(names: Sequence[str]) -> None:
    """Remove names in C, as ``module:name``, and import the parts of Relight that decide by them at their import.

    What torch needs itself comes back afterwards: names of modules, but not of ``torch.Tensor``.
    """
    import torch

    removed = []
    for place in names:
        module, _, name = place.partition(":")
        if module == "torch.Tensor":
            setattr(torch.Tensor, name, _Gone())
        else:
            removed.append((sys.modules[module], name, getattr(sys.modules[module], name)))
            delattr(*removed[-1][:2])
    import relight.torch_private.table  # noqa: F401 - decides now

    for owner, name, value in removed:
        if owner is not torch:
            setattr(owner, name, value)
