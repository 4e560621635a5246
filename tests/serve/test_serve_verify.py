"""The dashboard's verification: a child process of low priority reads; the server records the result in the run's log."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cli.at_hand import fill, request

from relight.catalog.run import Run
from relight.comm.children import child_environment
from relight.commit import Attempt
from relight.errors import CheckpointNotFound, StoreUnavailable, WrongKey
from relight.keys import Keychain, StoreSecurity, write_key_file
from relight.keys.chain import SETTING
from relight.log import Checkpoint
from relight.reader import VerifyFinding
from relight.run_records.verification import checked
from relight.serve import tasks_work, verify_process
from relight.serve.pages_actions import ActionOutcome
from relight.serve.tasks import ServerTask, Tasks
from relight.store import open_bytes


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a run with four checkpoints."""
    fill(tmp_path / "runs")
    return Run(open_bytes(tmp_path / "runs"), "demo")


def made_task() -> ServerTask:
    """Return a task that no pool runs."""
    return ServerTask("0123456789abcdef", "verify", "runs", "demo", "anna", time.time())


def verified(run: Run, checkpoint: Checkpoint | None = None) -> tuple[ActionOutcome, ServerTask, list[bool]]:
    """Verify a checkpoint, by default the latest. Return the outcome, the task, and what was reported to the index."""
    task, reported = made_task(), list[bool]()
    return tasks_work.verify(task, run, checkpoint or run.history().live[-1], reported.append), task, reported


def pack_of(root: Path, checkpoint: Checkpoint) -> Path:
    """Return the checkpoint's first pack file."""
    return next(path for path in root.rglob("pack-*.safetensors") if checkpoint.id in str(path))


def test_a_whole_checkpoint_is_reported_and_recorded(run: Run) -> None:
    """The progress has a line, and the run's log has the result, by ``relight serve``."""
    outcome, task, reported = verified(run)
    assert (outcome, reported) == (ActionOutcome(True, "every byte is as committed"), [True])
    assert task.lines and re.fullmatch(r"[1-9]0 % of its bytes are verified", task.lines[-1])
    history = run.history()
    result = checked(history)[history.live[-1].id]
    assert result.damage == "" and result.by.startswith("relight serve on ")


def test_damage_is_reported_and_recorded(run: Run, tmp_path: Path) -> None:
    """The details name the file and the chunk; the first finding is in the log."""
    latest = run.history().live[-1]
    pack = pack_of(tmp_path / "runs", latest)
    data = bytearray(pack.read_bytes())
    data[-1] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(data)
    outcome, _, reported = verified(run)
    assert not outcome.ok and outcome.says == "damaged: 1 findings" and reported == [False]
    assert pack.name in outcome.details and ": chunk " in outcome.details
    assert checked(run.history())[latest.id].damage == outcome.details


def test_errors_of_the_process_are_the_outcome(run: Run) -> None:
    """If the checkpoint was pruned meanwhile, or its run is gone, nothing is recorded."""
    latest = run.history().live[-1]
    fields = {name: getattr(latest.body, name) for name in latest.body.__struct_fields__} | {"id": "0123456789"}
    pruned = Checkpoint(latest.seq, latest.time, latest.epoch, type(latest.body)(**fields))
    with pytest.raises(CheckpointNotFound, match="0123456789 is no longer in the run"):
        verified(run, pruned)
    with pytest.raises(CheckpointNotFound):
        verified(Run(run.store, "no-such-run"), latest)
    assert not checked(run.history())


