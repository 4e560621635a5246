"""A thread that dies at its start, or stops reading, blocks no call. Each wait for it ends, and close() returns the
true result."""

from __future__ import annotations

import ctypes
import gc
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import relight
from relight.agent import Agent
from relight.agent.client import SaveOutcome
from relight.agent.messages import SaveResult
from relight.agent.wire import AgentConnection
from relight.capture import math_init
from relight.checkpointer.inflight import InflightSave, InflightSaves
from relight.checkpointer.save_handle import Save
from relight.comm import new_threads
from relight.comm.new_threads import ThreadPool, ThreadTasks
from relight.errors import NoMemory, StoreUnavailable
from relight.observe import Event, thread_start
from relight.save_reason import ASKED
from relight.snapshot import copier
from relight.snapshot.copier import Copier, Snapshot
from relight.snapshot.touch_detection import SLICE_BYTES, GuardedTensors


@pytest.fixture
def dead_at_start(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Threads of Relight that the system starts, and that die before their first line, as for lack of memory."""
    monkeypatch.setattr(thread_start, "START_S", 0.3)
    monkeypatch.setattr(thread_start, "_given_up", threading.Event())
    monkeypatch.setattr(new_threads, "_reported", threading.Event())
    names: list[str] = []
    bootstrap = threading.Thread._bootstrap  # type: ignore[attr-defined]

    def dies(self: threading.Thread) -> None:
        if self.name.startswith("relight-"):
            names.append(self.name)
            return
        bootstrap(self)

    monkeypatch.setattr(threading.Thread, "_bootstrap", dies)
    return names


def within(seconds: float, work: Callable[[], object]) -> None:
    """Run ``work`` in its own thread. Fail if it does not end in time."""
    done = threading.Thread(target=work, daemon=True)
    done.start()
    done.join(seconds)
    assert not done.is_alive(), f"still waiting after {seconds:.0f} s"


def test_a_thread_that_dies_before_its_first_line_holds_no_start(dead_at_start: list[str]) -> None:
    """Count a thread that dies at its start as refused. Thread.start would wait for an event that this thread never
    sets."""
    started: list[bool] = []
    within(
        20,
        lambda: started.append(
            new_threads.start(threading.Thread(target=lambda: None, name="relight-test", daemon=True))
        ),
    )
    assert started == [False] and dead_at_start == ["relight-test"]


def test_a_late_thread_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do no work in a thread after its caller aborted the start and does the work itself."""
    monkeypatch.setattr(thread_start, "START_S", 0.1)
    monkeypatch.setattr(thread_start, "_given_up", threading.Event())
    may, worked, bootstrap = threading.Event(), [], threading.Thread._bootstrap  # type: ignore[attr-defined]

    def late(self: threading.Thread) -> None:
        may.wait(20)
        bootstrap(self)

    thread = threading.Thread(target=lambda: worked.append(1), daemon=True)
    monkeypatch.setattr(thread, "_bootstrap", lambda: late(thread))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        thread_start.start_thread(thread)
    may.set()
    ends = time.monotonic() + 20
    while thread.ident is None and time.monotonic() < ends:
        time.sleep(0.01)
    thread.join(20)
    assert not worked


def test_the_pool_works_without_threads(dead_at_start: list[str]) -> None:
    """Run a pool's tasks in the caller if its threads die at their start."""
    results: list[int] = []

    def work() -> None:
        with ThreadPool(2, "relight-pool") as pool:
            results.extend(pool.map(lambda value: 2 * value, range(3)))

    within(30, work)
    assert results == [0, 2, 4]


def test_a_dropped_pool_lets_its_threads_end() -> None:
    """Threads of a pool that was not shut down end with it."""
    pool = ThreadPool(2, "relight-dropped")
    assert pool.submit(lambda: 1).result(10) == 1
    thread = pool._threads[0]
    del pool
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_pool_starts_no_more_threads_than_tasks() -> None:
    """Reuse an idle thread, queue calls if the pool is full, and cancel calls that have not started."""
    with ThreadPool(4, "relight-few") as pool:
        for value in range(10):
            assert pool.submit(lambda argument: argument, value).result(10) == value
            time.sleep(0.01)
        assert len(pool._threads) < 4
    hold, begun = threading.Event(), threading.Event()
    pool = ThreadPool(1, "relight-one")
    first, second = pool.submit(lambda: begun.set() or hold.wait(10)), pool.submit(lambda: 2)
    assert begun.wait(10)
    pool.shutdown(wait=False, cancel_futures=True)
    hold.set()
    assert first.result(10) is True and second.cancelled()
    with pytest.raises(RuntimeError, match="shut down"):
        pool.submit(lambda: 3)


def test_steps_and_close_do_not_wait_for_dead_threads(
    tmp_path: Path, dead_at_start: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Save three steps and return from close() although every Relight thread dies at its start. The deadline is ten
    minutes."""
    monkeypatch.setenv("RELIGHT_EVENTS", str(tmp_path / "events"))
    ended: list[object] = []

    def life() -> None:
        ckpt = relight.Checkpointer(
            tmp_path / "s" / "run", model=nn.Linear(8, 8), save=relight.every(steps=1), background=True, signals=False
        )
        ckpt.restore()
        for step in range(3):
            ckpt.step(step)
        ended.append(ckpt.close())

    within(120, life)
    assert dead_at_start and ended == [(2, {}, False)]


def test_no_memory_for_an_answer_ends_the_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that reads the agent's messages runs out of memory: a call that waits for an answer ends at once."""
    here, remote = socket.socketpair()

    def none(self: AgentConnection[object]) -> tuple[object, list[int]]:
        remote.recv(1)  # the request
        raise MemoryError

    monkeypatch.setattr(AgentConnection, "receive", none)
    agent = Agent(here)
    before = time.monotonic()
    with pytest.raises(StoreUnavailable, match="agent is gone: there was no memory"):
        agent.slots(1 << 20, 2, None, 60.0)
    assert time.monotonic() - before < 30
    assert not agent.alive
    remote.close()


@pytest.mark.parametrize("who", ["thread", "trainer"])
def test_no_memory_while_copying_holds_no_step(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer copies a slice that a thread could not copy. If the trainer fails, too, the snapshot counts as
    changed, and no wait is endless."""
    tensor = torch.arange((3 * SLICE_BYTES) // 4, dtype=torch.float32)
    watched, target = GuardedTensors([("t", tensor, 0)]), ctypes.create_string_buffer(3 * SLICE_BYTES)
    completions: list[list[str]] = []
    snapshot = Snapshot(watched.begin(), ctypes.addressof(target), completions.append)
    trainer, copy, tried = threading.current_thread(), Snapshot._copy, threading.Event()

    def refused(self: Snapshot, index: int) -> None:
        if who == "trainer" or threading.current_thread() is not trainer:
            tried.set()
            raise MemoryError
        copy(self, index)

    monkeypatch.setattr(Snapshot, "_copy", refused)
    monkeypatch.setattr(copier, "RETURNED_S", 0.01)
    threads = Copier(1)
    threads.start(snapshot)
    assert tried.wait(20)
    snapshot.wait()
    threads.close()
    assert completions == [[] if who == "thread" else ["t"]]
    if who == "thread":
        assert bytes(memoryview(target)) == tensor.numpy().tobytes()


def test_first_calls_that_fail_end_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory for torch's first calls: building a Checkpointer does not end the job."""

    def none(*words: object, **named: object) -> None:
        raise RuntimeError("could not create a primitive")

    monkeypatch.setattr(math_init, "_done", False)
    monkeypatch.setattr(torch.nn.functional, "gelu", none)
    math_init.warm_up_vector_math()


def test_the_end_of_a_run_that_saved_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[Event]
) -> None:
    """Do not end a run with only failed saves as if the last step were stored."""
    ckpt = relight.Checkpointer(
        tmp_path / "s" / "run", model=nn.Linear(8, 8), save=relight.every(steps=1), background=False, signals=False
    )
    ckpt.restore()

    def full(*words: object, **named: object) -> object:
        raise StoreUnavailable("no space is left")

    monkeypatch.setattr(ckpt._saves, "_commit", full)
    for step in range(3):
        ckpt.step(step)
    ended = ckpt.close()
    assert ended.unsaved and ended.exit_code == 1
    assert [event for event in events if event.name == "save.failed"]


@pytest.mark.parametrize("asked", [True, False])
def test_the_end_of_a_run_that_is_stored(tmp_path: Path, asked: bool) -> None:
    """No step is unsaved if the last one is stored, or if no save was wanted."""
    ckpt = relight.Checkpointer(
        tmp_path / "s" / "run", model=nn.Linear(8, 8), save=None, background=False, signals=False
    )
    ckpt.restore()
    ckpt.step(0)
    assert not ckpt.ended.unsaved, "it is not over"
    assert ckpt.close(save=asked).exit_code == 0 and not ckpt.ended.unsaved


def test_two_outcomes_of_one_save_end_no_training() -> None:
    """The agent's answer and the end of its connection may both bring a save's outcome: the first counts, and training continues."""
    under_way = InflightSaves()
    for number in (1, 2):
        under_way.add(number, InflightSave(Save(number, ASKED), {}, (number, None), None))
    for number in (1, 1, 2):
        under_way.on_done(SaveOutcome(SaveResult(number, f"id{number}"), StoreUnavailable("gone")))
    collected = []
    for begun, _ in under_way.over():
        collected.append(begun.save.step)
        # while the first one is handled
        under_way.on_done(SaveOutcome(SaveResult(2, "id2"), StoreUnavailable("again")))
    assert collected == [1, 2] and not under_way


def test_a_thread_that_ends_without_a_result_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread may have no memory even for its error. ``results`` does not wait for a result that never comes."""
    monkeypatch.setattr(new_threads._Task, "run", lambda task: None)
    tasks, errors = ThreadTasks("lost"), list[BaseException]()
    assert tasks.start(lambda: 1)

    def results() -> None:
        try:
            tasks.results()
        except BaseException as error:  # noqa: BLE001 (compared below)
            errors.append(error)

    caller = threading.Thread(target=results, daemon=True)
    caller.start()
    caller.join(10)
    assert [type(error) for error in errors] == [NoMemory]
