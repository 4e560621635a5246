"""Copy a state while training continues: slices in a queue, background threads that copy them, and a trainer that
copies the rest if it must."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from relight.comm import new_threads
from relight.snapshot.touch_detection import TensorFingerprints

_NICE = 5
RETURNED_S = 0.1
"""Seconds between two checks whether another thread has returned a slice that it could not copy."""


class Snapshot:
    """One state that is being copied into memory.

    ``on_complete(touched)`` is called once, by the thread that finishes the snapshot. ``touched`` names the tensors
    that have changed since the call; it is empty if none has.
    """

    def __init__(
        self,
        marks: TensorFingerprints,
        base: int,
        on_complete: Callable[[list[str]], None],
        on_copied: Callable[[int], None] | None = None,
    ) -> None:
        """``marks``: the tensors to copy, with their fingerprints at the call. ``base``: the slot's address, which
        must stay valid until the snapshot is complete.

        ``on_copied`` receives, after each slice, the offset in the slot before which everything is copied.
        """
        self._marks = marks
        self._slices = marks.watched.slices
        self._base = base
        self._queue = deque(range(len(self._slices)))
        self._left = len(self._queue)
        self._on_copied = on_copied
        self._taken: set[int] = set()
        self._lock = threading.Lock()
        self._touched: set[str] = set()
        self._on_complete = on_complete
        self.complete = threading.Event()
        self.waited_s = 0.0
        self.copied_by_trainer = 0

    @property
    def copied(self) -> float:
        """Share of the slices that are copied, from 0 to 1."""
        return 1 - self._left / len(self._slices) if self._slices else 1.0

    def help(self) -> bool:
        """Copy one slice. Return False if no slice is left to take."""
        with self._lock:
            if not self._queue:
                return False
            index = self._queue.popleft()
            self._taken.add(index)
        copied = False
        try:
            self._copy(index)
            copied = True
        finally:
            # no memory for a sample: put the slice back for the trainer, which would wait for ever otherwise
            if not copied:
                with self._lock:
                    self._taken.discard(index)
                    self._queue.append(index)
        with self._lock:
            self._left -= 1
            last = not self._left
            self._taken.discard(index)
            if self._on_copied is not None and not last:
                self._on_copied(self._slices[min(self._taken) if self._taken else self._queue[0]].target)
        if last:
            self._finish()
        return True

    def _copy(self, index: int) -> None:
        part, marks = self._slices[index], self._marks
        target = self._base + part.target
        in_place = marks.is_there(part.tensor)
        if in_place:
            ctypes.memmove(target, part.source, part.length)
        if not in_place or not marks.fits(index, target):
            self._touched.add(marks.watched.names[part.tensor])

    def start(self) -> None:
        """Complete the snapshot at once if there is nothing to copy."""
        if not self._left:
            self._finish()

    def wait(self) -> None:
        """Copy the slices that are left, then wait for those that other threads are copying: at most the time of one
        slice each."""
        if self.complete.is_set():
            return
        before = time.perf_counter()
        while not self.complete.is_set():
            try:
                if self.help():
                    self.copied_by_trainer += 1
                else:
                    self.complete.wait(RETURNED_S)
            except MemoryError:
                self._abort()
        self.waited_s += time.perf_counter() - before

    def _abort(self) -> None:
        """Stop copying: the remaining slices count as changed, so that the save fails and training continues."""
        with self._lock:
            left, self._left = list(self._queue), self._left - len(self._queue)
            self._queue.clear()
            self._touched.update(self._marks.watched.names[self._slices[index].tensor] for index in left)
            last = not self._left
        if last:
            self._finish()

    def _finish(self) -> None:
        try:
            try:
                touched = self._touched | self._marks.touched()
            except MemoryError:
                touched = {*self._touched, *self._marks.watched.names}
            self._on_complete(sorted(touched))
        finally:
            self.complete.set()


class Copier:
    """Threads of this process that copy slices, at a lower priority than training."""

    def __init__(self, threads: int = 1) -> None:
        self._wanted = threads
        self._threads: list[threading.Thread] = []
        self._current: Snapshot | None = None
        self._changed = threading.Condition()
        self._closed = False

    def start(self, snapshot: Snapshot) -> None:
        """Begin to copy ``snapshot``. One snapshot at a time: the caller has waited for the previous one."""
        snapshot.start()
        if snapshot.complete.is_set():
            return
        with self._changed:
            if not self._threads:
                threads = [
                    threading.Thread(target=self._work, name="relight-copy", daemon=True) for _ in range(self._wanted)
                ]
                self._threads = [thread for thread in threads if new_threads.start(thread)]
            if self._threads:
                self._current = snapshot
                self._changed.notify_all()
        if not self._threads:  # no thread could be started, so the caller copies everything now
            snapshot.wait()

    def close(self, wait_s: float = 5.0) -> None:
        """End the threads, after the snapshot that they copy."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():  # the last reference to the owner may end in this thread
                thread.join(wait_s)

    def _work(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._current is not None or self._closed)
                snapshot = self._current
                if snapshot is None:
                    return
            with contextlib.suppress(MemoryError):  # the trainer copies the rest at its next optimizer.step
                while snapshot.help():
                    pass
            with self._changed:
                if self._current is snapshot:
                    self._current = None
            del snapshot  # otherwise this thread would keep its memory until the next snapshot
