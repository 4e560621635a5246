"""DeepSpeed: ``CheckpointEngine``, through which ``save_checkpoint`` and ``load_checkpoint`` are in Relight's format. Seen with 0.19.

``engine.checkpoint_engine = CheckpointEngine()`` after ``deepspeed.initialize``, on every rank. Names, folders, ``latest``, and which rank
writes what, stay DeepSpeed's; each of its files becomes a directory of that name: there or not, every byte checked, nothing executed.
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
"""DeepSpeed's own classes in what it saves, and where they are: kept as their fields, made anew from them, and no others."""
_MARK = "relight.deepspeed"


class CheckpointEngine(Base):
    """A checkpoint engine for ``engine.checkpoint_engine``. ``options`` are ``relight.save``'s: ``encrypt=``.

    What is in ``client_state`` has to be tensors, arrays and plain values: anything else is refused with its name, before a byte of that
    rank's file is written.
    """

    def __init__(self, config_params: Any = None, **options: Any) -> None:
        super().__init__(config_params)
        self.name = "RelightCheckpointEngine"
        self._options, self._step = save_options(options), 0

    def create(self, info: CheckpointCommitInfo) -> None:
        """A checkpoint begins; the last number of its tag is its step."""
        found = re.findall(r"\d{1,15}", str(info.tag))
        self._step = int(found[-1]) if found else 0

    def save(self, state_dict: Any, path: str | os.PathLike[str]) -> None:
        """Durable when it returns."""
        write_as_file(path, _plain(state_dict), self._step, self._options)

    def load(self, path: str | os.PathLike[str], map_location: Any | None = None) -> Any:
        """What was saved, verified, on the CPU, or where ``map_location`` says."""
        return _live(read_as_file(path, self._options), map_location)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Every file of this rank is durable; DeepSpeed waits for the other ranks, and names it in ``latest`` then."""
        return True


def _plain(value: Any) -> Any:
    """The same without DeepSpeed's own classes."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(one) for one in value)
    name = type(value).__name__
    if _KEPT.get(name) == type(value).__module__:
        return {_MARK: name, "fields": value.value if isinstance(value, Enum) else _plain(_fields(value))}
    return value


def _fields(value: Any) -> dict[str, Any]:
    return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else vars(value)


def _live(value: Any, map_location: Any) -> Any:
    """The way back."""
    if isinstance(value, torch.Tensor):
        return value.to(map_location) if isinstance(map_location, (str, torch.device)) else value
    if isinstance(value, dict):
        if _MARK in value:
            return _made(value[_MARK], _live(value.get("fields"), map_location))
        return {key: _live(one, map_location) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_live(one, map_location) for one in value)
    return value


def _made(name: Any, fields: Any) -> Any:
    """An object of one of ``_KEPT``."""
    home = _KEPT.get(name) if isinstance(name, str) else None
    if home is None:
        raise UnsafeContent(f"a DeepSpeed checkpoint with an object of {name!r}", hint=f"only {', '.join(_KEPT)} are made")
    made = getattr(needed(home, "deepspeed"), name)
    if not isinstance(fields, dict):
        return made(fields)
    one = made.__new__(made)
    for key, value in fields.items():
        object.__setattr__(one, key, value)
    return one
