"""A log that was lost: no attempt begins, nothing is deleted, and the log is rebuilt from the checkpoint directories."""

from __future__ import annotations

import itertools
import random
import shlex
import shutil
from pathlib import Path

import pytest
import torch

import relight
from relight.catalog import list_runs
from relight.catalog.run import Run
from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.doctor.facts_run import collect_run
from relight.errors import CheckpointNotFound, CorruptCheckpoint, RelightError, StoreUnavailable
from relight.format.records import CommitBody, FenceBody, NoteBody
from relight.log import Log, fold
from relight.policy import keep
from relight.reader.verify import verify_checkpoint, verify_log
from relight.reclaim import (
    execute,
    execute_rebuild,
    execute_sweep,
    plan_prune,
    plan_rebuild,
    plan_sweep,
    recall,
    sweep_recallable,
)
from relight.restore.result import begun_history
from relight.store import ByteStore, open_bytes
from relight.testing.scenario import state_of
from relight.transfer.copying import plan_copy


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relight.log.log.MISSING_PAUSES_S", (0.0,))
    monkeypatch.setattr("relight.log.truncated.PAUSES_S", (0.0, 0.0))


def save(attempt: Attempt, step: int, parent: str | None, **more: object) -> str:
    state = state_of(f"life/{step}")
    request = SaveRequest(
        SaveInfo(step=step, parents=[parent] if parent else [], metrics={"loss": 1.0 / (step + 1)}),
        tree=state.tree,
        items=state.items,
    )
    return attempt.save(request).id


def run_of(top: Path, attempts: int = 2, saves: int = 4) -> tuple[ByteStore, list[str]]:
    """Make a run with ``saves`` checkpoints by each of ``attempts`` attempts. Return the ids, oldest first."""
    store = open_bytes(top)
    ids: list[str] = []
    for number in range(attempts):
        attempt = Attempt.begin(store, "run", reason="restored" if number else "fresh")
        for step in range(number * saves, (number + 1) * saves):
            ids.append(save(attempt, step, ids[-1] if ids else None))
    return store, ids


def live(store: ByteStore) -> list[str]:
    return [checkpoint.id for checkpoint in fold(Log(store, "run").read()).live]


def test_a_missing_log_stops_a_start_and_nothing_is_swept(tmp_path: Path) -> None:
    """Checkpoint directories next to an empty log mean a lost log: no attempt begins, and no reader reports that there is no run."""
    store, _ = run_of(tmp_path)
    before = sorted(str(path) for path in tmp_path.glob("run/0*/*"))
    shutil.rmtree(tmp_path / "run" / "log")
    for act in (
        lambda: Attempt.begin(store, "run"),
        lambda: Log(store, "run").read(),
        lambda: plan_sweep(store, "run"),
        lambda: Log(store, "run").start(),
    ):
        with pytest.raises(CorruptCheckpoint, match="log is missing, and 8 checkpoint directories are there") as caught:
            act()
        assert "--rebuild" in caught.value.hint
    assert list_runs(store) == ["run"]
    assert sorted(str(path) for path in tmp_path.glob("run/0*/*")) == before


def test_the_command_of_the_hint_is_quoted(tmp_path: Path) -> None:
    """A shell takes the run of a store with a space in its path as one argument."""
    store, _ = run_of(tmp_path / "my runs")
    shutil.rmtree(tmp_path / "my runs" / "run" / "log")
    with pytest.raises(CorruptCheckpoint) as caught:
        Log(store, "run").read()
    assert shlex.split(caught.value.hint)[-2:] == [f"{tmp_path}/my runs/run", "--rebuild"]


