"""DeepSpeed's ZeRO, stages 1 and 2: what its flat tensors hold.

>>> engine, optimizer, _, _ = deepspeed.initialize(...)  # doctest: +SKIP
>>> relight.Checkpointer("store/run", model=engine.module, optimizer=flattened(optimizer))  # doctest: +SKIP
"""

from __future__ import annotations

from typing import Any

import torch

from relight.capture import flattened as declare
from relight.errors import ConfigError


def flattened(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside a ``DeepSpeedZeroOptimizer``, for a Checkpointer, which then knows what parameter each run of it is of.

    Stages 1 and 2 (seen with DeepSpeed 0.19), parameters whole on each rank. Its loss scaler and the engine's counters are the caller's:
    ``scaler=optimizer.loss_scaler.__dict__``. ``ConfigError`` for another kind of optimizer, such as stage 3's.
    """
    inner, groups = getattr(optimizer, "optimizer", None), getattr(optimizer, "round_robin_bit16_groups", None)
    flats = getattr(optimizer, "single_partition_of_fp32_groups", None)
    processes = getattr(optimizer, "real_dp_process_group", None)
    if not isinstance(inner, torch.optim.Optimizer) or groups is None or flats is None or processes is None:
        raise ConfigError(
            f"a {type(optimizer).__name__} is no ZeRO optimizer of stage 1 or 2 as DeepSpeed has it",
            hint="relight.flattened(…) tells what is in a flat tensor of any other",
        )
    for flat, parameters, group in zip(flats, groups, processes, strict=True):
        declare(flat, list(parameters), group=group)
    return inner
