"""A tensor subclass that consists of two inner tensors, as quantised tensors do."""

from __future__ import annotations

from typing import Any

import torch


class TwoTensors(torch.Tensor):
    """The sum of two tensors. The second one is multiplied by ``scale``."""

    first: torch.Tensor
    second: torch.Tensor
    scale: float

    @staticmethod
    def __new__(cls, first: torch.Tensor, second: torch.Tensor, scale: float) -> TwoTensors:
        return torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype, device=first.device)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, first: torch.Tensor, second: torch.Tensor, scale: float) -> None:
        self.first, self.second, self.scale = first, second, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["first", "second"], (self.scale,)

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any = None, stride: Any = None) -> TwoTensors:
        return cls(inner["first"], inner["second"], context[0])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return TwoTensors(args[0].first.detach(), args[0].second.detach(), args[0].scale)
        plain = [value.first + value.second * value.scale if isinstance(value, TwoTensors) else value for value in args]
        return function(*plain, **(kwargs or {}))
