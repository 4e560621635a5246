"""Heavy commands give the same result in this process and in several, whatever process is lost."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from relight.catalog import Run
from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.commit.chunk_index import IncrementalState
from relight.drain.scrub import scrub
from relight.engines import ENGINES, Engine, backends
from relight.errors import ConfigError, CorruptCheckpoint, StoreUnavailable
from relight.export import Options, execute_export, mixture, plan_export
from relight.format import encode_tree
from relight.format.tree import Leaf
from relight.keys import Keychain
from relight.layout import Bytes, Item
from relight.policy.compact import Compact
from relight.reader import by_reference, verify_checkpoint, verify_checkpoints
from relight.reader.opened import Opened
from relight.store import ByteStore, LocalStore, open_bytes
from relight.transfer import execute_copy, plan_copy, shared_copy
from relight.transfer.keys import rekey
from relight.transfer.repack import execute_repack, plan_repack
from relight.versions.difference import diff

ROWS, MEGABYTES = 1500, 6


class Marked(NamedTuple):
    """A task that ends its process as long as it finds fewer than ``deaths`` marks in ``folder``."""

    folder: str
    number: int
    deaths: int = 0


def square(number: int) -> int:
    """Return a number's square."""
    return number * number


def fail(number: int) -> int:
    """Raise what a damaged file raises."""
    raise CorruptCheckpoint("not what was written", where=f"file {number}", hint="restore another")


def mark_and_die(task: Marked) -> int:
    """Leave a mark. Kill this process, unless there are marks enough."""
    folder = Path(task.folder) / str(task.number)
    folder.mkdir(exist_ok=True)
    marks = len(list(folder.iterdir()))
    (folder / str(marks)).touch()
    if marks < task.deaths:
        os.kill(os.getpid(), signal.SIGKILL)
    return task.number


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Two processes, for all tests of this file."""
    with Engine("processes", 2) as engine:
        yield engine


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of one or two chunks, so that each pack is several. The commanding process divides the work."""
    monkeypatch.setattr(by_reference, "TASK_BYTES", 5 << 20)


def save(store: ByteStore, run: str, count: int = 3, smaller: IncrementalState | None = None) -> Run:
    """Save ``count`` checkpoints of one tensor that changes a little each time, and one that does not."""
    attempt = Attempt.begin(store, run)
    columns = (MEGABYTES << 18) // ROWS
    weights = np.random.default_rng(0).standard_normal((ROWS, columns), dtype=np.float32)
    for step in range(count):
        weights[step * 100 : step * 100 + 50] += 0.5
        items = [
            Item("model/w", "float32", weights.shape, "param", Bytes(weights.tobytes())),
            Item("model/fixed", "float32", (7,), "buffer", Bytes(np.arange(7, dtype=np.float32).tobytes())),
        ]
        tree = encode_tree({"model": {"w": Leaf("tensor", (0,)), "fixed": Leaf("tensor", (1,))}})
        info = SaveInfo(step=step, components={"model": "module"})
        attempt.save(SaveRequest(info, tree=tree, items=items, smaller=smaller))
    return Run(store, run)


def files(root: Path, pattern: str = "pack*") -> dict[str, bytes]:
    """Return a store's files with a matching name, by path."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob(pattern)) if path.is_file()}


def opened(run: Run, index: int = -1) -> Opened:
    """Open a live checkpoint."""
    return run.open(run.history().live[index])


# -- the engine


def test_tasks_begin_in_order_and_give_their_results(engine: Engine) -> None:
    """Each task runs once. At most ``jobs`` are given out before a result is taken."""
    given: list[int] = []

    def tasks() -> Iterator[int]:
        for number in range(40):
            given.append(number)
            yield number

    results = {}
    for task, result in engine.run(square, tasks()):
        results[task] = result
        assert len(given) <= len(results) + engine.jobs
    assert results == {number: number * number for number in range(40)} and given == list(range(40))
    assert list(Engine().run(square, [3])) == [(3, 9)]


def test_an_error_of_a_task_arrives_whole(engine: Engine) -> None:
    """The command reports what and where, as if the task had run in its process; the engine stays usable."""
    with pytest.raises(CorruptCheckpoint, match="not what was written") as raised:
        list(engine.run(fail, [7]))
    assert raised.value.where == "file 7" and raised.value.hint == "restore another"
    assert list(engine.run(square, [2])) == [(2, 4)]


def test_the_task_of_a_lost_process_runs_again(engine: Engine, tmp_path: Path) -> None:
    """Four tasks lose processes, and others with them. All results arrive, each once: a task that lost two runs alone."""
    tasks = [Marked(str(tmp_path), number, deaths=2 if number in (0, 3, 5, 9) else 0) for number in range(10)]
    results = [result for _, result in engine.run(mark_and_die, tasks)]
    assert sorted(results) == list(range(10))
    assert len(list((tmp_path / "5").iterdir())) == 3


def test_a_task_that_loses_every_process_ends_the_command(engine: Engine, tmp_path: Path) -> None:
    """It may need too much memory. The error names that, after a bounded number of tries."""
    with pytest.raises(StoreUnavailable, match="lost its process 3 times") as raised:
        list(engine.run(mark_and_die, [Marked(str(tmp_path), 0, deaths=100)], tries=3))
    assert "memory" in raised.value.hint and len(list((tmp_path / "0").iterdir())) == 3
    assert list(engine.run(square, [2])) == [(2, 4)]


def test_wrong_engines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the engines, or what to install."""
    with pytest.raises(ConfigError, match="no engine 'slurm'") as raised:
        Engine("slurm")
    assert all(name in raised.value.hint for name in ENGINES)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="needs Ray") as raised:
        Engine("ray")
    assert "pip install" in raised.value.hint