def test_a_new_run_that_another_process_makes_at_this_moment_is_no_lost_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that saw an empty log, and then the first checkpoint directory of another process, reads the log again."""
    store = open_bytes(tmp_path)
    late, calls = Log(store, "run"), itertools.count()
    view = Log._view

    def seen(log: Log) -> object:
        result = view(log)
        if log is late and next(calls) == 0:
            save(Attempt.begin(open_bytes(tmp_path), "run"), 0, None)
        return result

    monkeypatch.setattr(Log, "_view", seen)
    assert late.start().head >= 2


@pytest.mark.parametrize("store_too", [False, True])
def test_a_rebuilt_log_lists_every_whole_checkpoint_again(tmp_path: Path, store_too: bool) -> None:
    """All checkpoints are back in their order, with parents, metrics and epochs, and verify; the log shows that it was rebuilt."""
    store, ids = run_of(tmp_path)
    before = fold(Log(store, "run").read()).live
    shutil.rmtree(tmp_path / "run" / "log")
    if store_too:
        (tmp_path / "relight.json").unlink()
    report = execute_rebuild(plan_rebuild(store, "run", verify=True), store)
    assert report.committed == ids
    view = Log(store, "run").read()
    history = fold(view)
    assert [checkpoint.body for checkpoint in history.live] == [checkpoint.body for checkpoint in before]
    assert [checkpoint.epoch for checkpoint in history.live] == [checkpoint.epoch for checkpoint in before]
    assert not view.faults
    assert {record.body.topic for record in view.records if isinstance(record.body, NoteBody)} == {
        "rebuilding",
        "rebuilt",
    }
    assert all(record.body.reason == "rebuilt" for record in view.records if isinstance(record.body, FenceBody))
    assert not [finding for checkpoint in history.live for finding in verify_checkpoint(store, view, checkpoint)]
    save(Attempt.begin(store, "run"), 8, ids[-1])
    assert len(live(store)) == 9
    assert not plan_rebuild(store, "run").is_needed


def test_what_is_not_whole_is_left_alone_with_the_reason(tmp_path: Path) -> None:
    """Directories without a root, with damage, or of another run are neither listed nor deleted."""
    store, ids = run_of(tmp_path, attempts=1, saves=4)
    run_of(tmp_path / "other", attempts=1, saves=1)
    directories = sorted(tmp_path.glob("run/0*"))
    (directories[0] / "root.json").unlink()
    next(directories[1].glob("pack*")).write_bytes(b"short")
    foreign = next((tmp_path / "other").glob("run/0*"))
    shutil.copytree(foreign, tmp_path / "run" / foreign.name)
    shutil.rmtree(tmp_path / "run" / "log")
    plan = plan_rebuild(store, "run")
    assert [rebuilt.commit.id for rebuilt in plan.commits if rebuilt.commit] == ids[2:]
    why = {directory.name: directory.why for directory in plan.left}
    assert "not finished" in why[directories[0].name]
    assert "bytes" in why[directories[1].name]
    assert "another" in why[foreign.name]
    execute_rebuild(plan, store)
    assert live(store) == ids[2:]
    assert all(path.exists() for path in [*directories, tmp_path / "run" / foreign.name])


def test_a_log_that_lost_its_newest_records_is_refused_and_completed(tmp_path: Path) -> None:
    """A copy of the log that is older than the checkpoint directories hides the newest ones: no attempt begins until they are listed."""
    store, ids = run_of(tmp_path)
    records = sorted((tmp_path / "run" / "log").iterdir())
    for cut in range(1, len(records)):
        shutil.rmtree(tmp_path / "cut", ignore_errors=True)
        shutil.copytree(tmp_path / "run", tmp_path / "cut" / "run")
        shutil.copy(tmp_path / "relight.json", tmp_path / "cut" / "relight.json")
        for path in records[-cut:]:
            (tmp_path / "cut" / "run" / "log" / path.name).unlink()
        copy = open_bytes(tmp_path / "cut")
        lost = [checkpoint_id for checkpoint_id in ids if checkpoint_id not in live(copy)]
        plan = plan_rebuild(copy, "run")
        if cut > 1:  # one COMMIT alone looks like a save that was killed right before it
            with pytest.raises(CorruptCheckpoint, match="newest records of this run's log are missing"):
                Attempt.begin(copy, "run")
        assert execute_rebuild(plan, copy).committed == lost
        assert live(copy) == ids


def test_a_record_that_cannot_be_read_for_a_moment_hides_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is read again before it counts as incomplete: one failed read would hide a loss."""
    store, _ = run_of(tmp_path, saves=2)
    for seq in range(4, 7):  # the second attempt's
        (tmp_path / "run" / "log" / f"{seq:012d}.json").unlink()
    get, refused = type(store).get, itertools.count()

    def refuse_once(self: ByteStore, key: str, at_most: int | None = None) -> bytes:
        if key.endswith("/log/000000000001.json") and next(refused) == 0:
            raise StoreUnavailable("no answer", where=key)
        return get(self, key, at_most)  # type: ignore[arg-type]

    monkeypatch.setattr(type(store), "get", refuse_once)
    with pytest.raises(CorruptCheckpoint, match="newest records of this run's log are missing"):
        Attempt.begin(store, "run")
    assert next(refused) >= 1


