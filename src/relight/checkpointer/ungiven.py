"""Optimizers that step parameters of a component and were not given to the Checkpointer: their state is in no checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch

from relight.capture import kind_of
from relight.capture.captured import loose_tensors
from relight.capture.classes import inner_of
from relight.capture.kinds import OPTIMIZER, STATEFUL, VALUE
from relight.capture.optimizers import own_parameters, trained_by
from relight.observe import emit
from relight.snapshot import OptimizerHook

Optimizer = torch.optim.Optimizer
REPORTED_MAX = 4
"""Reports in a process's life: code that has one optimizer for each parameter would make thousands."""
DEPTH, OBJECTS_MAX = 4, 10_000
"""Bounds on the search for optimizers inside a component that gives their state itself."""


class _Missed(NamedTuple):
    parameters: int
    where: tuple[str, ...]


class UngivenOptimizers:
    """Those of one Checkpointer, found when they step for the first time. Costs one set lookup for each step of an optimizer."""

    def __init__(self, components: Mapping[str, object], reports: bool) -> None:
        """``reports``: whether this rank emits events; the other ranks of a job run the same script."""
        self._components, self._reports = components, reports
        self._checked: WeakSet[Optimizer] = WeakSet()
        self._missed: WeakKeyDictionary[Optimizer, _Missed] = WeakKeyDictionary()
        self._reported = 0
        self._hook = OptimizerHook(self._before_step)

    @property
    def sentences(self) -> list[str]:
        """One for each that is still alive."""
        return [self._sentence(type(one).__qualname__, missed) for one, missed in self._missed.items()]

    def close(self) -> None:
        """Check no more. Twice is fine."""
        self._hook.close()

    def _before_step(self, optimizer: Optimizer) -> None:
        if optimizer in self._checked:
            return
        self._checked.add(optimizer)
        try:
            missed = _missed(optimizer, self._components)
        except (AttributeError, KeyError, TypeError):  # groups of another form than torch's: no report is worth ending the training
            return
        if missed is None:
            return
        self._missed[optimizer] = missed
        self._reported += 1
        if self._reports and self._reported <= REPORTED_MAX:
            name = type(optimizer).__qualname__
            emit("optimizer.missed", self._sentence(name, missed), optimizer=name, parameters=missed.parameters)

    def _sentence(self, name: str, missed: _Missed) -> str:
        taken = self._components
        free = next(key for n in count(1) if (key := "optimizer" if n == 1 else f"optimizer{n}") not in taken)
        return (
            f"optimizer {name} steps {missed.parameters} parameters of {', '.join(missed.where)}, and no checkpoint has its state: "
            f"give it to the Checkpointer, as in Checkpointer(..., {free}=opt)"
        )


def _missed(optimizer: Optimizer, components: Mapping[str, object]) -> _Missed | None:
    """What ``optimizer`` steps of ``components`` that no given optimizer has; None if there is nothing, or if it is given itself."""
    given = [one for value in components.values() for one in _optimizers_in(value)]
    if any(optimizer is one or optimizer is inner_of(one) for one in given):
        return None
    stepped = {id(one) for one in own_parameters(optimizer)}
    # A given wrapper holds the parameters of the optimizer inside it.
    stepped -= {id(parameter) for one in given for parameter in (*own_parameters(one), *trained_by(one))}
    found = {name: stepped & set(map(id, _parameters_of(value))) for name, value in components.items()} if stepped else {}
    where = tuple(name for name, ids in found.items() if ids)
    return _Missed(len(set().union(*found.values())), where) if where else None


def _parameters_of(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.nn.Module):
        yield from value.parameters()
    elif kind_of(value) == VALUE:
        yield from (tensor for _, tensor in loose_tensors(value, "") if tensor.requires_grad)


def _optimizers_in(value: object) -> Iterator[Optimizer]:
    """The component itself, or optimizers that a component with its own ``state_dict`` holds."""
    kind = kind_of(value)
    if kind == OPTIMIZER:
        yield value  # type: ignore[misc]
    if kind not in (OPTIMIZER, STATEFUL):
        return
    seen: set[int] = set()
    level: list[Any] = [value]
    for _ in range(DEPTH):
        below: list[Any] = []
        for one in level:
            if id(one) in seen or len(seen) >= OBJECTS_MAX or isinstance(one, (torch.Tensor, torch.nn.Module, str, bytes, type)):
                continue
            seen.add(id(one))
            if isinstance(one, Optimizer) and one is not value:
                yield one
            elif isinstance(one, dict):
                below += one.values()
            elif isinstance(one, (list, tuple, set)):
                below += one
            else:
                below += getattr(one, "__dict__", {}).values()
        level = below
