"""Optimizers that were not given to the Checkpointer although they train a component: their state is in no
checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch

from relight.capture import kind_of
from relight.capture.capture import loose_tensors
from relight.capture.classes import inner_of
from relight.capture.kinds import OPTIMIZER, STATEFUL, VALUE
from relight.capture.optimizers import own_parameters, trained_by
from relight.observe import emit
from relight.snapshot import OptimizerHook

Optimizer = torch.optim.Optimizer
REPORTED_MAX = 4
"""Most reports in a process: code with one optimizer for each parameter would cause thousands."""
DEPTH, OBJECTS_MAX = 4, 10_000
"""Limits of the search for optimizers inside a component that saves their state itself."""


class _Missed(NamedTuple):
    parameters: int
    where: tuple[str, ...]
    """The components that have the parameters; empty if no component has them."""
    idle: tuple[str, ...] = ()
    """The given optimizers of these parameters: the report is that they never step."""


_alive: WeakSet[UngivenOptimizers] = WeakSet()
"""The instances of all Checkpointers of the process: an optimizer that another Checkpointer has is saved there."""


class UngivenOptimizers:
    """Finds such optimizers of one Checkpointer at their first step. Costs one set lookup for each step of an
    optimizer.

    Two kinds are reported only after a save: optimizers of parameters that no component has, because another
    Checkpointer may still get them, and optimizers of parameters that a given optimizer has but never steps, because
    that one may still step.
    """

    def __init__(self, components: Mapping[str, object], reports: bool) -> None:
        """``reports``: whether this rank emits events; the other ranks of a job run the same script."""
        self._components, self._reports = components, reports
        self._checked: WeakSet[Optimizer] = WeakSet()
        self._missed: WeakKeyDictionary[Optimizer, _Missed] = WeakKeyDictionary()
        self._given: WeakSet[Optimizer] = WeakSet()
        self._reported = 0
        self._hook = OptimizerHook(self._before_step)
        _alive.add(self)

    @property
    def sentences(self) -> list[str]:
        """One sentence for each missed optimizer that still exists."""
        return [
            self._sentence(type(optimizer).__qualname__, missed)
            for optimizer, missed in [*self._missed.items(), *self._late()]
        ]

    def saved(self) -> None:
        """Report, once each, the optimizers that could not be judged at their first step."""
        for optimizer, missed in self._late():
            self._missed[optimizer] = missed
            self._report(optimizer, missed)

    def close(self) -> None:
        """Stop checking. Idempotent."""
        self._hook.close()

    def _before_step(self, optimizer: Optimizer) -> None:
        if optimizer in self._checked:
            return
        self._checked.add(optimizer)
        try:
            if self._is_given(optimizer):
                self._given.add(optimizer)
                return
            missed = _missed(optimizer, self._components)
        except (AttributeError, KeyError, TypeError):
            # groups of another form than torch's: no report is worth ending the training
            return
        if missed is None:
            return
        self._missed[optimizer] = missed
        self._report(optimizer, missed)

    def _report(self, optimizer: Optimizer, missed: _Missed) -> None:
        self._reported += 1
        if self._reports and self._reported <= REPORTED_MAX:
            name = type(optimizer).__qualname__
            emit("optimizer.missed", self._sentence(name, missed), optimizer=name, parameters=missed.parameters)

    def _is_given(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer is a component or inside one. Then no later check is needed."""
        optimizers = (each for value in self._components.values() for each in _optimizers_in(value))
        return any(optimizer is each or optimizer is inner_of(each) for each in optimizers)

    def _late(self) -> list[tuple[Optimizer, _Missed]]:
        """Return the optimizers that have stepped and must still be reported."""
        late = []
        for optimizer in list(self._checked):
            if optimizer not in self._missed and optimizer not in self._given:
                try:
                    missed = self._idle(optimizer) or self._foreign(optimizer)
                except (AttributeError, KeyError, TypeError):  # as in _before_step
                    continue
                if missed is not None:
                    late.append((optimizer, missed))
        return late

    def _idle(self, optimizer: Optimizer) -> _Missed | None:
        """Return a finding if ``optimizer`` steps parameters of a given optimizer that never steps itself; else
        None."""
        named = {name: list(_optimizers_in(value)) for name, value in self._components.items()}
        stepped = set(map(id, own_parameters(optimizer)))
        theirs = {name: stepped & _parameter_ids(given) for name, given in named.items()}
        steps = {
            name
            for name, given in named.items()
            if any(each in self._checked or not _is_hooked(each) for each in given)
        }
        idle = tuple(name for name, ids in theirs.items() if ids and name not in steps)
        if not idle or any(ids and name not in idle for name, ids in theirs.items()):
            return None
        return _Missed(len(set().union(*(theirs[name] for name in idle))), (), idle)

    def _foreign(self, optimizer: Optimizer) -> _Missed | None:
        """Return a finding if ``optimizer`` steps parameters that no component of any Checkpointer has; else None."""
        stepped = set(map(id, own_parameters(optimizer)))
        for instance in list(_alive):
            for value in instance._components.values():
                if optimizer is value or stepped & set(map(id, _parameters_of(value))):
                    return None
                if any(
                    optimizer is given or stepped & set(map(id, own_parameters(given)))
                    for given in _optimizers_in(value)
                ):
                    return None
        return _Missed(len(stepped), ()) if stepped else None

    def _sentence(self, name: str, missed: _Missed) -> str:
        components = self._components
        if missed.idle:
            idle_names = ", ".join(missed.idle)
            return (
                f"the given {idle_names} has not made one step, and another {name} steps {missed.parameters} of its parameters; "
                f"no checkpoint has the state of that one: give the Checkpointer the optimizer that trains, {missed.idle[0]}=opt"
            )
        free = next(key for n in count(1) if (key := "optimizer" if n == 1 else f"optimizer{n}") not in components)
        if not missed.where:
            return (
                f"optimizer {name} steps {missed.parameters} parameters that no component has, and no checkpoint has them or its state: "
                f"if they are part of this training, give their module as well, as in Checkpointer(..., module=net, {free}=opt)"
            )
        return (
            f"optimizer {name} steps {missed.parameters} parameters of {', '.join(missed.where)}, and no checkpoint has its state: "
            f"give it to the Checkpointer, as in Checkpointer(..., {free}=opt)"
        )


