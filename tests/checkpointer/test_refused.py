"""The system refuses a thread, a descriptor, memory or a process. A save uses less, or fails, and training
continues."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import relight
from relight.checkpointer.failure_policy import FailurePolicy, ends_a_save
from relight.comm import new_threads
from relight.comm.new_threads import ThreadPool
from relight.errors import StoreUnavailable
from relight.observe import Event, subscribe
from relight.store.retry import FirstContact, first_contact


@pytest.fixture
def seen() -> Iterator[list[Event]]:
    events: list[Event] = []
    undo = subscribe(events.append)
    yield events
    undo()


@pytest.fixture(autouse=True)
def _fresh_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_threads, "_reported", threading.Event())


class Refusals:
    """Counts the calls that Relight makes of one kind, and refuses one of them, or all from it on."""

    def __init__(self, error: Callable[[], Exception]) -> None:
        self.error, self.calls, self.at, self.always, self.on = error, 0, 0, False, False

    def count(self) -> None:
        if not self.on or not _is_ours(sys._getframe(2)):
            return
        self.calls += 1
        if self.at and (self.calls == self.at or (self.always and self.calls > self.at)):
            raise self.error()


def _is_ours(frame: Any) -> bool:
    for _ in range(12):
        if frame is None:
            return False
        if f"{os.sep}relight{os.sep}" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def life(
    folder: Path, refusals: Refusals, at: int, *, always: bool = False, background: bool = False, width: int = 8
) -> int:
    """Train three steps with call number ``at`` refused. Return how many calls there were. What was saved last is restored exactly."""
    model = nn.Linear(width, width)
    refusals.calls, refusals.at, refusals.always, refusals.on = 0, at, always, True
    try:
        ckpt = relight.Checkpointer(
            folder / "store" / "run",
            model=model,
            save=relight.every(steps=1),
            background=background,
            signals=False,
            limits=relight.Limits(deadline_s=20),
        )
        ckpt.restore()
        for step in range(3):
            save = ckpt.step(step)
            if background and save is not None:
                save.wait(20)
        ckpt.close()
    finally:
        refusals.on = False
    fresh = nn.Linear(width, width)
    with relight.Checkpointer(
        folder / "store" / "run", model=fresh, background=False, signals=False, save=None
    ) as again:
        assert again.restore() == 3, at
    assert torch.equal(fresh.weight, model.weight)
    return refusals.calls


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Refusals:
    refusals, start = Refusals(lambda: RuntimeError("can't start new thread")), threading.Thread.start

    def counted(self: threading.Thread) -> None:
        refusals.count()
        start(self)

    monkeypatch.setattr(threading.Thread, "start", counted)
    return refusals


def test_no_thread_ends_training(
    tmp_path: Path, threads: Refusals, seen: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread of a save, refused alone and with all after it: three steps are saved, and the refusal is reported once."""
    monkeypatch.setenv("RELIGHT_EVENTS", str(tmp_path / "events"))
    calls = life(tmp_path / "none", threads, 0, background=True)
    assert calls >= 3
    for call in range(1, calls + 1):
        life(tmp_path / f"{call}", threads, call, background=True)
    life(tmp_path / "all", threads, 1, always=True, background=True)
    assert len([event for event in seen if event.name == "threads.refused"]) == 1


def test_a_large_save_needs_no_thread(tmp_path: Path, threads: Refusals) -> None:
    """Pools of hashers, writers and readers do their work in the caller."""
    assert life(tmp_path, threads, 1, always=True, width=2200) > 1


DESCRIPTORS = ("open", "os.scandir", "os.listdir", "socket.__new__")
_hooked: list[Refusals] = []


def _audit(name: str, words: object) -> None:
    if _hooked and name in DESCRIPTORS:
        _hooked[-1].count()


@pytest.fixture
def descriptors() -> Iterator[Refusals]:
    if not hasattr(_audit, "installed"):
        sys.addaudithook(_audit)  # stays for the process's lifetime, and does nothing if the list is empty
        _audit.installed = True  # type: ignore[attr-defined]
    _hooked.append(Refusals(lambda: OSError(errno.EMFILE, "Too many open files")))
    yield _hooked[-1]
    _hooked.clear()


