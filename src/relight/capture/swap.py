"""Exchange averaged weights with the model's own for evaluation, with a flag that survives a resume."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import nn

from relight.capture.kinds import own_name, unwrap, wrapped
from relight.errors import IncompatibleState


class Swap:
    """Exchanges the values of ``model`` and ``averaged`` (an ``AveragedModel`` or a copy).

    Give it to the Checkpointer with both.

    A save while swapped in holds both modules' present values and the flag. After the resume ``swapped`` is True, and
    leaving the block gives the model its own weights back. ``with swap:`` swaps for a block.

    Args:
        model: The module that is trained.
        averaged: Its averaged copy, such as ``AveragedModel``.
    """

    def __init__(self, model: nn.Module, averaged: nn.Module) -> None:
        self._model, self._averaged = model, averaged
        self.swapped = False

    def swap(self) -> None:
        """Exchange the values of parameters and buffers, in place."""
        inner = unwrap(self._averaged)
        source = getattr(inner, "module", inner) if hasattr(inner, "n_averaged") else inner
        mine, theirs = _tensors(self._model), _tensors(source)
        problems = [f"{name}: only one of the two has it" for name in sorted(mine.keys() ^ theirs.keys())]
        for name in mine.keys() & theirs.keys():
            if (mine[name].shape, mine[name].dtype) != (theirs[name].shape, theirs[name].dtype):
                problems.append(
                    f"{name}: {mine[name].dtype} {list(mine[name].shape)}, {theirs[name].dtype} {list(theirs[name].shape)}"
                )
        if problems:  # before any value is moved
            raise IncompatibleState("the averaged copy does not have the tensors of the model", details=problems)
        with torch.no_grad():
            for name, model_tensor in mine.items():
                saved = model_tensor.detach().clone()
                model_tensor.copy_(theirs[name])
                theirs[name].copy_(saved)
        self.swapped = not self.swapped

    def __enter__(self) -> Swap:
        if not self.swapped:
            self.swap()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.swapped:
            self.swap()

    def state_dict(self) -> dict[str, Any]:
        """Return the flag."""
        return {"swapped": self.swapped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the flag: the values themselves are restored with the two modules."""
        self.swapped = bool(state["swapped"])


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers, once each, under the unwrapped module's names."""
    inner = unwrap(module)
    wrappers = wrapped(inner)
    return {own_name(name, wrappers): tensor for name, tensor in (*inner.named_parameters(), *inner.named_buffers())}