def _missed(optimizer: Optimizer, components: Mapping[str, object]) -> _Missed | None:
    """Return the parameters of ``components`` that ``optimizer`` steps and no given optimizer has; None if there are
    none."""
    optimizers = [each for value in components.values() for each in _optimizers_in(value)]
    # A given wrapper holds the parameters of the optimizer inside it.
    stepped = {id(parameter) for parameter in own_parameters(optimizer)} - _parameter_ids(optimizers)
    by_component = (
        {name: stepped & set(map(id, _parameters_of(value))) for name, value in components.items()} if stepped else {}
    )
    where = tuple(name for name, ids in by_component.items() if ids)
    return _Missed(len(set().union(*by_component.values())), where) if where else None


def _parameter_ids(optimizers: Iterable[Optimizer]) -> set[int]:
    return {id(parameter) for each in optimizers for parameter in (*own_parameters(each), *trained_by(each))}


def _is_hooked(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's steps are noticed: torch wraps ``step`` when the optimizer's own ``__init__``
    runs."""
    return bool(getattr(type(optimizer).step, "hooked", False))


def _parameters_of(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.nn.Module):
        yield from value.parameters()
    elif kind_of(value) == VALUE:
        yield from (tensor for _, tensor in loose_tensors(value, "") if tensor.requires_grad)


def _optimizers_in(value: object) -> Iterator[Optimizer]:
    """Yield the component if it is an optimizer, and the optimizers inside a component with its own ``state_dict``."""
    kind = kind_of(value)
    if kind == OPTIMIZER:
        yield value  # type: ignore[misc]
    if kind not in (OPTIMIZER, STATEFUL):
        return
    seen: set[int] = set()
    level: list[Any] = [value]
    for _ in range(DEPTH):
        below: list[Any] = []
        for element in level:
            if (
                id(element) in seen
                or len(seen) >= OBJECTS_MAX
                or isinstance(element, (torch.Tensor, torch.nn.Module, str, bytes, type))
            ):
                continue
            seen.add(id(element))
            if isinstance(element, Optimizer) and element is not value:
                yield element
            elif isinstance(element, dict):
                below += element.values()
            elif isinstance(element, (list, tuple, set)):
                below += element
            else:
                below += getattr(element, "__dict__", {}).values()
        level = below