def test_what_ray_prints_does_not_mix_with_json(capfd: pytest.CaptureFixture[str]) -> None:
    """Ray prints warnings to stdout, from threads of its own. They go to stderr."""
    output = backends._OwnOutput(sys.stdout)
    for name in ("ray_listen_error_messages", "MainThread"):
        thread = threading.Thread(target=print, args=[name], kwargs={"file": output, "flush": True}, name=name)
        thread.start()
        thread.join()
    captured = capfd.readouterr()
    assert captured.out == "MainThread\n" and captured.err == "ray_listen_error_messages\n"
    assert not output.isatty() and output.fileno() == sys.stdout.fileno() and output.encoding == sys.stdout.encoding


def test_a_store_in_memory_stays_in_its_process(engine: Engine) -> None:
    """Other processes cannot read it, and the error names the engine that can."""
    run = save(open_bytes("memory://engines"), "demo", count=1)
    with pytest.raises(ConfigError, match="memory of one process") as raised:
        list(verify_checkpoints([(run.store, run.view(), run.history().live[0])], engine))
    assert "--engine local" in raised.value.hint


# -- the commands


def test_verify_finds_the_same_damage(engine: Engine, tmp_path: Path) -> None:
    """Flipped bytes, a cut file and a missing one, in the same words and the same order. Progress is every byte."""
    run = save(LocalStore(tmp_path / "s"), "demo", count=4)
    packs = sorted((tmp_path / "s").rglob("pack-*"))
    for offset in (10, 1_000_000, 5_900_000):
        with open(packs[0], "r+b") as file:
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 1]))
    os.truncate(packs[1], 5_000_000)
    packs[2].unlink()
    targets = [(run.store, run.view(), checkpoint) for checkpoint in run.history().live]
    counted: list[int] = []
    shared = list(verify_checkpoints(targets, engine, progress=counted.append))
    assert shared == [verify_checkpoint(*target) for target in targets]
    assert [len(findings) for findings in shared] == [3, 2, 1, 0]
    assert sum(counted) == sum(checkpoint.body.logical_bytes for _, _, checkpoint in targets) + 4 * _header(run)


def _header(run: Run) -> int:
    pack = opened(run).parts[0].packs[0]
    return pack.size - opened(run).checkpoint.body.logical_bytes


def test_diff_is_the_same_to_the_bit(engine: Engine, tmp_path: Path) -> None:
    """Sums of doubles are added in the same order, whichever process ends first."""
    run = save(LocalStore(tmp_path), "demo")
    sides = opened(run, 0), opened(run, 2)
    assert diff(*sides, slab_bytes=1 << 20, engine=engine) == diff(*sides, slab_bytes=1 << 20)


@pytest.mark.parametrize(
    ("name", "options", "average"),
    [
        ("model.safetensors", Options(dtype="bfloat16"), False),
        ("whole.pt", Options(to="pt", everything=True), False),
        ("dcp", Options(to="dcp"), False),
        ("mean.safetensors", Options(), True),
    ],
)
def test_export_is_the_same_to_the_bit(
    name: str, options: Options, average: bool, engine: Engine, tmp_path: Path
) -> None:
    """All formats, conversions and averages; CRC32s too, which are joined from those of the tasks."""
    run = save(LocalStore(tmp_path / "s"), "demo")
    source = mixture([opened(run, 0), opened(run, 2)], [1.0, 3.0]) if average else opened(run)
    reports = {}
    for folder, where in (("here", Engine()), ("shared", engine)):
        plan = plan_export(source, tmp_path / folder / name, options)
        reports[folder] = execute_export(plan, engine=where)
    assert files(tmp_path / "here", "*") == files(tmp_path / "shared", "*") != {}
    assert reports["here"].from_last == reports["shared"].from_last
    assert not list(tmp_path.rglob(".*exporting*"))


