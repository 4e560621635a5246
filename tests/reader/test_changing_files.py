"""Files that change between two reads: a reader returns the committed bytes or raises an error."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from examine import Seen, Straight, read_all
from forge import DIRS, RUN, STEPS, Forge, load, request, values, write

from relight.catalog import Run, candidates, list_runs
from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.errors import CorruptCheckpoint, RelightError
from relight.format import encode_tree
from relight.layout import Bytes, Item
from relight.log import Log
from relight.reader import chunk_reader as read
from relight.reader import read_tensors, verify_checkpoint
from relight.reader.opened import Opened
from relight.store import Disk, LocalStore

PACK = f"{DIRS['c']}/pack-00000-000.safetensors"
PART = f"{DIRS['c']}/part-00000.msgpack"
Change = Callable[[Path], object]


def replace(path: Path, data: bytes) -> None:
    """Put another file under the name, as an attacker or a sync tool would."""
    path.with_suffix(".new").write_bytes(data)
    path.with_suffix(".new").rename(path)


CHANGES: list[tuple[str, Change]] = [
    ("replaced by another checkpoint's", lambda path: replace(path, Forge().files[PACK.replace(DIRS["c"], DIRS["b"])])),
    ("replaced by its like with a bit flipped", lambda path: replace(path, path.read_bytes()[:-1] + b"\x01")),
    ("overwritten in place", lambda path: path.write_bytes(b"\xff" * path.stat().st_size)),
    ("cut", lambda path: os.truncate(path, 4500)),
    ("grown", lambda path: os.truncate(path, 10_000)),
    ("removed", lambda path: path.unlink()),
    (
        "replaced by a link",
        lambda path: (path.rename(path.with_suffix(".old")), path.symlink_to(path.with_suffix(".old"))),
    ),
    ("replaced by a pipe", lambda path: (path.unlink(), os.mkfifo(path))),
    ("replaced by a directory", lambda path: (path.unlink(), path.mkdir())),
]


def opened_at(root: Path, disk: Disk | None = None) -> Opened:
    """The newest checkpoint of the good store, opened."""
    write(Forge().files, root)
    run = Run(LocalStore(root, disk=disk), RUN)
    return run.open(candidates(run.history())[0])


@pytest.mark.parametrize(("name", "change"), CHANGES, ids=[name for name, _ in CHANGES])
def test_a_pack_changed_after_it_was_verified(name: str, change: Change, tmp_path: Path) -> None:
    """An earlier verification does not replace the check at each read."""
    opened = opened_at(tmp_path)
    view = Run(opened.store, RUN).view()
    assert not verify_checkpoint(opened.store, view, opened.checkpoint)
    change(tmp_path / PACK)
    with pytest.raises(RelightError):
        read_all(opened, Straight, Seen())
    assert verify_checkpoint(opened.store, view, opened.checkpoint)


class Meddling(Disk):
    """A disk on which a file changes at the n-th read of it."""

    def __init__(self, change: Change, path: Path, at: int) -> None:
        self._change, self._watched, self._at, self._fd = change, path, at, -1
        self.done = False

    def open_read(self, path: str) -> int:
        """Notes which file is the watched one."""
        fd = super().open_read(path)
        if path == str(self._watched):
            self._fd = fd
        return fd

    def preadv(self, fd: int, into: memoryview, offset: int) -> int:
        """Counts, and meddles before the n-th read."""
        if fd == self._fd and not self.done:
            self._at -= 1
            if self._at == 0:
                self.done = True
                self._change(self._watched)
        return super().preadv(fd, into, offset)


@pytest.mark.parametrize("at", [1, 2, 3, 5])
@pytest.mark.parametrize(("name", "change"), CHANGES, ids=[name for name, _ in CHANGES])
def test_a_pack_changed_while_it_is_read(
    name: str, change: Change, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a pack's name changes during a read, all returned bytes are from one file and equal the committed ones."""
    monkeypatch.setattr(read, "READ_BYTES", 1)  # each chunk by itself
    opened = opened_at(tmp_path)
    disk = Meddling(change, tmp_path / PACK, at)
    opened = Opened(LocalStore(tmp_path, disk=disk), opened.prefix, opened.checkpoint, opened.root, opened.parts)
    part = opened.parts[0]
    buffers = [bytearray(tensor.length) for tensor in part.tensors]
    try:
        read_tensors(opened, part, {index: Bytes(buffer) for index, buffer in enumerate(buffers)})
    except CorruptCheckpoint:
        assert name in ("overwritten in place", "cut"), "the open file had not changed"
    else:
        assert [bytes(buffer) for buffer in buffers] == [values(STEPS["c"])[tensor.name] for tensor in part.tensors]
    assert disk.done


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize(("name", "change"), CHANGES, ids=[name for name, _ in CHANGES])
def test_a_part_changed_while_it_is_read(name: str, change: Change, at: int, tmp_path: Path) -> None:
    """A part is read once, and what was read is what is checked."""
    write(Forge().files, tmp_path)
    disk = Meddling(change, tmp_path / PART, at)
    run = Run(LocalStore(tmp_path, disk=disk), RUN)
    try:
        opened = run.open(candidates(run.history())[0])
    except RelightError:
        return
    assert opened.parts == Run(load(Forge().files), RUN).open(candidates(run.history())[0]).parts