def test_no_descriptor_ends_training(tmp_path: Path, descriptors: Refusals, monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor refused at one call, from the restore on: the first contact is tried again, a save is made again by the next one."""
    monkeypatch.setattr("relight.store.retry.FirstContact.__new__.__defaults__", (3.0, 0.001, 0.01))
    calls = life(tmp_path / "none", descriptors, 0)
    for call in range(1, calls + 1, 23):
        life(tmp_path / f"{call}", descriptors, call)


def test_no_process_ends_training(tmp_path: Path, seen: list[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a process for the agent the trainer writes its saves, and the reason is reported once."""

    def refuse(*words: object, **named: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    life(tmp_path, Refusals(MemoryError), 0, background=True)
    assert len([event for event in seen if event.name == "agent.lost"]) == 1


@pytest.mark.parametrize("name", ["memfd_create", "posix_fallocate"])
def test_no_shared_memory_ends_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Without shared memory the trainer writes its saves."""

    def refuse(*words: object, **named: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(os, name, refuse)
    life(tmp_path, Refusals(MemoryError), 0, background=True)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        OSError(errno.EMFILE, "files"),
    ],
)
def test_no_memory_for_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Memory refused while the state is captured fails that save alone."""
    model = nn.Linear(4, 4)
    ckpt = relight.Checkpointer(tmp_path / "store" / "run", model=model, save=relight.every(steps=1), signals=False)
    ckpt.restore()
    ckpt.step(0)
    capture = ckpt._capture.part

    def refuse(micro_step: int | None = None, failed: Exception | None = None) -> None:
        raise error

    monkeypatch.setattr(ckpt._capture, "part", refuse)
    save = ckpt.step(1)
    assert save is not None and save.error is not None
    monkeypatch.setattr(ckpt._capture, "part", capture)
    save = ckpt.step(2)
    assert save is not None and save.done
    ckpt.close()


def test_an_error_of_the_callers_own_is_raised() -> None:
    """A component that fails for another reason is not taken for a refusal."""
    assert not ends_a_save(RuntimeError("my state_dict is broken")) and not ends_a_save(OSError(errno.EIO, "disk"))


def test_a_pool_without_threads(threads: Refusals) -> None:
    """Run a pool's calls in its caller if there is no thread. Results, errors and order are equal, and each call is
    made once."""
    threads.on = True
    for refused_call, always in ((1, True), (1, False), (2, True)):
        threads.calls, threads.at, threads.always = 0, refused_call, always
        made: list[int] = []
        with ThreadPool(3, "relight-try") as pool:
            # the pool's own module counts as ours
            assert list(pool.map(lambda value: made.append(value) or value * value, range(20))) == [
                n * n for n in range(20)
            ]
            failed = pool.submit(lambda: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                failed.result(5)
        assert sorted(made) == list(range(20))


def test_the_first_contact_has_a_bound() -> None:
    """Raise a store's own error after the time limit. Raise an error that is not retryable at once."""
    tries: list[int] = []

    def broken(retryable: bool) -> None:
        tries.append(1)
        raise StoreUnavailable("no", retryable=retryable)

    with pytest.raises(StoreUnavailable):
        first_contact(lambda: broken(True), FirstContact(0.1, 0.01, 0.01))
    assert 2 < len(tries) < 30
    tries.clear()
    with pytest.raises(StoreUnavailable):
        first_contact(lambda: broken(False))
    assert len(tries) == 1


@pytest.mark.parametrize("name", ["fsync", "link", "mkdir", "pwrite"])
def test_one_failing_write_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A single write that fails with EIO, at any position, costs at most one save."""
    monkeypatch.setattr("relight.store.retry.FirstContact.__new__.__defaults__", (3.0, 0.001, 0.01))
    refusals, real = Refusals(lambda: OSError(errno.EIO, "Input/output error")), getattr(os, name)

    def counted(*words: Any, **named: Any) -> Any:
        refusals.count()
        return real(*words, **named)

    monkeypatch.setattr(os, name, counted)
    calls = life(tmp_path / "none", refusals, 0)
    assert calls
    for call in [*range(1, min(calls, 6) + 1), *range(7, calls + 1, 11)]:
        life(tmp_path / f"{call}", refusals, call)


@pytest.mark.parametrize(
    ("turn", "final", "outcome"),
    [
        (0, False, "it is tried again now"),
        (1, False, "training continues, "),
        (1, True, "the process ends without this checkpoint"),
    ],
)
def test_a_failed_save_states_cause_then_outcome_then_hint(
    seen: list[Event], turn: int, final: bool, outcome: str
) -> None:
    """The hint ran into "training continues", and a run that ended was reported to continue."""
    error = StoreUnavailable("creating a file failed: EIO", where="pack", hint="check the disk")
    FailurePolicy(retries=1).report(error, 8, turn, final=final)
    (event,) = [event for event in seen if event.name == "save.failed"]
    first, hint = str(event.fields["message"]).splitlines()
    assert first.startswith(f"the save at step 8 failed: creating a file failed: EIO [pack]; {outcome}")
    assert hint == "  → check the disk"
