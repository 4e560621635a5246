"""DeepSpeed's ZeRO, stages 1 and 2: the content of its flat tensors.

>>> engine, optimizer, _, _ = deepspeed.initialize(...)  # doctest: +SKIP
>>> relight.Checkpointer("store/run", model=engine.module, optimizer=flattened(optimizer))  # doctest: +SKIP
"""

from __future__ import annotations

from typing import Any

import torch

from relight.capture import flattened as declare
from relight.errors import ConfigError


def flattened(optimizer: Any) -> torch.optim.Optimizer:
    """Declare the content of a ``DeepSpeedZeroOptimizer``'s flat tensors. Return its inner optimizer, for a Checkpointer.

    ZeRO stages 1 and 2 (tested with DeepSpeed 0.19), with parameters whole on each rank. Save its loss scaler and the
    engine's counters yourself: ``scaler=optimizer.loss_scaler.__dict__``. Raise ``ConfigError`` for another kind of
    optimizer, such as stage 3's.

    Args:
        optimizer: The ``DeepSpeedZeroOptimizer``: ``engine.optimizer``.
    """
    inner, groups = getattr(optimizer, "optimizer", None), getattr(optimizer, "round_robin_bit16_groups", None)
    flats = getattr(optimizer, "single_partition_of_fp32_groups", None)
    processes = getattr(optimizer, "real_dp_process_group", None)
    if not isinstance(inner, torch.optim.Optimizer) or groups is None or flats is None or processes is None:
        raise ConfigError(
            f"a {type(optimizer).__name__} is not a ZeRO optimizer of stage 1 or 2 of DeepSpeed",
            hint="declare the flat tensors of another optimizer with relight.flattened(…)",
        )
    for flat, parameters, group in zip(flats, groups, processes, strict=True):
        declare(flat, list(parameters), group=group)
    return inner
