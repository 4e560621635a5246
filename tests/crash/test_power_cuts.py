"""Real power cuts, and disks built from a block log: slices of ``make powercuts`` and ``make blocks``. Both engines
can fail.

Each engine runs in a process of its own, because it makes its mounts private.
"""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from proofs import acknowledged, block_log, fuse_file
from proofs.block_log import LEFT, DiskSession, choose, find_points, leave
from proofs.child_processes import MUTATIONS, AcknowledgedFact, store_in, victims
from proofs.fuse_file import DiskEntry
from proofs.images import PLAIN, copy_image
from relight.errors import StoreUnavailable
from relight.store import Disk, LocalStore
from relight.store.durable import sync_dir
from relight.testing.scenario import RUN, Fact

pytestmark = pytest.mark.crash
ROOT = Path(__file__).parents[2]
FLUSH = DiskEntry(0, b"")
SECTOR = 512


def _run(engine: str, *options: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", f"proofs.{engine}", "--json", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 2:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize(("file_system", "count"), [("ext4", 15), ("xfs", 6)])
def test_nothing_acknowledged_is_lost_in_a_power_cut(file_system: str, count: int) -> None:
    """A file system that is shut down under a saving process has all that was acknowledged after it is mounted again, and the run resumes."""
    code, report = _run("power_cuts", "--count", str(count), "--seed", "4", "--file-system", file_system)
    assert (code, report["first"]) == (0, [])
    assert report["ok"]
    assert report["total"] == count
    assert "log not flushed" in report["by_kind"]
    assert sum(report["acknowledged"].values()) > count
    assert {"begun", "saved"} <= report["acknowledged"].keys()


@pytest.mark.parametrize(("file_system", "count"), [("ext4", 60), ("xfs", 15)])
def test_nothing_acknowledged_is_missing_on_a_disk_that_a_cut_may_leave(file_system: str, count: int) -> None:
    """For any subset of the writes after the last flush, everything acknowledged is on the disk, and the run
    resumes."""
    code, report = _run(
        "block_log", "--count", str(count), "--seed", "4", "--entries", "120", "--file-system", file_system
    )
    assert (code, report["first"]) == (0, [])
    assert report["ok"]
    assert report["total"] == count
    assert report["counts"]["flushes"] > 20
    assert report["counts"][acknowledged.CHECKED] > count // 2
    assert report["counts"]["checked by fsck"] > 0


@pytest.mark.parametrize("mutation", ["pack", "record", "link"])
def test_a_missing_fsync_loses_something_in_a_power_cut(mutation: str) -> None:
    """The engine can fail: without the fsync of packs, of records, or of the log's directory, some hundred cuts find a loss."""
    code, report = _run("power_cuts", "--count", "300", "--seed", "4", "--stop", "1", "--mutation", mutation)
    assert code == 1
    assert len(report["first"]) == 1
    assert not report["ok"]


@pytest.mark.parametrize("mutation", ["pack", "record", "link"])
def test_a_missing_fsync_shows_on_a_disk_that_a_cut_may_leave(mutation: str) -> None:
    """The engine can fail: without the fsync of packs, of records, or of the log's directory, some hundred disks show a loss."""
    code, report = _run(
        "block_log", "--count", "900", "--sessions", "9", "--entries", "200", "--stop", "1", "--mutation", mutation
    )
    assert code == 1
    assert len(report["first"]) == 1


CUT_BEFORE_AN_FSYNC = """
import sys
from relight.errors import RelightError
from relight.store import Disk, LocalStore
from proofs.report import EngineUnavailable
from proofs.images import cut_power, kinds_called, make_image, mount, private_mounts, scratch, unmount

class Cut(Disk):
    def open_dir(self, path):
        fd = super().open_dir(path)
        cut_power(where, "log not flushed")
        return fd

try:
    private_mounts()
    kind = kinds_called(sys.argv[1])[0]
    with scratch("relight-link-") as directory:
        where = f"{directory}/mounted"
        make_image(f"{directory}/image", kind)
        mount(f"{directory}/image", where, kind)
        LocalStore(f"{where}/store").put_once("log/first", b"data")
        try:
            print("acknowledged", LocalStore(f"{where}/store", disk=Cut()).put_once("log/second", b"data"))
        except RelightError as error:
            print(type(error).__name__)
        unmount(where)
        mount(f"{directory}/image", where, kind)
        print(sorted(entry.name for entry in LocalStore(f"{where}/store").list("log") if not entry.name.startswith(".")))
except EngineUnavailable as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


@pytest.mark.parametrize("file_system", ["ext4", "xfs"])
def test_a_name_that_a_shutdown_lost_is_not_acknowledged(file_system: str) -> None:
    """A file system that is shut down after a link loses the name, and the caller gets ``Uncertain``.

    This also holds on XFS, where the fsync of a directory that is already open reports success.
    """
    done = subprocess.run(
        [sys.executable, "-c", CUT_BEFORE_AN_FSYNC, file_system], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode == 2:
        pytest.skip(done.stderr.strip())
    assert done.stdout.splitlines() == ["Uncertain", "['first']"], done.stderr


def test_a_directory_is_checked_after_its_fsync(tmp_path: Path) -> None:
    """Names are durable if the fsync succeeds and the file system still answers afterwards."""

    class ShutDown(Disk):
        def fstat(self, fd: int) -> os.stat_result:
            raise OSError(errno.EIO, "shut down")

    sync_dir(Disk(), str(tmp_path))
    with pytest.raises(StoreUnavailable, match="making file names durable failed: Input/output error"):
        sync_dir(ShutDown(), str(tmp_path))


def test_a_disk_that_ignores_flushes_is_detected() -> None:
    """If the disk ignores flushes, reordering loses what was acknowledged, and the engine reports it."""
    code, report = _run("block_log", "--count", "400", "--sessions", "1", "--entries", "80", "--stop", "3", "--lies")
    assert code == 1
    assert len(report["first"]) == 3
    assert "all" not in [violation["trial"].rpartition(":")[2] for violation in report["first"]], (
        "in order, nothing is missing"
    )


def test_a_log_without_its_flushes_has_the_same_writes() -> None:
    """A disk that ignores flushes has the same writes, and the acknowledgements after the same writes."""
    session = _session(
        _write(0),
        FLUSH,
        _write(1),
        FLUSH,
        FLUSH,
        told=(AcknowledgedFact(2, ("begun", "1")), AcknowledgedFact(5, ("swept",))),
    )
    unflushed = block_log.without_flushes(session)
    assert unflushed.log == [_write(0), _write(1)]
    assert [acknowledged.at for acknowledged in unflushed.facts] == [1, 2]


def _session(*log: DiskEntry, told: tuple[AcknowledgedFact, ...] = ()) -> DiskSession:
    return DiskSession("made up", PLAIN, "", list(log), list(told))


def _write(at: int, sectors: int = 8) -> DiskEntry:
    return DiskEntry(at * 4096, bytes([at]) * (SECTOR * sectors))


def test_every_prefix_is_checked() -> None:
    """Each write adds a disk with all writes up to it. A flush adds a disk only if more was acknowledged after it."""
    log = [_write(0), _write(1), FLUSH, _write(2), FLUSH, FLUSH]
    points = find_points(_session(*log), random.Random(0))
    assert [(point.place, len(point.left)) for point in points if point.kind == "all"] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (4, 1),
    ]
    facts = (AcknowledgedFact(5, ("begun", "1")), AcknowledgedFact(6, ("saved", "x", "y")))
    points = find_points(_session(*log, told=facts), random.Random(0))
    assert [point.place for point in points if point.kind == "all"] == [0, 1, 2, 4, 5, 6]


def test_no_disk_is_checked_twice() -> None:
    """Two kinds with equal writes are one disk, unless more was acknowledged between them."""
    points = find_points(_session(_write(0), FLUSH, _write(1), _write(2), _write(3)), random.Random(1))
    seen = [(point.place > 1, tuple((entry.offset, len(entry.data)) for entry in point.left)) for point in points]
    assert len(set(seen)) == len(seen)


def test_prefixes_come_first() -> None:
    """If not all disks are chosen, every prefix is kept, in the order of the log."""
    points = find_points(_session(*(_write(page) for page in range(9))), random.Random(2))
    chosen = choose(points, 12, random.Random(3))
    assert len(chosen) == 12
    assert sum(point.kind == "all" for point in chosen) == 10
    assert [point.place for point in chosen] == sorted(point.place for point in chosen)


@pytest.mark.parametrize("kind", LEFT)
def test_kept_writes_are_whole_sectors(kind: str) -> None:
    """Kept unflushed writes are whole sectors, in order and at their offsets."""
    pending = [_write(0), _write(1, 3), _write(0), _write(5)]
    for seed in range(50):
        left = leave(kind, pending, random.Random(seed))
        index = 0
        for entry in left:
            assert entry.offset % SECTOR == 0
            assert len(entry.data) % SECTOR == 0
            while pending[index].data[:1] != entry.data[:1] or not 0 <= entry.offset - pending[index].offset < len(
                pending[index].data
            ):
                index += 1
        assert kind != "all" or left == pending
        assert kind != "none" or left == []
        assert kind != "one alone" or len(left) == 1
        assert kind != "one is missing" or len(left) == 3


def test_the_superblock_is_not_torn() -> None:
    """ext4's superblock is one unit, all else is cut in sectors. Together they equal the write."""
    entry = DiskEntry(0, bytes(range(256)) * 16)
    units = list(block_log.cut_in_units(entry, SECTOR))
    lengths = [(0, 512), (512, 512), (1024, 1024), *((offset, 512) for offset in range(2048, 4096, 512))]
    assert [(unit.offset, len(unit.data)) for unit in units] == lengths
    assert b"".join(unit.data for unit in units) == entry.data
    blocks = list(block_log.cut_in_units(DiskEntry(3 * SECTOR, bytes(9000)), 4096))
    assert [(unit.offset, len(unit.data)) for unit in blocks] == [(1536, 2560), (4096, 4096), (8192, 2344)]


def test_a_disk_has_what_was_flushed_and_what_is_left(tmp_path: Path) -> None:
    """The disk has all writes before the last flush, and only the kept ones after it."""
    empty = tmp_path / "empty"
    empty.write_bytes(bytes(1 << 16))
    session = DiskSession("made up", PLAIN, str(empty), [_write(0), FLUSH, _write(1), _write(0, 2), _write(3)], [])
    points = [point for point in find_points(session, random.Random(0)) if point.kind in ("all", "none", "one alone")]
    for point, path in block_log.disks(session, points, str(tmp_path)):
        expected = bytearray(1 << 16)
        for entry in [*(session.log[:1] if point.place > 1 else []), *point.left]:
            expected[entry.offset : entry.offset + len(entry.data)] = entry.data
        assert Path(path).read_bytes() == expected


def test_the_log_is_read_unchanged(tmp_path: Path) -> None:
    """The log has writes with offset and bytes, and flushes between them."""
    path = tmp_path / "log"
    path.write_bytes(
        fuse_file._ENTRY.pack(4096, 3)
        + b"abc"
        + fuse_file._ENTRY.pack(fuse_file._FLUSHED, 0)
        + fuse_file._ENTRY.pack(0, 1)
        + b"x"
    )
    assert fuse_file.read_log(str(path)) == [DiskEntry(4096, b"abc"), FLUSH, DiskEntry(0, b"x")]
    assert [entry.is_flush for entry in fuse_file.read_log(str(path))] == [False, True, False]


def test_a_copy_has_the_holes_and_the_bytes(tmp_path: Path) -> None:
    """The copy of an image has equal bytes, and uses no more space than what was written to it."""
    source, target = tmp_path / "source", tmp_path / "target"
    with source.open("wb") as file:
        file.truncate(8 << 20)
        for offset in (0, 3 << 20, (8 << 20) - 5):
            file.seek(offset)
            file.write(b"bytes")
        file.seek(5 << 20)
        file.write(bytes(1 << 20))
    copy_image(str(source), str(target), zeros=True)
    assert target.read_bytes() == source.read_bytes()
    assert target.stat().st_blocks * 512 < 1 << 20


def _lived(root: Path, count: int) -> tuple[LocalStore, list[Fact]]:
    store = LocalStore(root)
    facts: list[Fact] = []
    for fact in acknowledged.live_on(store, 9):
        facts.append(fact)
        if len(facts) >= count:
            break
    return store, facts


def test_a_run_that_was_not_cut_keeps_everything(tmp_path: Path) -> None:
    """An undisturbed store has nothing wrong, and the facts that a check returns hold at the next check."""
    store, facts = _lived(tmp_path / "store", 60)
    assert {fact[0] for fact in facts} >= {"begun", "saved", "retired", "tagged", "recalled"}
    for turn in range(3):
        wrong, facts = acknowledged.check(store, facts, turn)
        assert wrong == []
    assert {fact[0] for fact in facts} >= {"begun", "saved", "retired", "tagged"}


@pytest.mark.parametrize(
    ("fact", "problem_text"),
    [
        (("saved", "aaaaaaaaaa", "digest"), "was acknowledged and is gone"),
        (("tagged", "lead", "aaaaaaaaaa"), "tag lead was acknowledged and is gone"),
        (("begun", "77"), "attempt 77 was begun and its FENCE is gone"),
        (("begun", "1"), "two attempts of one number"),
    ],
)
def test_a_missing_acknowledged_fact_is_reported(tmp_path: Path, fact: Fact, problem_text: str) -> None:
    """Each kind of acknowledgement that the store does not fulfil is reported."""
    store, facts = _lived(tmp_path / "store", 12)
    wrong, _ = acknowledged.check(store, [*facts, fact], 0)
    assert any(problem_text in problem for problem in wrong), wrong


@pytest.mark.parametrize(
    ("last", "problem_text"), [("recalling", ""), ("recalled", "aaaaaaaaaa (digest) was acknowledged and is gone")]
)
def test_a_retirement_that_was_taken_back_does_not_count(tmp_path: Path, last: str, problem_text: str) -> None:
    """A recalled checkpoint must be live. If the recall was not acknowledged, it may be live or not."""
    store, facts = _lived(tmp_path / "store", 12)
    saved, gone = [fact[1] for fact in facts if fact[0] == "saved"], "aaaaaaaaaa"
    more = [
        ("saved", gone, "digest"),
        ("retiring", gone, saved[-1]),
        ("retired", gone, saved[-1]),
        (last, gone, saved[-1]),
    ]
    wrong, _ = acknowledged.check(store, [*facts, *more], 0)
    assert problem_text in wrong[0] if problem_text else wrong == []


def test_a_save_of_two_ranks_is_one_state(tmp_path: Path) -> None:
    """A checkpoint of two ranks is acknowledged once, as soon as one of them has it, and has the digests of both."""
    store = LocalStore(tmp_path / "store")
    attempt = acknowledged.Attempt.begin(store, RUN)
    facts = [("begun", str(attempt.epoch)), *acknowledged.save_as_two(attempt, random.Random(1), 3)]
    assert [fact[0] for fact in facts] == ["begun", "saving", "saved"]
    assert facts[1][1].count("+") == 1
    wrong, known = acknowledged.check(store, facts, 0)
    assert wrong == []
    assert facts[2] in known


def test_a_retired_checkpoint_that_is_live_is_reported(tmp_path: Path) -> None:
    """A checkpoint that is live although its retirement was acknowledged is reported."""
    store, facts = _lived(tmp_path / "store", 12)
    saved = [fact[1] for fact in facts if fact[0] == "saved"]
    wrong, _ = acknowledged.check(store, [*facts, ("retired", saved[-1])], 0)
    assert any("was retired and is back" in problem for problem in wrong), wrong


def test_other_bytes_than_those_acknowledged_are_noticed(tmp_path: Path) -> None:
    """A checkpoint that verifies but has other bytes than the save is reported.

    The digest does not use the product's code.
    """
    store, facts = _lived(tmp_path / "store", 12)
    facts = [("saving", "0" * 32) if fact[0] == "saving" else fact for fact in facts]
    wrong, _ = acknowledged.check(
        store, [("saved", fact[1], "0" * 32) if fact[0] == "saved" else fact for fact in facts], 0
    )
    assert any("restores as something else" in problem for problem in wrong), wrong


def test_a_checkpoint_that_no_attempt_saved_is_reported(tmp_path: Path) -> None:
    """A live checkpoint that no attempt intended to save is reported."""
    store, facts = _lived(tmp_path / "store", 12)
    wrong, _ = acknowledged.check(store, [fact for fact in facts if fact[0] not in ("saving", "saved")], 0)
    assert any("restores as something else" in problem for problem in wrong), wrong


def test_victims_live_until_they_are_killed(tmp_path: Path) -> None:
    """The facts that a victim reports before it is killed hold for its store. The next victim continues the run."""
    facts: list[Fact] = []
    with victims() as victim:
        for seed in (1, 2):
            before = len(facts)
            victim.start(str(tmp_path), seed)
            until = time.monotonic() + 60
            while len(facts) < before + 8 and time.monotonic() < until:
                facts += [message.fact for message in victim.receive(until)]
            facts += [message.fact for message in victim.end()]
    assert len(facts) >= 16
    assert not [fact for fact in facts if fact[0] == "died"]
    wrong, _ = acknowledged.check(LocalStore(store_in(str(tmp_path))), facts, 0)
    assert wrong == []
    assert (Path(store_in(str(tmp_path))) / RUN).is_dir()


def test_mutations_are_of_lines_that_are_there() -> None:
    """The lines that can be removed from the victims are in the source."""
    import relight

    for mutation in MUTATIONS.values():
        path = Path(relight.__file__).parent.joinpath(*mutation.module.split(".")[1:]).with_suffix(".py")
        assert mutation.old in path.read_text(encoding="utf-8"), mutation.what
