"""A state like that of training: parameters and AdamW's moments, with random values. Needs torch."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import torch
from torch import nn

from relight.format import Digest

_WORK = 384


class BenchState:
    """Parameters with the given numbers of elements, in host memory, and an optimizer that has done a step."""

    def __init__(self, elements: Sequence[int]) -> None:
        torch.manual_seed(0)
        self.model = nn.ParameterDict(
            {f"p{number:06d}": nn.Parameter(torch.randn(count) * 0.02) for number, count in enumerate(elements)}
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        for parameter in self.model.parameters():
            moments = {"exp_avg": torch.randn_like(parameter) * 1e-3, "exp_avg_sq": torch.rand_like(parameter) * 1e-6}
            self.optimizer.state[parameter] = {
                "step": torch.tensor(1.0),
                **{key: value.detach() for key, value in moments.items()},
            }
        self._left, self._right = torch.randn(2, _WORK, _WORK)
        self._product = torch.empty(_WORK, _WORK)

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors of parameters and optimizer."""
        all_tensors: list[torch.Tensor] = []
        for parameter in self.model.parameters():
            all_tensors += [parameter.detach(), *self.optimizer.state[parameter].values()]
        return all_tensors

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def nudge(self) -> None:
        """Change every tensor a little, so that a save cannot reuse chunks of an earlier save."""
        for tensor in self.tensors():
            tensor.mul_(1.0009765625)

    def scramble(self) -> None:
        """Zero every tensor, so that a restore that omits one is detected."""
        for tensor in self.tensors():
            tensor.zero_()

    def digest(self) -> bytes:
        """Return a hash of all tensors."""
        hasher = Digest(max_threads=Digest.AUTO)
        for tensor in self.tensors():
            hasher.update(memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B"))
        return hasher.digest()

    def work(self) -> None:
        """Do some milliseconds of work like training's, on all cores that torch uses."""
        torch.mm(self._left, self._right, out=self._product)

    def work_s(self, seconds: float) -> float:
        """Return the seconds that ``work`` takes alone, measured for ``seconds``."""
        started, count = time.perf_counter(), 0
        while (passed := time.perf_counter() - started) < seconds or not count:
            self.work()
            count += 1
        return passed / count


def has_accelerator() -> bool:
    """Return whether training on this machine would run on an accelerator."""
    return torch.accelerator.is_available()
