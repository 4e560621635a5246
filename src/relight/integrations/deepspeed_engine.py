"""DeepSpeed: with ``CheckpointEngine``, ``save_checkpoint`` and ``load_checkpoint`` use Relight's format.

Set ``engine.checkpoint_engine = CheckpointEngine()`` after ``deepspeed.initialize``, on every rank. DeepSpeed still
decides names, folders, ``latest``, and which rank writes what. Each of its files becomes a directory of that name, which
exists as a whole or not at all. Every byte is verified, and nothing is executed. Tested with 0.19.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from relight.errors import UnsafeContent
from relight.integrations.frameworks import needed, read_as_file, save_options, write_as_file

if TYPE_CHECKING:
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine as Base
else:
    Base = needed("deepspeed.runtime.checkpoint_engine.checkpoint_engine", "deepspeed").CheckpointEngine

_KEPT = {
    "LossScaler": "deepspeed.runtime.fp16.loss_scaler",
    "DynamicLossScaler": "deepspeed.runtime.fp16.loss_scaler",
    "fragment_address": "deepspeed.utils.tensor_fragment",
    "ZeroStageEnum": "deepspeed.runtime.zero.config",
}
"""DeepSpeed's own classes in its state, and their modules. Only these are stored as fields, and rebuilt from them."""
_MARK = "relight.deepspeed"


class CheckpointEngine(Base):
    """A checkpoint engine for ``engine.checkpoint_engine``.

    ``client_state`` may have tensors, arrays and plain values: anything else is refused by name, before a byte of that
    rank's file is written.

    Args:
        config_params: DeepSpeed's own configuration, which is not used.
        **options: Options of ``relight.save``: ``encrypt=``.
    """

    def __init__(self, config_params: Any = None, **options: Any) -> None:
        super().__init__(config_params)
        self.name = "RelightCheckpointEngine"
        self._options, self._step = save_options(options), 0

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a checkpoint; the last number of its tag is its step."""
        numbers = re.findall(r"\d{1,15}", str(info.tag))
        self._step = int(numbers[-1]) if numbers else 0

    def save(self, state_dict: Any, path: str | os.PathLike[str]) -> None:
        """Save. Durable when it returns."""
        write_as_file(path, _plain(state_dict), self._step, self._options)

    def load(self, path: str | os.PathLike[str], map_location: Any | None = None) -> Any:
        """Return what was saved, verified, on the CPU or at ``map_location``."""
        return _live(read_as_file(path, self._options), map_location)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Return True: every file of this rank is durable. DeepSpeed then waits for other ranks, and writes ``latest``."""
        return True


def _plain(value: Any) -> Any:
    """Return the value without DeepSpeed's own classes."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    name = type(value).__name__
    if _KEPT.get(name) == type(value).__module__:
        return {_MARK: name, "fields": value.value if isinstance(value, Enum) else _plain(_fields(value))}
    return value


def _fields(value: Any) -> dict[str, Any]:
    return (
        {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if dataclasses.is_dataclass(value)
        else vars(value)
    )


def _live(value: Any, map_location: Any) -> Any:
    """Invert ``_plain``."""
    if isinstance(value, torch.Tensor):
        return value.to(map_location) if isinstance(map_location, (str, torch.device)) else value
    if isinstance(value, dict):
        if _MARK in value:
            return _made(value[_MARK], _live(value.get("fields"), map_location))
        return {key: _live(item, map_location) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_live(item, map_location) for item in value)
    return value


def _made(name: Any, fields: Any) -> Any:
    """Return an object of one of the classes in ``_KEPT``."""
    home = _KEPT.get(name) if isinstance(name, str) else None
    if home is None:
        raise UnsafeContent(
            f"a DeepSpeed checkpoint with an object of {name!r}", hint=f"only {', '.join(_KEPT)} are made"
        )
    class_ = getattr(needed(home, "deepspeed"), name)
    if not isinstance(fields, dict):
        return class_(fields)
    instance = class_.__new__(class_)
    for key, value in fields.items():
        object.__setattr__(instance, key, value)
    return instance