def test_a_damaged_record_stands_for_one_that_is_missing_not_for_more(tmp_path: Path) -> None:
    """A start succeeds if the newest FENCE is damaged.

    It is refused if two attempts are unknown to a log with one damaged record.
    """
    store, _ = run_of(tmp_path / "one", saves=2)
    (tmp_path / "one" / "run" / "log" / "000000000004.json").write_bytes(b"no record")
    Attempt.begin(store, "run")
    store, _ = run_of(tmp_path / "two", attempts=4, saves=1)
    for record in sorted((tmp_path / "two" / "run" / "log").iterdir())[5:]:
        record.unlink()
    (tmp_path / "two" / "run" / "log" / "000000000002.json").write_bytes(b"no record")
    with pytest.raises(CorruptCheckpoint, match="newest records of this run's log are missing"):
        Attempt.begin(store, "run")


def test_a_tool_appends_nothing_to_a_log_that_lost_its_newest_records(tmp_path: Path) -> None:
    """Retention by hand, giving up and bringing back are refused with the way out, and no record and no file is added or gone."""
    store, ids = run_of(tmp_path)
    execute(plan_prune(store, "run", keep(last=5, undo_window="1h")), store)
    attempt = Attempt.begin(store, "run")
    save(attempt, 9, ids[-1])
    for record in sorted((tmp_path / "run" / "log").iterdir())[-2:]:
        record.unlink()
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    for act in (
        lambda: execute(plan_prune(store, "run", keep(last=1)), store),
        lambda: sweep_recallable(store, "run", ids[:2]),
        lambda: recall(store, "run", ids[:1]),
    ):
        with pytest.raises(CorruptCheckpoint, match="newest records of this run's log are missing") as caught:
            act()
        assert "--rebuild" in caught.value.hint
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_readers_and_copies_refuse_a_log_that_lost_its_newest_records(tmp_path: Path) -> None:
    """The latest checkpoint is unknown then: ``load``, restore and ``plan_copy`` refuse, ``verify`` and ``doctor``
    report it."""
    store, ids = run_of(tmp_path / "a")
    for record in sorted((tmp_path / "a" / "run" / "log").iterdir())[-3:]:
        record.unlink()
    copy = open_bytes(tmp_path / "b")
    model = torch.nn.Linear(1, 1)
    for act in (
        lambda: relight.load(tmp_path / "a" / "run"),
        lambda: relight.load(tmp_path / "a" / "run", "best:loss"),
        lambda: plan_copy(Run(store, "run"), Run(store, "run").history().live, copy, "run"),
        lambda: relight.Checkpointer(tmp_path / "a" / "run", model=model, background=False).restore(),
    ):
        with pytest.raises(CorruptCheckpoint, match="newest records of this run's log are missing"):
            act()
    findings = verify_log(store, Log(store, "run").read())
    assert [finding.file for finding in findings] == ["run/log"] and "--rebuild" in findings[0].detail
    facts = collect_run(store, "run", str(tmp_path / "a" / "run"))
    assert facts.error is not None and "newest records" in facts.error.what


def test_a_parent_from_elsewhere_is_no_lost_record(tmp_path: Path) -> None:
    """An attempt that restored from a further tier notes the parent, so a kill before its first COMMIT does not stop the next start."""
    store = open_bytes(tmp_path)
    attempt = Attempt.begin(store, "run", reason="restored")
    begun_history(attempt, "abcdefghij", 0)
    for seq in range(2):
        save(attempt, seq, "abcdefghij")
    for record in sorted((tmp_path / "run" / "log").iterdir())[-2:]:
        record.unlink()  # two saves that were killed before their COMMITs
    Attempt.begin(store, "run")


