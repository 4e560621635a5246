"""A state such as training has: parameters, AdamW's moments, random numbers. Needs torch."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import torch
from torch import nn

from relight.format import Digest

_WORK = 384


class BenchState:
    """Parameters of so many elements each, in host memory, and an optimizer that has seen a step."""

    def __init__(self, elements: Sequence[int]) -> None:
        torch.manual_seed(0)
        self.model = nn.ParameterDict({f"p{number:06d}": nn.Parameter(torch.randn(count) * 0.02) for number, count in enumerate(elements)})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        for parameter in self.model.parameters():
            moments = {"exp_avg": torch.randn_like(parameter) * 1e-3, "exp_avg_sq": torch.rand_like(parameter) * 1e-6}
            self.optimizer.state[parameter] = {"step": torch.tensor(1.0), **{key: value.detach() for key, value in moments.items()}}
        self._left, self._right = torch.randn(2, _WORK, _WORK)
        self._product = torch.empty(_WORK, _WORK)

    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        held: list[torch.Tensor] = []
        for parameter in self.model.parameters():
            held += [parameter.detach(), *self.optimizer.state[parameter].values()]
        return held

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(one.nbytes for one in self.tensors())

    def nudge(self) -> None:
        """Change every tensor a little: no save may find what the one before it found."""
        for one in self.tensors():
            one.mul_(1.0009765625)

    def scramble(self) -> None:
        """Make sure that what a restore leaves out is noticed."""
        for one in self.tensors():
            one.zero_()

    def digest(self) -> bytes:
        """A hash of everything."""
        hasher = Digest(max_threads=Digest.AUTO)
        for one in self.tensors():
            hasher.update(memoryview((ctypes.c_ubyte * one.nbytes).from_address(one.data_ptr())).cast("B"))
        return hasher.digest()

    def work(self) -> None:
        """Some milliseconds of what training does, on all the cores that torch uses."""
        torch.mm(self._left, self._right, out=self._product)

    def work_s(self, seconds: float) -> float:
        """How long ``work`` takes when nothing else goes on: measured for so long."""
        started, count = time.perf_counter(), 0
        while (passed := time.perf_counter() - started) < seconds or not count:
            self.work()
            count += 1
        return passed / count


def has_accelerator() -> bool:
    """Whether training here would run on something else than the cores."""
    return torch.accelerator.is_available() if hasattr(torch, "accelerator") else torch.cuda.is_available()
