"""Optimizers that step parameters of a component and were not given to the Checkpointer: their state is in no checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
"""Reports in a process's life: code that has one optimizer for each parameter would make thousands."""
DEPTH, OBJECTS_MAX = 4, 10_000
"""Bounds on the search for optimizers inside a component that gives their state itself."""


class _Missed(NamedTuple):
    parameters: int
    where: tuple[str, ...]
    """The components that the parameters are of; none for parameters that no component has."""
    idle: tuple[str, ...] = ()
    """The given optimizers of these parameters: the report is that they never step."""


_alive: WeakSet[UngivenOptimizers] = WeakSet()
"""Those of all Checkpointers of the process: what another one was given is in checkpoints."""


class UngivenOptimizers:
    """Those of one Checkpointer, found when they step for the first time. Costs one set lookup for each step of an optimizer.

    An optimizer of parameters that no component has, or that a given optimizer has which never steps, is reported after a save: until then
    another Checkpointer may be given it, and the given one may step.
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
        """One for each that is still alive."""
        return [self._sentence(type(one).__qualname__, missed) for one, missed in [*self._missed.items(), *self._late()]]

    def saved(self) -> None:
        """Report, once each, what could not be known at an optimizer's first step."""
        for optimizer, missed in self._late():
            self._missed[optimizer] = missed
            self._report(optimizer, missed)

    def close(self) -> None:
        """Check no more. Twice is fine."""
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
        except (AttributeError, KeyError, TypeError):  # groups of another form than torch's: no report is worth ending the training
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
        """Whether it is a component or inside one: there is nothing to look for then, at any save."""
        given = (one for value in self._components.values() for one in _optimizers_in(value))
        return any(optimizer is one or optimizer is inner_of(one) for one in given)

    def _late(self) -> list[tuple[Optimizer, _Missed]]:
        """The optimizers that have stepped and whose report had to wait."""
        found = []
        for optimizer in list(self._checked):
            if optimizer not in self._missed and optimizer not in self._given:
                try:
                    missed = self._idle(optimizer) or self._foreign(optimizer)
                except (AttributeError, KeyError, TypeError):  # as in _before_step
                    continue
                if missed is not None:
                    found.append((optimizer, missed))
        return found

    def _idle(self, optimizer: Optimizer) -> _Missed | None:
        """Whether ``optimizer`` steps what a given one has, which never steps itself."""
        named = {name: list(_optimizers_in(value)) for name, value in self._components.items()}
        stepped = set(map(id, own_parameters(optimizer)))
        theirs = {name: stepped & {id(p) for one in each for p in (*own_parameters(one), *trained_by(one))} for name, each in named.items()}
        steps = {name for name, each in named.items() if any(one in self._checked or not _is_hooked(one) for one in each)}
        idle = tuple(name for name, ids in theirs.items() if ids and name not in steps)
        if not idle or any(ids and name not in idle for name, ids in theirs.items()):
            return None
        return _Missed(len(set().union(*(theirs[name] for name in idle))), (), idle)

    def _foreign(self, optimizer: Optimizer) -> _Missed | None:
        """Whether ``optimizer`` steps parameters that no component of any Checkpointer has."""
        stepped = set(map(id, own_parameters(optimizer)))
        for one in list(_alive):
            for value in one._components.values():
                if optimizer is value or stepped & set(map(id, _parameters_of(value))):
                    return None
                if any(optimizer is given or stepped & set(map(id, own_parameters(given))) for given in _optimizers_in(value)):
                    return None
        return _Missed(len(stepped), ()) if stepped else None

    def _sentence(self, name: str, missed: _Missed) -> str:
        taken = self._components
        if missed.idle:
            given = ", ".join(missed.idle)
            return (
                f"the given {given} has not made one step, and another {name} steps {missed.parameters} of its parameters; "
                f"no checkpoint has the state of that one: give the Checkpointer the optimizer that trains, {missed.idle[0]}=opt"
            )
        free = next(key for n in count(1) if (key := "optimizer" if n == 1 else f"optimizer{n}") not in taken)
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
    """What ``optimizer`` steps of ``components`` that no given optimizer has; None if there is nothing."""
    given = [one for value in components.values() for one in _optimizers_in(value)]
    stepped = {id(one) for one in own_parameters(optimizer)}
    # A given wrapper holds the parameters of the optimizer inside it.
    stepped -= {id(parameter) for one in given for parameter in (*own_parameters(one), *trained_by(one))}
    found = {name: stepped & set(map(id, _parameters_of(value))) for name, value in components.items()} if stepped else {}
    where = tuple(name for name, ids in found.items() if ids)
    return _Missed(len(set().union(*found.values())), where) if where else None


def _is_hooked(optimizer: Optimizer) -> bool:
    """Whether its steps are noticed: torch wraps ``step`` of those whose own ``__init__`` has run."""
    return bool(getattr(type(optimizer).step, "hooked", False))


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