def test_a_copy_by_several_processes_is_the_usual_one(engine: Engine, tmp_path: Path) -> None:
    """Packs are equal to the byte, each checkpoint is there once, and nothing temporary stays."""
    run = save(LocalStore(tmp_path / "s"), "demo")
    live = run.history().live
    counted: list[int] = []
    target = LocalStore(tmp_path / "t")
    plan = plan_copy(run, live, target, "copy")
    report = execute_copy(plan, engine=engine, progress=counted.append)
    assert [old for old, _ in report.copied] == [checkpoint.id for checkpoint in live]
    packs = [list(files(tmp_path / folder).values()) for folder in "st"]
    assert packs[0] == packs[1]
    copy = Run(target, "copy")
    assert not any(verify_checkpoint(target, copy.view(), checkpoint) for checkpoint in copy.history().live)
    assert sum(counted) == sum(map(len, packs[0]))
    assert not list((tmp_path / "t").rglob("ready")) and not list((tmp_path / "t").rglob(".*"))
    assert not plan_copy(run, live, target, "copy").checkpoints


def test_an_interrupted_copy_is_continued(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a stopped command has copied stays in its directory, is no checkpoint, and is used by the next command without a wait."""
    run = save(LocalStore(tmp_path / "s"), "demo", count=1)
    target = LocalStore(tmp_path / "t")
    plan = plan_copy(run, run.history().live, target, "copy")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shared_copy, "check_written", stop)
    with pytest.raises(KeyboardInterrupt):
        execute_copy(plan, engine=engine)
    monkeypatch.undo()
    assert not Run(target, "copy").history().live
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "t").rglob("pack-*")}
    report = execute_copy(plan_copy(run, run.history().live, target, "copy"), engine=engine)
    assert len(report.copied) == 1 and before
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "t").rglob("pack-*")}


def test_a_damaged_original_is_skipped(engine: Engine, tmp_path: Path) -> None:
    """The others are copied, and the damaged one leaves nothing that a reader would take for a checkpoint."""
    run = save(LocalStore(tmp_path / "s"), "demo")
    live = run.history().live
    with open(sorted((tmp_path / "s").rglob("pack-*"))[1], "r+b") as file:
        file.seek(5_500_000)
        file.write(b"damage")
    target = LocalStore(tmp_path / "t")
    report = execute_copy(plan_copy(run, live, target, "copy"), engine=engine)
    assert [old for old, _ in report.copied] == [live[0].id, live[2].id]
    assert [old for old, _ in report.damaged] == [live[1].id]
    assert len(Run(target, "copy").history().live) == 2 and len(list((tmp_path / "t").rglob("pack-*"))) == 2


def test_repack_and_rekey_write_what_they_always_write(engine: Engine, tmp_path: Path) -> None:
    """Coded checkpoints become whole; then every file of the store is encrypted, and encrypted again for another key."""
    store = LocalStore(tmp_path / "s")
    run = save(store, "demo", smaller=IncrementalState(Compact(codecs="never")))
    plan = plan_repack(run)
    assert plan.chosen
    report = execute_repack(plan, engine=engine)
    assert report.bytes and not any(checkpoint.requires for checkpoint in run.history().live)
    keys = []
    for number in range(2):
        path = tmp_path / f"key{number}"
        path.write_text("%064x" % (number + 1))
        path.chmod(0o600)
        keys.append(Keychain.from_specs([f"file:{path}"]))
    assert rekey(store, keys[0], engine=engine).left == 0
    again = rekey(store, keys[0], leaked="*", keep=keys[1], engine=engine)
    assert again.left == 0 and not again.damaged and again.files > 6
    assert rekey(store, keys[1], leaked="*", plan_only=True).files == again.files


def test_scrub_repairs_what_other_processes_have_found(engine: Engine, tmp_path: Path) -> None:
    """The damage of one tier, found by the engine's processes, is repaired from the other by this one."""
    run = save(LocalStore(tmp_path / "s"), "demo")
    assert not scrub(run.store, "demo", engine=engine).damage
    pack = max((tmp_path / "s").rglob("pack-*"))
    with open(pack, "r+b") as file:
        file.write(b"x")
    (damage,) = scrub(run.store, "demo", engine=engine).damage
    assert damage.file.endswith(pack.name) and not damage.repaired_from