@pytest.mark.parametrize("where", ["the environment", "the process"])
def test_an_encrypted_run_is_verified_with_the_keys_of_the_server(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's keys reach the child by its standard input. With another key nothing is recorded."""
    keys = [str(tmp_path / name) for name in ("key", "other")]
    for key in keys:
        write_key_file(key)
    guards = [StoreSecurity(Keychain.from_specs(f"file:{key}")) for key in keys]
    if where == "the environment":
        monkeypatch.setenv(SETTING, f"file:{keys[0]}")
    store = open_bytes(tmp_path / "runs", guard=None if where == "the environment" else guards[0])
    Attempt.begin(store, "demo").save(request(1))
    for key in keys:
        Path(key).unlink()
    run = Run(store, "demo")
    latest = run.history().live[-1]
    monkeypatch.setattr(tasks_work, "guard_of", lambda _: guards[1])
    with pytest.raises(WrongKey):
        verified(run)
    assert not checked(run.history())
    monkeypatch.undo()
    assert verified(run)[0].ok
    assert checked(run.history())[latest.id].damage == ""


def python(code: str) -> Callable[..., list[str]]:
    """Return a replacement of ``child_command`` that runs ``code``."""
    return lambda *arguments: [sys.executable, "-P", "-c", code, *arguments[1:]]


def test_a_process_that_ends_without_a_result_records_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output that is not a message is ignored, and the process' status is reported."""
    monkeypatch.setattr(
        tasks_work, "child_command", python("print('hello'); print('{\"tenths\": 3}'); raise SystemExit(7)")
    )
    task = made_task()
    with pytest.raises(StoreUnavailable, match="ended with 7 and no result"):
        tasks_work.verify(task, run, run.history().live[-1], lambda _: None)
    assert task.lines == ["30 % of its bytes are verified"] and not checked(run.history())

    def no_process(*arguments: object, **more: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(subprocess, "Popen", no_process)
    with pytest.raises(StoreUnavailable, match="starting the verification failed: Too many open files"):
        verified(run)
    assert all(tasks_work._verifying.acquire(blocking=False) for _ in range(tasks_work.VERIFYING_MAX))  # noqa: SLF001
    for _ in range(tasks_work.VERIFYING_MAX):
        tasks_work._verifying.release()  # noqa: SLF001


SLEEPS = "import os, time; print('{\"tenths\": 1}', flush=True); time.sleep(100)"


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Collect the started processes; end those that are left."""
    started = list[subprocess.Popen[bytes]]()
    real = subprocess.Popen

    def popen(*arguments: object, **more: object) -> subprocess.Popen[bytes]:
        started.append(real(*arguments, **more))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    yield started
    for process in started:
        process.kill()


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until ``condition``, at most 30 s."""
    ends = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_processes_are_bounded_and_end_with_the_server(
    run: Run, monkeypatch: pytest.MonkeyPatch, processes: list[subprocess.Popen[bytes]]
) -> None:
    """No more than ``VERIFYING_MAX`` run; a further task waits; none of the processes is left when the server has ended."""
    monkeypatch.setattr(tasks_work, "child_command", python(SLEEPS))
    tasks, live = Tasks(), run.history().live

    def begin(checkpoint: Checkpoint) -> ServerTask:
        def work(task: ServerTask) -> ActionOutcome:
            return tasks_work.verify(task, run, checkpoint, lambda _: None)

        return tasks.begin("verify", "runs", "demo", "anna", work, checkpoint.id)

    begun = [begin(checkpoint) for checkpoint in live[: tasks_work.VERIFYING_MAX + 1]]
    waits = f"waiting: {tasks_work.VERIFYING_MAX} other verifications are running"
    wait_for(lambda: sorted(task.lines[:1] for task in begun) == [["10 % of its bytes are verified"]] * 2 + [[waits]])
    assert len(processes) == tasks_work.VERIFYING_MAX and all(process.poll() is None for process in processes)
    tasks.close()
    wait_for(lambda: all(task.done is not None for task in begun))
    assert all(task.done is not None and "the server ended before" in task.done.says for task in begun)
    assert all(process.poll() is not None for process in processes)
    assert not checked(run.history())


def test_the_process_has_a_low_priority_and_ends_with_its_input() -> None:
    """The end of its standard input ends the process, because a killed server cannot end it."""
    code = (
        "import os, sys, time; from relight.serve import verify_process as v;"
        "v.verify = lambda *_: (print(os.nice(0), flush=True), time.sleep(100)); sys.exit(v.main())"
    )
    command = [sys.executable, "-P", "-c", code, "/nowhere", "demo", "0123456789"]
    with subprocess.Popen(command, env=child_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert int(process.stdout.readline()) >= verify_process.NICE
        threading.Timer(0.2, process.stdin.close).start()
        assert process.wait(30) == 1


def test_progress_is_reported_by_tenths(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tenth is reported once, without the tenth one. Of many findings the first are sent, with their number."""
    latest = run.history().live[-1]
    finding = VerifyFinding("corrupt", "pack", "", "chunk")

    def read(*arguments: object, progress: Callable[[int], None]) -> list[VerifyFinding]:
        for _ in range(40):
            progress(latest.body.stored_bytes // 40)
        progress(latest.body.stored_bytes)
        return [finding] * 70

    monkeypatch.setattr(verify_process, "verify_checkpoint", read)
    tenths = list[int]()
    result = verify_process.verify(run, latest.id, tenths.append)
    assert tenths == sorted(set(tenths)) and set(tenths) <= set(range(1, 10)) and tenths[-1] == 9
    assert (result.count, len(result.findings), result.is_unknown) == (70, verify_process.FINDINGS_MAX, False)
