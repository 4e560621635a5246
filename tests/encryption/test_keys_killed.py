"""Keys exchanged on a real disk by processes that are killed at any moment.

The old and the new key together open everything, and a repetition completes the exchange.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.encryption.test_key_ring import kek, save, sound

from relight.errors import WrongKey
from relight.keys import Keychain, write_key_file
from relight.store import Disk, LocalStore
from relight.store.encrypted import EncryptedStore
from relight.store.keyring import slots_in
from relight.store.mirror_drives import DriveStatus
from relight.store.mirrored import MirroredStore
from relight.testing.killable_store import Killed
from relight.testing.store_suite import refuses
from relight.transfer.keys import rekey

TRIALS = int(os.environ.get("KEY_KILLS", "30"))
WORKER = """
import os, signal, sys, time
from relight.keys import Keychain, resolve
from relight.store import Disk, LocalStore
from relight.transfer.keys import rekey, rotate
old, new, what = sys.argv[1:4]
def work(where):
    inner = LocalStore(where)
    if what == "rotate":
        rotate(inner, Keychain.from_specs([old, new]), resolve(old).kek, resolve(new), "new")
    else:
        rekey(inner, Keychain.from_specs([old, new]), leaked="*", keep=Keychain.from_specs(new))
print("ready", flush=True)
for line in sys.stdin:  # forks need not repeat the imports
    after_s, where = line.rstrip("\\n").split(" ", 1)
    child, began = os.fork(), time.perf_counter()
    if not child:
        work(where)
        os._exit(0)
    if float(after_s) >= 0:
        time.sleep(float(after_s))
        os.kill(child, signal.SIGKILL)  # a process that has ended is a zombie until waitpid
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, time.perf_counter() - began, flush=True)
"""


class Workers:
    """A server that forks a process for each store that it receives."""

    def __init__(self, old: str, new: str, what: str) -> None:
        command = [sys.executable, "-c", WORKER, old, new, what]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.next_line() == "ready"

    def next_line(self) -> str:
        """Return the next line of output."""
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def work(self, where: Path, killed_after: float = -1.0) -> tuple[float, int]:
        """Return how long the worker lived, and its exit code. ``killed_after`` below 0: it is not killed."""
        assert self.process.stdin
        self.process.stdin.write(f"{killed_after} {where}\n")
        self.process.stdin.flush()
        code, lived = self.next_line().split()
        return float(lived), int(code)

    def end(self) -> None:
        """End the server."""
        self.process.communicate()


@pytest.mark.parametrize("what", ["rotate", "rekey"])
def test_killed_at_any_moment(tmp_path: Path, what: str) -> None:
    """``KEY_KILLS=1000`` for a long run."""
    for name in ("old", "new"):
        write_key_file(str(tmp_path / name))
    old, new = (f"file:{tmp_path / name}" for name in ("old", "new"))
    for step in (1, 2):
        save(EncryptedStore(LocalStore(tmp_path / "whole"), Keychain.from_specs(old)), step)
    workers, rng, killed = Workers(old, new, what), random.Random(7), 0
    try:
        took = 0.0
        for name in ("first", "second"):  # the first one meets cold caches
            shutil.copytree(tmp_path / "whole", tmp_path / name)
            took, code = workers.work(tmp_path / name)
            assert code == 0
        for trial in range(TRIALS):
            where = tmp_path / f"{trial}"
            shutil.copytree(tmp_path / "whole", where)
            _, code = workers.work(where, rng.uniform(0, 1.1 * took))
            assert code in (0, -signal.SIGKILL)
            killed += code != 0
            inner = LocalStore(where)
            assert sound(inner, old, new) == 2, trial
            if code and (what == "rekey" or kek(old) in {slot.kek for slot in slots_in(inner)}):
                assert workers.work(where)[1] == 0, trial
            assert sound(inner, new) == 2, trial
            refuses(WrongKey, lambda inner=inner: sound(inner, old))  # type: ignore[misc]
            assert not list(where.rglob(".rekey-*")), trial
            shutil.rmtree(where)
    finally:
        workers.end()
    assert killed >= TRIALS // 3, killed


class FailingDisk(Disk):
    """Raises ``failure`` in place of a rename, after ``renames`` of them. Only renames to paths with ``part`` in them count."""

    def __init__(self, renames: int, failure: type[BaseException] | BaseException = Killed, part: str = "") -> None:
        self.renames, self.failure, self.part = renames, failure, part

    def replace(self, source: str, target: str) -> None:
        """See ``Disk``."""
        if self.part in target:
            if not self.renames:
                raise self.failure
            self.renames -= 1
        super().replace(source, target)


@pytest.mark.parametrize("faster", [0, 1])
def test_a_mirrored_store_is_completed_on_both_drives(tmp_path: Path, faster: int) -> None:
    """If a process dies between the renames on two drives, a repetition leaves no copy under the old ring key, whichever drive is read."""
    for name in ("old", "new"):
        write_key_file(str(tmp_path / name))
    old, new = (f"file:{tmp_path / name}" for name in ("old", "new"))

    def drives(where: Path) -> list[Path]:
        return [where / "n0", where / "n1"]

    save(EncryptedStore(MirroredStore(drives(tmp_path / "whole")), Keychain.from_specs(old)), 1)
    both, kept = Keychain.from_specs([old, new]), Keychain.from_specs(new)
    for renames in range(1, 100, 2):
        where = tmp_path / f"{renames}"
        shutil.copytree(tmp_path / "whole", where)
        dying = MirroredStore(drives(where), disk=FailingDisk(renames), threads=False)
        try:
            rekey(dying, both, leaked=kek(old), keep=kept)
        except Killed:
            pass
        else:
            break
        store = MirroredStore(drives(where))
        store.drive(faster).rate_bps *= 1000
        report = rekey(store, both, leaked=kek(old), keep=kept)
        assert not report.damaged and report.files > 0 and report.left == 0
        assert [drive.status for drive in store.statuses()] == ["good", "good"]
        assert sound(store, new) == 1
        refuses(WrongKey, lambda store=store: sound(store, old))  # type: ignore[misc]
        ring = {bytes.fromhex(slot.ring) for slot in slots_in(store)}
        assert len(ring) == 1
        for drive in drives(where):
            copy = EncryptedStore(LocalStore(drive), kept)
            keys = [path.relative_to(drive).as_posix() for path in (drive / "run").rglob("*") if path.is_file()]
            assert {copy.ring_of(key) for key in keys if copy.stored_size_of(key)} == ring
    assert renames > 10


def test_a_drive_fails_meanwhile(tmp_path: Path) -> None:
    """A drive that refuses writes halfway, like a file system that the kernel made read-only, is left out.

    It can be read, and its old files are no files of another process.
    """
    for name in ("old", "new"):
        write_key_file(str(tmp_path / name))
    old, new = (f"file:{tmp_path / name}" for name in ("old", "new"))
    drives = [tmp_path / "n0", tmp_path / "n1"]
    save(EncryptedStore(MirroredStore(drives), Keychain.from_specs(old)), 1)
    store = MirroredStore(drives, disk=FailingDisk(3, OSError(errno.EROFS, "read-only"), "/n1/"))
    report = rekey(store, Keychain.from_specs([old, new]), leaked=kek(old), keep=Keychain.from_specs(new))
    assert [drive.status for drive in store.statuses()] == ["good", "away"]
    assert report.left == 0 and not report.damaged
    assert sound(store, new) == 1
    refuses(WrongKey, lambda: sound(store, old))


def test_the_drives_are_read_once_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of a mirrored store's drives is not read again for each file."""
    write_key_file(str(tmp_path / "key"))
    keychain = Keychain.from_specs(f"file:{tmp_path / 'key'}")
    store = MirroredStore([tmp_path / "n0", tmp_path / "n1"])
    save(EncryptedStore(store, keychain), 1)
    plain, calls = MirroredStore.statuses, []

    def statuses(self: MirroredStore) -> list[DriveStatus]:
        calls.append(1)
        return plain(self)

    monkeypatch.setattr(MirroredStore, "statuses", statuses)
    report = rekey(store, keychain, leaked="*")
    assert report.files > 5 and len(calls) == 3
    assert sound(store, f"file:{tmp_path / 'key'}") == 1
