"""Accelerate: ``checkpointer`` returns a ``relight.Checkpointer`` of the objects from ``accelerator.prepare``.

Tested with 1.15.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from relight.checkpointer import Checkpointer
from relight.errors import ConfigError
from relight.integrations.frameworks import OPTIONS, StateFunctions, checkpointer_options, needed

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
else:
    AcceleratedOptimizer = needed("accelerate.optimizer", "accelerate").AcceleratedOptimizer
    AcceleratedScheduler = needed("accelerate.scheduler", "accelerate").AcceleratedScheduler


def checkpointer(accelerator: Accelerator, path: str | os.PathLike[str], **given: Any) -> Checkpointer:
    """Return a Checkpointer that replaces ``save_state``, ``load_state`` and ``skip_first_batches``.

    Use its ``restore()``, ``step()`` and ``close()``.

    ``given``: ``relight.Checkpointer``'s options, and components under any names: models, optimizers, schedulers and
    loaders that ``prepare`` returned, and any other component. The accelerator's scaler and its count of accumulated
    batches are added. Loaders continue within the epoch. Raise ``ConfigError`` with DeepSpeed and Megatron-LM, which
    keep their state themselves.

    Args:
        accelerator: The accelerator that prepared the objects.
        path: The store and the run, as for ``relight.Checkpointer``.
        **given: Options of ``relight.Checkpointer``, and components under any names.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in ("DEEPSPEED", "MEGATRON_LM"):
        raise ConfigError(
            f"{kind} keeps the training state outside the objects that accelerator.prepare() returns",
            hint="use relight.integrations.deepspeed or relight.integrations.megatron",
        )
    given = checkpointer_options(given, {})
    options = {name: value for name, value in given.items() if name in OPTIONS and name != "state"}
    state = {name: _own(value) for name, value in {**given.pop("state"), **given}.items() if name not in OPTIONS}
    loaders = {
        name: value
        for name, value in state.items()
        if isinstance(value, torch.utils.data.DataLoader) and hasattr(value, "iteration")
    }
    if accelerator.scaler is not None:
        state["accelerate_scaler"] = accelerator.scaler

    def get_state() -> dict[str, Any]:
        return {"step": accelerator.step, "epochs": {name: loader.iteration for name, loader in loaders.items()}}

    def set_state(saved: dict[str, Any]) -> None:
        accelerator.step = saved["step"]
        for name, loader in loaders.items():
            loader.iteration = saved["epochs"][name]  # the loader seeds its sampler with this when its epoch begins

    return Checkpointer(path, state={**state, "accelerate": StateFunctions(get_state, set_state)}, **options)


def _own(value: Any) -> Any:
    """Return the object inside accelerate's wrapper."""
    if isinstance(value, AcceleratedOptimizer):
        return value.optimizer
    if isinstance(value, AcceleratedScheduler):
        return value.scheduler
    return value
