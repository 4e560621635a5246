"""Hooks before an optimizer's step: what is deleted or closed while the step begins does not disturb it."""

from __future__ import annotations

import gc

import torch

from relight.snapshot import OptimizerHook, StepHook


class Counter:
    """Counts steps; like a Checkpointer, it is part of a cycle, so only the garbage collector deletes it."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.itself = self
        self.hook = OptimizerHook(self.before)

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls.append(optimizer)


class Collector:
    """Lets go of a ``Counter`` and runs the garbage collector at the start of a step."""

    def __init__(self, counters: list[Counter]) -> None:
        self.counters, self.calls = counters, 0
        self.hook = StepHook(self.before)

    def before(self) -> None:
        self.calls += 1
        self.counters.clear()
        gc.collect()


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)


def test_the_garbage_collector_may_run_while_a_step_begins() -> None:
    """An object with a hook that is collected there raised "OrderedDict mutated during iteration" out of ``step()``."""
    collector, later, optimizer = Collector([Counter(), Counter()]), Counter(), sgd()
    optimizer.step()
    optimizer.step()
    assert collector.calls == len(later.calls) == 2
    collector.hook.close()


def test_a_hook_may_be_closed_twice() -> None:
    """``close`` removes one hook, and leaves the others."""
    first, second, optimizer = Counter(), Counter(), sgd()
    optimizer.step()
    assert first.calls == second.calls == [optimizer]
    second.hook.close()
    second.hook.close()
    optimizer.step()
    first.hook.close()
    optimizer.step()
    assert len(first.calls) == 2 and len(second.calls) == 1


def test_a_deleted_object_is_forgotten() -> None:
    """A hook does not keep its object alive, and is not called after it."""
    counter, optimizer = Counter(), sgd()
    calls = counter.calls
    del counter
    gc.collect()
    optimizer.step()
    assert calls == []
