"""Checks that the installed torch has the private names that Relight needs, and the one that trainers need.

Those of ``relight run`` are in ``supervise/torch_private.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

from relight.errors import ConfigError

SUPPORTED = "2.6 to 2.14"
"""Versions of torch that are supported: the names were found in the first of them and in 2.13."""


class TorchName(NamedTuple):
    """A private name of torch. ``owner``: a module, or ``module:Class`` for its attributes."""

    owner: str
    name: str

    @property
    def exists(self) -> bool:
        """Whether the installed torch has it. An attribute counts if the class or its ``__init__`` names it."""
        module, _, class_name = self.owner.partition(":")
        try:
            owner: Any = import_module(module)
            owner = getattr(owner, class_name) if class_name else owner
        except (ImportError, AttributeError):
            return False
        code = getattr(owner.__init__, "__code__", None) if class_name else None
        set_there = code.co_names if code is not None else ()
        return hasattr(owner, self.name) or self.name in (*set_there, *getattr(owner, "__annotations__", ()))

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}".replace(":", ".")


def check_torch(names: Sequence[TorchName], needed_by: str, otherwise: str = "") -> None:
    """Raise ``ConfigError`` if the installed torch lacks one of the names.

    ``needed_by``: the command or class that cannot work. ``otherwise``: what works without the names.
    """
    missing = [str(needed) for needed in names if not needed.exists]
    if missing:
        import torch

        raise ConfigError(
            f"{needed_by} does not support torch {torch.__version__}: it lacks {missing[0]}",
            details=missing[1:],
            hint=f"install torch {SUPPORTED}, or a release of Relight that supports this one" + otherwise,
        )


def default_store() -> Any:
    """Return the store of the default process group.

    ``_get_default_store``: no public function returns it, and a store of Relight's own would need a port on rank 0's
    machine, which a firewall may block.
    """
    check_torch(
        [TorchName("torch.distributed.distributed_c10d", "_get_default_store")], "a Checkpointer on several ranks"
    )
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()
