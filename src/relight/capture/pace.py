"""Count how many delivered batches the training loop has used: a prefetcher between loader and loop takes some ahead."""

from __future__ import annotations

import gc
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from inspect import CO_GENERATOR
from threading import get_ident
from types import FrameType, GeneratorType
from typing import Any
from weakref import ref

import torch

from relight.capture.delivered import caller, frame_of

SURE = 8
"""Steps after which batches in a prefetcher are few compared with those that were used."""
RECENT = 16
"""Newest batches that are recognised if the loop still holds them."""


class LoaderPace:
    """Batches delivered and steps reported in one iteration over a loader.

    The batches per step are the most frequent number delivered between two reports. If more were delivered before the
    first report, a prefetcher may be ahead of the loop by the difference. If the frame that requested the last batch
    is still running at a report, the loop takes the batches itself. It is then ahead only if it still holds both the
    batch of this step and the last one. If another thread takes the batches, each step is assumed to use one.
    """

    def __init__(self, earlier: LoaderPace | None = None) -> None:
        """``earlier``: the pace of the previous pass. Its last batches may not be used yet."""
        self.rate: int | None = earlier.rate if earlier is not None else None
        """Batches per step; None: unknown."""
        self.owed = earlier.unreported if earlier is not None else 0
        """Batches of the previous pass that were not used at the last report."""
        self.unsure = False
        """Whether there was only one report, and more than one batch was delivered before it."""
        self.over = False
        """Whether the loader has no more batches in this pass."""
        self.threaded = False
        """Whether the last batch was taken in another thread than the one that reports."""
        self._reported = False
        self._used: int | None = None
        """Batches used at the last report; None: all delivered batches."""
        self._taker: tuple[int, Any] | None = None
        self._generator: ref[GeneratorType[Any, Any, Any]] | None = None
        """The suspended generator that took the last batch."""
        self._thread = 0
        self._taken = self._at_report = self._steps = self._first = self._first_steps = 0
        self._rates: Counter[int] = Counter()
        self._recent: deque[Any] = deque(maxlen=RECENT)

    def __reduce__(self) -> tuple[Any, ...]:
        return LoaderPace, ()  # a copied loader has delivered nothing

    @property
    def ahead(self) -> int:
        """Batches that were delivered but not used."""
        return 0 if self._used is None else max(0, self._taken - self._used)

    @property
    def has_steps(self) -> bool:
        """Whether the loop has reported a step during this iteration."""
        return self._reported

    @property
    def unused_before(self) -> int:
        """Batches of the previous pass that the loop has not used; 0 until a report counted them."""
        return self.owed if self._reported else 0

    @property
    def unreported(self) -> int:
        """Batches of this pass that the loop has not used; all of them if it has reported no step."""
        return self.ahead if self._reported else self._taken

    def take(self, batch: Any) -> None:
        """Record a delivered batch, and the code that requested it, which called the caller's caller. A microsecond."""
        taker, frame = caller(3)
        if self._taker is not None and taker[1] is not self._taker[1] and not self._steps:
            self._taken = 0  # other code took those batches, for example to initialise shapes
        self._taker, self._thread = taker, get_ident()
        self._taken += 1
        self._recent.append(_mark(batch))
        if self._steps >= 2 or not frame.f_code.co_flags & CO_GENERATOR:  # after two reports the counts suffice
            self._generator = None
        elif frame is not self._frame_of_generator():
            self._generator = _generator_of(frame)

    def report(self, steps: int) -> None:
        """Record that the loop reports ``steps`` further steps as done. Some microseconds."""
        if self._taker is None:
            return
        self._reported = True
        self.threaded = self._thread != get_ident()
        frame = None if self.threaded else frame_of(self._taker, 1)
        if self.threaded and self.rate is None:
            self.rate = 1
        if self.owed:
            rate = self.rate or _usual(self.owed + self._taken, steps) if steps > 1 else self.rate
            self.rate = rate
            owed = min(self.owed, steps * (rate or 0))
            steps -= owed // rate if rate else 0
            self.owed = self.owed - owed if rate and frame is None else 0  # the loop itself has used them
        self._steps += steps
        since, self._at_report = self._taken - self._at_report, self._taken
        if self.threaded:
            self._used = (self.rate or 1) * self._steps
            return
        if not self._first:
            self._first, self._first_steps = self._taken, self._steps
        elif steps and since and since % steps == 0:
            self._rates[since // steps] += 1
        if self._rates:
            self.rate = self._rates.most_common(1)[0][0]
        elif self.rate is None and self._steps > 1:
            self.rate = _usual(self._taken, self._steps)
        self._used, self.unsure = None, False
        rate = self.rate
        if rate is None and self._steps == 1 and self._taken > 1:
            holder = frame or self._frame_of_generator()
            holds = holder is not None and self._holds(holder, self._taken - 1)
            rate = 1 if holds and frame is None else None
            self.unsure = rate is None and not self.over and (holds or frame is None)
        if rate and self._first > rate * self._first_steps and self._taken > rate * self._steps:
            ahead = self._taken - rate * self._steps
            self._used = rate * self._steps if frame is None or self._holds(frame, ahead) else None

    def _frame_of_generator(self) -> FrameType | None:
        generator = self._generator() if self._generator is not None else None
        return generator.gi_frame if generator is not None else None

    def _holds(self, frame: FrameType, ahead: int) -> bool:
        """Return whether the frame's variables hold the last batch, and the one delivered ``ahead`` batches before it."""
        if ahead >= len(self._recent):
            return False
        last, used = self._recent[-1], self._recent[-1 - ahead]
        held_marks = [False, False]
        for value in frame.f_locals.values():
            for place, mark in enumerate((last, used)):
                held_marks[place] = held_marks[place] or _is_in(value, mark, 2)
        return all(held_marks)


def _generator_of(frame: FrameType) -> ref[GeneratorType[Any, Any, Any]] | None:
    """Return the generator that runs in the frame. Before Python 3.14 that takes 12 ms for each million objects.

    The frame itself must not be kept: CPython 3.13 ends with a segmentation fault at the variables of a frame without its generator
    (cpython issue 125723).
    """
    if sys.version_info >= (3, 14):
        generator = frame.f_generator
    else:
        generator = next((each for each in gc.get_referrers(frame) if isinstance(each, GeneratorType)), None)
    return ref(generator) if generator is not None else None


def _usual(taken: int, steps: int) -> int | None:
    """Return the batches per step, from one report of several steps; None: less than one.

    A remainder of a few batches comes from a prefetcher, not from the number of batches per step.
    """
    return 1 if taken % steps and (steps < SURE or taken < 2 * steps) and taken > steps else taken // steps or None


def _mark(batch: Any) -> Any:
    """Return what recognises a batch without keeping it alive: a reference to its first tensor, or its ``id``."""
    first = next(_tensors(batch, 2), None)
    return ref(first) if first is not None else id(batch)


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple, deque, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item, depth - 1)


def _is_in(value: Any, mark: Any, depth: int) -> bool:
    """Return whether ``value``, or a container of ``depth`` levels, has the batch that ``_mark`` marked."""
    if isinstance(mark, int):
        inside = value if depth and isinstance(value, (list, tuple, deque)) else ()
        return id(value) == mark or any(id(item) == mark for item in inside)
    target = mark()
    return target is not None and any(item is target for item in _tensors(value, depth + 1))
