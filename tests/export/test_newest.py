"""``relight export --follow``: the target is always a whole export of one checkpoint."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.export.newest_kills import kill_exports, save, step_of

from relight.catalog import open_run
from relight.commit import Attempt
from relight.errors import ConfigError, RelightError
from relight.export import Options
from relight.export.atomic_output import ABANDONED_S
from relight.export.newest import NewestExport
from relight.format.topics import ROLLED_BACK, RollbackNote
from relight.log import Log, fold
from relight.reader.opened import Opened
from relight.store import LocalStore


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    """A run with checkpoints of steps 1 to 5, in the working directory; and further files."""
    monkeypatch.chdir(tmp_path)
    attempt = Attempt.begin(LocalStore(str(tmp_path / "s")), "run")
    for step in range(1, 6):
        save(attempt, step)
    Path("more").mkdir()
    Path("more/config.json").write_text("{}")
    return attempt


def opened(step: int) -> Opened:
    """Open a checkpoint."""
    run = open_run(LocalStore(os.path.abspath("s")), "run")
    return run.open(next(checkpoint for checkpoint in run.history().live if checkpoint.step == step))


SHARDS = Options(shard_bytes=40_000)


def test_a_directory_is_a_link_to_a_version(attempt: Attempt) -> None:
    """The version before stays, so that its readers find all files; older ones are removed."""
    with NewestExport("out", SHARDS, "more") as export:
        assert export.checkpoint_id is None
        for step in (1, 2, 3):
            before = Path(os.path.realpath("out"))
            export.export(opened(step))
            assert export.checkpoint_id == opened(step).root.id and step_of(Path("out")) == step
            assert step == 1 or step_of(before) == step - 1
        assert len(os.listdir(".out.versions")) == 2 and os.readlink("out").startswith(".out.versions/3-")
        export.export(opened(2))  # a tag moved back
        assert step_of(Path("out")) == 2
    with NewestExport("out", SHARDS, "more") as export:
        assert export.checkpoint_id == opened(2).root.id
    with NewestExport("out", Options(dtype="bfloat16")) as export:
        assert export.checkpoint_id is None, "other options"
    shutil.rmtree(os.path.realpath("out"))
    with NewestExport("out", SHARDS, "more") as export:
        assert export.checkpoint_id is None, "the link points to nothing"
        export.export(opened(2))
        assert step_of(Path("out")) == 2


def test_what_an_interrupted_export_left_is_removed(attempt: Attempt) -> None:
    """Incomplete versions, complete ones to which the link never pointed, links. The version before the present one stays."""
    with NewestExport("out", SHARDS, "more") as export:
        export.export(opened(1))
        export.export(opened(2))
        present = set(os.listdir(".out.versions"))
    time.sleep(0.01)
    for name in (".new", "..new.exporting-0123456789abcdef", ".removed", "3-abcdefghij-01234567"):
        Path(".out.versions", name).mkdir()
        Path(".out.versions", name, "model.safetensors").write_bytes(b"x")
    os.symlink("nowhere", ".out.versions/.link")
    Path(".out.versions/notes").mkdir()  # another program's
    present.add("notes")
    with NewestExport("out", SHARDS, "more") as export:
        assert set(os.listdir(".out.versions")) == present
        export.export(opened(3))
        assert step_of(Path("out")) == 3


def test_a_failed_export_leaves_the_one_before(attempt: Attempt) -> None:
    """A damaged checkpoint is not exported: nothing changes."""
    broken = opened(2)
    with NewestExport("out", SHARDS, "more") as export:
        export.export(opened(1))
        for pack in Path("s/run").glob("*/*.safetensors"):
            if "-" in pack.parent.name and pack.parent.name.startswith(broken.checkpoint.body.dir):
                data = bytearray(pack.read_bytes())
                data[-1] ^= 1
                pack.write_bytes(data)
        with pytest.raises(RelightError):
            export.export(opened(2))
        assert step_of(Path("out")) == 1


def test_what_it_has_not_made_is_not_replaced(attempt: Attempt) -> None:
    """A directory, a file, a link to elsewhere. Two exports at once to one directory are refused, too."""
    Path("there").mkdir()
    Path("file").write_text("x")
    os.symlink("there", "link")
    for target in ("there", "file", "link"):
        with pytest.raises(ConfigError, match="has not made"), NewestExport(target, SHARDS):
            pass
    with pytest.raises(ConfigError, match="directory"), NewestExport("there", Options(to="pt")):
        pass
    with pytest.raises(ConfigError, match="--files"):
        NewestExport("out.safetensors", Options(), "more")
    with NewestExport("out", SHARDS), pytest.raises(ConfigError, match="another process"), NewestExport("out", SHARDS):
        pass


def follow(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``relight export --follow s/run`` to its end."""
    command = [sys.executable, "-m", "relight", "export", "--follow", "s/run", *arguments, "--every", "0.1"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("target", ["out.safetensors", "out.pt", "out", "dcp"])
def test_every_form_of_an_export_follows(target: str, attempt: Attempt) -> None:
    """Files and directories are at the last checkpoint when the run is finished; a restart exports nothing again to a directory."""
    options = ["--to", "dcp"] if target == "dcp" else []
    timer = threading.Timer(1.0, lambda: save(attempt, 6, last=True))
    timer.start()
    done = follow(target, "--json", *options)
    timer.join()
    facts = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and facts[-1]["step"] == 6 and {fact["path"] for fact in facts} == {target}, done
    again = follow(target, *options)
    assert again.returncode == 0 and ("step 6" in again.stdout) == ("." in target)


def damage(attempt: Attempt, step: int) -> None:
    """Change a byte of a checkpoint's packs."""
    (checkpoint,) = [each for each in attempt.history().live if each.step == step]
    for pack in Path("s/run", checkpoint.body.dir).glob("*.safetensors"):
        data = bytearray(pack.read_bytes())
        data[-1] ^= 1
        pack.write_bytes(data)


def save_last(attempt: Attempt, step: int, is_due: Callable[[], bool]) -> threading.Thread:
    """Start a thread that saves the run's last checkpoint once ``is_due`` returns True."""

    def wait_and_save() -> None:
        ends = time.monotonic() + 50
        while not is_due() and time.monotonic() < ends:
            time.sleep(0.05)
        save(attempt, step, last=True)

    thread = threading.Thread(target=wait_and_save)
    thread.start()
    return thread


def test_a_damaged_checkpoint_is_skipped(attempt: Attempt) -> None:
    """With a warning; the one before it is exported, as there is no target yet, and the next one."""
    damage(attempt, 5)
    trainer = save_last(attempt, 6, Path("out.safetensors").exists)
    done = follow("out.safetensors")
    trainer.join()
    assert "step 4" in done.stdout
    assert done.returncode == 0 and "step 5" in done.stderr and "not exported" in done.stderr, done
    assert step_of(Path("out.safetensors")) == 6


@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
def test_a_checkpoint_that_a_rollback_sets_aside_is_replaced(damaged: bool, attempt: Attempt) -> None:
    """By the newest good one, which is older. If that is damaged, by the one before it."""
    assert follow("out", "--until", "5").returncode == 0 and os.readlink("out").startswith(".out.versions/5-")
    note = ROLLED_BACK.note(RollbackNote(before=3))
    Log(attempt.store, "run").append(lambda view: (note, fold(view).epoch))
    if damaged:
        damage(attempt, 2)
    older = f".out.versions/{1 if damaged else 2}-"
    trainer = save_last(attempt, 3, lambda: os.readlink("out").startswith(older))
    done = follow("out", "--json")
    trainer.join()
    facts = [json.loads(line)["step"] for line in done.stdout.splitlines()]
    assert done.returncode == 0 and facts == [1 if damaged else 2, 3], done
    assert os.readlink("out").startswith(".out.versions/3-")


def test_a_named_checkpoint_that_was_set_aside_is_exported_once(attempt: Attempt) -> None:
    """By its id, as by a tag: the choice is the user's."""
    chosen = attempt.history().live[-1].id
    note = ROLLED_BACK.note(RollbackNote(before=3))
    Log(attempt.store, "run").append(lambda view: (note, fold(view).epoch))
    save(attempt, 3, last=True)
    done = follow("out", "--json", "--which", chosen)
    assert [json.loads(line)["step"] for line in done.stdout.splitlines()] == [5], done


@pytest.mark.parametrize("folder", [True, False], ids=["directory", "file"])
def test_a_reader_never_sees_a_mixture(folder: bool, tmp_path: Path) -> None:
    """A slice of ``python -m tests.export.newest_kills``."""
    outcome = kill_exports(tmp_path, 5, seed=3, folder=folder)
    assert not outcome.wrong and outcome.steps > 3, (outcome, (tmp_path / "output").read_text()[-2000:])


def no_locks(monkeypatch: pytest.MonkeyPatch, number: int = errno.ENOSYS) -> None:
    """Refuse locks."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_two_exports_without_locks(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second export to the directory begins, ends and cleans up during the first: both succeed, and nothing is left over."""
    no_locks(monkeypatch)
    seen: list[int] = []

    def second(length: int) -> None:
        if not seen:
            with NewestExport("out", SHARDS, "more") as other:
                other.export(opened(2))
            seen.append(step_of(Path("out")))
            with NewestExport("out", SHARDS, "more") as other:  # the same version as the first one's
                other.export(opened(3))
            seen.append(step_of(Path("out")))

    with NewestExport("out", SHARDS, "more") as first:
        first.export(opened(1))
        first.export(opened(3), second)
        assert seen == [2, 3] and step_of(Path("out")) == 3
        first.export(opened(4))
    assert step_of(Path("out")) == 4 and len(os.listdir(".out.versions")) == 2


EXPORTER = """
import errno, fcntl, os, sys
def refuse(*_):
    raise OSError(errno.ENOSYS, "no locks")
fcntl.flock = refuse
from tests.export.test_newest import SHARDS, opened
from relight.export.newest import NewestExport
for turn in range(6):
    with NewestExport("out", SHARDS, "more") as export:
        for step in (1, 2, 3, 4, 5):
            export.export(opened(step))
"""


def test_processes_without_locks(attempt: Attempt) -> None:
    """Two processes replace a directory at once. Each export succeeds, and a reader always finds a whole one."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", EXPORTER], env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    reads = 0
    while any(process.poll() is None for process in processes):
        resolved = Path(os.path.realpath("out"))
        try:
            reads += step_of(resolved) > 0
        except FileNotFoundError:  # no version yet, or two newer ones have followed
            assert not reads or any(os.path.exists("out") for _ in range(3)), resolved
        time.sleep(0.002)
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert reads > 5 and step_of(Path("out")) in range(1, 6)
    assert not [name for name in os.listdir(".out.versions") if name.startswith(".")]


@pytest.mark.parametrize("locks", [True, False])
def test_unfinished_files_of_another_machine(locks: bool, attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock on a directory of NFS excludes no other machine: its files stay while they change. Old ones are removed."""
    if not locks:
        no_locks(monkeypatch)
    other = "0" * 8 + "f" * 16
    left = [Path(f".out.versions/.new-{other}"), Path(f".out.versions/..new-{other}.exporting-{other}")]
    for folder in left:
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"x")
    file = Path(f".x.safetensors.exporting-{other}")
    file.mkdir()

    def export() -> None:
        with NewestExport("out", SHARDS, "more") as directory, NewestExport("x.safetensors", Options()) as single:
            directory.export(opened(1))
            single.export(opened(1))

    export()
    assert file.exists() and all(folder.exists() for folder in left)
    before = time.time() - ABANDONED_S - 60
    for path in (file, *left, *(folder / "model.safetensors" for folder in left)):
        os.utime(path, (before, before))
    (left[1] / "model.safetensors").write_bytes(b"a new change")
    export()
    assert [path.exists() for path in (file, *left)] == [False, False, True]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
@pytest.mark.parametrize("target", ["served/", "served.safetensors"])
def test_a_file_system_without_locks(
    target: str, number: int, attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Lustre without ``flock``, and NFS without lock service, an export works without a lock, and leaves nothing."""
    no_locks(monkeypatch, number)
    options = SHARDS if target.endswith("/") else Options()
    with NewestExport(target, options) as newest:
        for step in (1, 2):
            newest.export(opened(step))
    assert not [name for name in os.listdir() if "exporting" in name]


def test_a_lock_that_fails_leaves_nothing(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try of an export that fails would otherwise leave a directory and a descriptor."""
    no_locks(monkeypatch, errno.EIO)
    before = len(os.listdir("/proc/self/fd"))
    for target, options in (("x.safetensors", Options()), ("served/", SHARDS)):
        with pytest.raises(RelightError, match="Input/output error"), NewestExport(target, options) as newest:
            newest.export(opened(1))
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [name for name in os.listdir() if "exporting" in name]