def test_retention_deletes_no_other_line_after_a_rebuild(tmp_path: Path) -> None:
    """A rebuilt log does not know which attempt began from scratch: only parents that it has are ancestors."""
    store = open_bytes(tmp_path)
    first = Attempt.begin(store, "run", reason="fresh")
    old: list[str] = []
    for step in range(4):
        old.append(save(first, step, old[-1] if old else None))
    second = Attempt.begin(store, "run", reason="fresh")
    new: list[str] = []
    for step in range(10, 14):
        new.append(save(second, step, new[-1] if new else None))
    shutil.rmtree(tmp_path / "run" / "log")
    execute_rebuild(plan_rebuild(store, "run"), store)
    execute(plan_prune(store, "run", keep(last=1)), store)
    assert live(store) == [*old, new[-1]]


def test_an_interrupted_rebuild_starts_no_attempt_and_is_continued(tmp_path: Path) -> None:
    """Whichever record is the last that was appended: no attempt begins before the log is whole, and recover completes it."""
    store, ids = run_of(tmp_path)
    shutil.rmtree(tmp_path / "run" / "log")
    execute_rebuild(plan_rebuild(store, "run"), store)
    records = sorted((tmp_path / "run" / "log").iterdir())
    for kept in range(1, len(records)):
        top = tmp_path / f"kept{kept}"
        shutil.copytree(tmp_path / "run", top / "run")
        shutil.copy(tmp_path / "relight.json", top / "relight.json")
        for path in records[kept:]:
            (top / "run" / "log" / path.name).unlink()
        copy = open_bytes(top)
        with pytest.raises(CorruptCheckpoint):
            Attempt.begin(copy, "run")
        execute_rebuild(plan_rebuild(copy, "run"), copy)
        assert live(copy) == ids
        Attempt.begin(copy, "run")


def test_high_epochs_fit_into_a_short_log(tmp_path: Path) -> None:
    """A run of many attempts with few checkpoints left: a record's number bounds its epoch, so the rebuilt log has room made for it."""
    store = open_bytes(tmp_path)
    for _ in range(40):
        attempt = Attempt.begin(store, "run")
    kept = save(attempt, 3, None)
    shutil.rmtree(tmp_path / "run" / "log")
    execute_rebuild(plan_rebuild(store, "run"), store)
    assert live(store) == [kept]
    assert Attempt.begin(store, "run").epoch == 41


def test_kills_before_a_commit_never_refuse_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that dies between its root and its COMMIT leaves a whole directory: the next attempt begins, and sweeps it once fenced."""
    store, ids = run_of(tmp_path, attempts=1, saves=2)
    attempt = Attempt.begin(store, "run")
    with monkeypatch.context() as patched:
        patched.setattr("relight.commit.save._commit", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            save(attempt, 2, ids[-1])
    assert len(list(tmp_path.glob("run/0*"))) == 3
    Attempt.begin(store, "run")
    execute_sweep(plan_sweep(store, "run"), store)
    assert len(list(tmp_path.glob("run/0*"))) == 2
    assert live(store) == ids


def test_damage_is_not_rebuilt_over(tmp_path: Path) -> None:
    """A log with damaged records is another case: nothing is appended to it."""
    store, _ = run_of(tmp_path, attempts=1)
    record = sorted((tmp_path / "run" / "log").iterdir())[2]
    record.write_bytes(record.read_bytes()[:-9])
    with pytest.raises(CorruptCheckpoint, match="damaged"):
        plan_rebuild(store, "run")
    with pytest.raises(CheckpointNotFound):
        plan_rebuild(store, "absent")


def test_hostile_roots_are_refused_in_bounded_time(tmp_path: Path) -> None:
    """Roots with random changes lead to a plan without them, or to a typed error: never to a crash, nor to a checkpoint that is not whole."""
    store, ids = run_of(tmp_path, attempts=1, saves=2)
    shutil.rmtree(tmp_path / "run" / "log")
    root = next(path for path in tmp_path.glob("run/0*/root.json") if ids[0] in str(path))
    good, rng = root.read_bytes(), random.Random(7)
    for _ in range(150):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        root.write_bytes(bytes(data[: rng.choice([len(data), rng.randrange(len(data))])]))
        try:
            plan = plan_rebuild(store, "run", verify=True)
        except RelightError:
            continue
        assert {rebuilt.commit.id for rebuilt in plan.commits if isinstance(rebuilt.commit, CommitBody)} <= set(ids)
