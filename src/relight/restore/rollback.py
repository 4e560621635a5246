"""Apply a rollback that ``relight run`` requests by environment variables: record it in the run's log, so that later
attempts follow it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch

from relight.capture.load_tree import selected
from relight.errors import ConfigError
from relight.format.records import Body
from relight.format.topics import ROLLED_BACK, RollbackNote
from relight.format.tree import join_path
from relight.log import Log, LogView, fold
from relight.observe import emit
from relight.policy.rollback_env import BEFORE, CUT, SKIP
from relight.ranks.group import RankGroup
from relight.store import ByteStore
from relight.torch_private.optimizers import inner_schedulers, rate_attributes


def apply_requested_rollback(store: ByteStore, run: str, ranks: RankGroup, first_step: int = 0) -> None:
    """Record that the run continues from before a step, if ``relight run`` requested that. Once per process. Cost: one
    record, then."""
    before, skip, cut = (os.environ.pop(name, "") for name in (BEFORE, SKIP, CUT))
    if not before.isdecimal():
        return

    lr: float | None = None
    if cut:
        try:
            lr = float(cut)
        except ValueError:
            raise ConfigError(f"{CUT} must be a number, not {cut[:40]!r}") from None

    def write() -> bytes:
        log = Log(store, run)
        log.start()

        def decide(view: LogView) -> tuple[Body, int]:
            return ROLLED_BACK.note(RollbackNote(before=int(before), skip=skip, lr=lr, first_step=first_step)), fold(
                view
            ).epoch

        log.append(decide)
        return b""

    ranks.run_on_rank0(write, "rolling back")
    past = f", past the samples of steps {skip}" if skip else ""
    rates = f", learning rates × {cut}" if cut else ""
    emit("restore.rolled_back", f"going back to before step {before}{past}{rates}", before=int(before), skip=skip)


def scale_learning_rates(components: Mapping[str, object], factor: float, only: Sequence[str] | None = None) -> None:
    """Multiply the learning rates of all optimizers, and the base rates of schedulers, by ``factor``. If ``only`` a
    part was restored, change only restored components. A ``factor`` of 1 changes nothing."""
    taken = [value for name, value in components.items() if factor != 1.0 and _is_restored(name, value, only)]
    done: set[int] = set()
    for value in taken:
        if isinstance(value, torch.optim.Optimizer):
            for group in value.param_groups:
                for name in ("lr", "initial_lr", "max_lr", "min_lr"):
                    if name in group:
                        group[name] = group[name] * factor
        else:
            _cut_schedule(value, factor, done)
    if taken:
        emit(
            "restore.lr_scaled",
            f"learning rates × {factor:g}, as a rollback followed the restored checkpoint",
            factor=factor,
        )


def _is_restored(name: str, value: object, only: Sequence[str] | None) -> bool:
    """Return whether the component's rates were restored. Rates that were not restored have been lowered already, or
    need not be."""
    if isinstance(value, torch.optim.Optimizer):
        return selected(f"{join_path('', name)}/groups", only)
    return isinstance(value, torch.optim.lr_scheduler.LRScheduler) and selected(join_path("", name), only)


def _cut_schedule(schedule: object, factor: float, done: set[int]) -> None:
    """Scale a scheduler once, and its inner schedulers, which have their own base rates."""
    if id(schedule) in done:
        return
    done.add(id(schedule))
    for name in rate_attributes():
        if isinstance(rates := getattr(schedule, name, None), list):
            setattr(schedule, name, [rate * factor for rate in rates])
    for inner in inner_schedulers(schedule):
        _cut_schedule(inner, factor, done)
