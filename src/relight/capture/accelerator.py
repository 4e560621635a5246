"""The accelerator of this process, of any kind: CUDA, ROCm, XPU, MPS, or one that another package registers with torch."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


def accelerator_kind() -> str | None:
    """Return the device type of the accelerator that torch supports here, such as ``"cuda"``; None without one.

    There may be no device of it. Costs less than a microsecond.
    """
    try:
        accelerator = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 raises where later versions return None
        return None
    return None if accelerator is None else accelerator.type


def module_in_use() -> Any | None:
    """Return the accelerator's module, such as ``torch.cuda``, if this process has initialized a device; otherwise None."""
    kind = accelerator_kind()
    if kind is None:
        return None
    module = torch.get_device_module(kind)
    in_use = module.is_initialized if hasattr(module, "is_initialized") else module.is_available
    return module if in_use() else None


def device_names() -> list[str]:
    """Return the model of each device; none without an accelerator. Initializes no device."""
    kind = accelerator_kind()
    if kind is None or not torch.accelerator.is_available():
        return []
    module = torch.get_device_module(kind)
    if not hasattr(module, "get_device_name"):
        return [f"{kind}:{index}" for index in range(torch.accelerator.device_count())]
    return [module.get_device_name(index) for index in range(torch.accelerator.device_count())]


def copies_are_queued(device: torch.device) -> bool:
    """Return whether copies between the device and page-locked host memory run while the host continues."""
    return device.type != "cpu" and device.type == accelerator_kind() and _has_streams(device.type)


@cache
def _has_streams(kind: str) -> bool:
    """Return whether streams can be made. Initializes a device; call it only if a tensor is on one."""
    try:
        torch.Stream(device=kind)
    except RuntimeError:  # also NotImplementedError
        return False
    return True


def finish_kernels(device: torch.device) -> None:
    """Wait until everything queued on an accelerator, on any of its streams, is done. Free of cost for host memory."""
    if device.type != "cpu" and device.type == accelerator_kind():
        torch.accelerator.synchronize(device)