def test_the_log_grows_while_it_is_read() -> None:
    """A reader sees the beginning of the log; its next read sees the rest."""
    store = load(Forge().files)
    run = Run(store, RUN)
    before = run.history()
    Attempt.begin(store, RUN).save(request(40))
    assert [checkpoint.id for checkpoint in before.live] == [checkpoint.id for checkpoint in run.history().live[:-1]]


def test_one_hostile_run_hides_no_other(tmp_path: Path) -> None:
    """A listing of runs names all runs, also one with a file in place of its log. Opening that run states the error."""
    write(Forge().files, tmp_path)
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "log").symlink_to("/etc")
    store = LocalStore(tmp_path)
    assert list_runs(store) == [RUN, "evil"]
    with pytest.raises(RelightError, match="symbolic link"):
        Run(store, "evil").view()


def test_verify_counts_the_tensors_that_it_does_not_name() -> None:
    """If one damaged chunk has many tensors, the first ones are named and the rest is counted."""
    store = load({})
    items = [Item(f"t{n:02d}", "uint8", (4,), "value", Bytes(bytes([n] * 4))) for n in range(30)]
    saved = Attempt.begin(store, RUN).save(SaveRequest(SaveInfo(step=1), tree=encode_tree(None), items=items))
    run = Run(store, RUN)
    key = f"{RUN}/{saved.dir}/pack-00000-000.safetensors"
    store._files[key] = bytes(store._files[key][:-1]) + b"\xff"
    [finding] = verify_checkpoint(store, run.view(), run.history().live[0])
    assert finding.tensor.startswith("t00, t01, ")
    assert finding.tensor.endswith(" and 22 more")


class Private(Disk):
    """A disk on which one directory is another user's."""

    def lstat(self, path: str) -> os.stat_result:
        """Refuse every path inside that directory."""
        if "/private/" in path:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return super().lstat(path)


def test_an_unreadable_directory_next_to_the_runs_is_no_obstacle(tmp_path: Path) -> None:
    """A store can be created and listed in a directory with unreadable entries, such as /tmp."""
    (tmp_path / "private").mkdir()
    store = LocalStore(tmp_path, disk=Private())
    Attempt.begin(store, RUN).save(request(1))
    assert list_runs(store) == [RUN]


def test_a_record_that_vanishes_is_not_counted() -> None:
    """A log object that has read a record forgets it when the record is gone: its view never reaches beyond its head."""
    store = load(Forge().files)
    log = Log(store, RUN)
    assert log.read().head == 9
    store.delete(f"{RUN}/log/000000000009.json")
    view = log.read()
    assert view.head == 8
    assert max(record.seq for record in view.records) == 8
