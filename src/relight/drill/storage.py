"""Rehearsals of what can happen to a store: it is full, it is away, what lies in it is damaged."""

from __future__ import annotations

import contextlib
import errno
import re
import resource
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from relight.drill.rehearsals import Rehearsal, RehearsalResult, RehearsalStage, ended, steps_again
from relight.drill.stage import CannotTry, DrillJob, Wrong
from relight.format.names import STORE_FILE
from relight.log import Checkpoint

FULL_S, AWAY_S = 4.0, 4.0
"""How long a store is full, and how long it is away, at the least: some saves are due meanwhile."""
_SMALL_BYTES = 64 << 20
_FAILED = re.compile(r"the save at step (\d+) failed")
OWN_MOUNTS = ("unshare", "--user", "--map-root-user", "--mount")


def full(stage: RehearsalStage, rehearsal: Rehearsal) -> RehearsalResult:
    """No room for saves, for some seconds."""
    with _without_room(stage) as (job, means, fill, empty):
        job.ready()
        step = job.step()
        fill()
        broken = time.monotonic()
        said = _goes_on_without(job, step, FULL_S)
        empty()
        freed = time.monotonic()
        saved = job.saves_again(job.durable(), "save behind the time without room")
        and_then = ended(stage, job, incidents=0)
        why = f"training went on{said}; {saved - freed:.1f} s after there was room again a save was stored{and_then}"
        return RehearsalResult(why, steps_lost=0, means=f"{means}, for {freed - broken:.1f} s")


def away(stage: RehearsalStage, rehearsal: Rehearsal) -> RehearsalResult:
    """The store's directory is moved elsewhere, and back some seconds later."""
    with stage.job() as job:
        job.start()
        job.ready()
        step, elsewhere = job.step(), stage.store.with_name(f"{stage.store.name}.away")
        stage.store.rename(elsewhere)
        broken = time.monotonic()
        try:
            said = _goes_on_without(job, step, AWAY_S)
            told = job.durable()
        finally:
            meanwhile = move_back(elsewhere, stage.store)
        back = time.monotonic()
        if any(path.name == STORE_FILE for one in meanwhile for path in one.rglob("*")):
            raise Wrong("while its store was away, another was begun in its place")
        if told > job.checkpoints()[-1].step:
            raise Wrong(f"while its store was away, step {told} was said to be stored, and is not")
        saved = job.saves_again(job.durable(), "save behind the store's return")
        left = sum(map(_bytes_in, meanwhile))
        and_then = ended(stage, job, incidents=0)
        why = f"training went on{said}; {saved - back:.1f} s after the store was back a save was stored{and_then}"
        if left:
            why += f"; saves that failed had left {left / 1e6:.1f} MB where it had been"
        return RehearsalResult(why, steps_lost=0, means=f"its directory was moved away for {back - broken:.1f} s")


def move_back(elsewhere: Path, store: Path) -> list[Path]:
    """Where it was, whatever is there now: that is moved aside, and given."""
    aside: list[Path] = []
    while True:
        with contextlib.suppress(FileNotFoundError):
            there = store.with_name(f"{store.name}.meanwhile-{len(aside)}")
            store.rename(there)
            aside.append(there)
        try:
            elsewhere.rename(store)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # made once more, just now
                raise
        else:
            return aside


def damage(stage: RehearsalStage, rehearsal: Rehearsal) -> RehearsalResult:
    """All of the job is killed, with what it has in memory; one byte of its newest checkpoint is another; it is started again."""
    with stage.job() as job:
        job.start()
        job.ready()

        def two() -> bool | None:
            if len(job.checkpoints()) >= 2:
                return True
            job.ask_for_a_save()
            return None

        job.wait(two, "second checkpoint (if it keeps but one, there is none to go back to)")
        last, broken = job.step(), time.monotonic()
        job.warden.sweep()
        found = job.checkpoints()
        with spoiled(job, found[-1]) as where:
            bad = job.damage()
            whole = [one for one in found if one.id not in bad]
            if not whole:
                raise Wrong(f"all of its {len(found)} checkpoints need the bytes of the one that is damaged")
            before, again = len(job.said()), time.monotonic()
            job.start()
            beats = steps_again(job)
            restored, back = max(beat.restored for beat in beats.values()), max(beat.first_at for beat in beats.values())
            if restored != whole[-1].step:
                raise Wrong(f"step {whole[-1].step} is the newest whole checkpoint, and it went on from step {restored}")
            told = f"checkpoint {found[-1].id} (step {found[-1].step}) is passed over" in job.said()[before:]
            if not told and stage.target.built_in:
                raise Wrong(f"the checkpoint of step {found[-1].step} is damaged, and nothing was said of that")
            and_then = ended(stage, job, incidents=0, may_be_damaged=tuple(bad))
        passed = f"step {found[-1].step} was passed over, {'and that was said' if told else 'of which its output says nothing'}"
        why = f"{passed}; started again, it went on from step {restored}, {back - again:.1f} s later{and_then}"
        return RehearsalResult(why, back_s=round(back - broken, 3), steps_lost=last - restored, means=f"a byte of {where}")


@contextlib.contextmanager
def spoiled(job: DrillJob, checkpoint: Checkpoint) -> Iterator[str]:
    """One byte of it is another, such that it matters: of which file. Afterwards it is what it was, if the file is still there."""
    run = job.run()
    folder = Path(run.store.url, run.name, checkpoint.body.dir)
    packs = sorted(folder.glob("*.safetensors"), key=lambda path: -path.stat().st_size)
    places = [(pack, pack.stat().st_size * part // 16) for pack in packs for part in range(8, 16)]  # hardly a header, or padding
    for pack, at in places:
        _flip(pack, at)
        if checkpoint.id in job.damage():
            try:
                yield f"{checkpoint.body.dir}/{pack.name}"
            finally:
                with contextlib.suppress(FileNotFoundError):
                    _flip(pack, at)
            return
        _flip(pack, at)
    raise CannotTry(f"no byte of {folder} was found that matters")


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def _goes_on_without(job: DrillJob, step: int, seconds: float) -> str:
    """Steps are made for so long, whatever saves do: what is said of saves."""
    begun, before = time.monotonic(), len(job.said())

    def look() -> bool | None:
        job.ask_for_a_save()
        return True if time.monotonic() > begun + seconds and job.step() > step else None

    job.wait(look, "step while nothing could be saved")
    failed = len(set(_FAILED.findall(job.said()[before:])))
    return f", and said of {failed} {'save' if failed == 1 else 'saves'} that it failed" if failed else ""


# -- a full disk ---------------------------------------------------------------------------------------------------------------


class NoRoom(NamedTuple):
    """A job whose store can be filled."""

    job: DrillJob
    means: str
    fill: Callable[[], None]
    empty: Callable[[], None]


@contextlib.contextmanager
def _without_room(stage: RehearsalStage) -> Iterator[NoRoom]:
    """On a small file system of its own, in memory, if one may be mounted; else by a limit on the size of the files that it writes."""
    size = _SMALL_BYTES if stage.target.built_in else 3 * _bytes_in(stage.store) + 4 * _SMALL_BYTES
    disk = stage.folder / "disk"
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}"]
    stage.folder.mkdir(parents=True, exist_ok=True)
    if size > _memory_available() // 2:
        reason = f"there is not the memory for a file system of {size >> 20} MiB"
    else:
        reason = cannot([*OWN_MOUNTS, *mount, "none", str(stage.folder)])
    if reason:
        with stage.job() as job:
            job.start()
            means = f"a limit on the size of files, which has another error than a full disk has, as {reason}"
            yield NoRoom(job, means, partial(_limit_files, job), partial(_unlimit_files, job))
        return
    with DrillJob(stage.target, stage.folder, disk / "store", stage.limit, OWN_MOUNTS) as job:
        disk.mkdir()
        job.warden.call([*mount, "none", str(disk)])
        if stage.store.is_dir():
            job.warden.call(["cp", "--archive", str(stage.store), str(job.store)])
        job.start()
        ballast = Path(job.seen(disk / "ballast"))
        yield NoRoom(job, f"a file system of {size >> 20} MiB in memory that was filled", partial(_fill, ballast), ballast.unlink)


def cannot(command: Sequence[str]) -> str:
    """Why that can't be run here; empty if it can."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        return f"there is no {command[0]}"
    except subprocess.TimeoutExpired:
        return f"{command[0]} does not answer"
    said = (done.stderr or done.stdout).strip().splitlines()
    return (said[-1] if said else f"{command[0]} ended with {done.returncode}") if done.returncode else ""


def _fill(ballast: Path) -> None:
    """To the last page."""
    with ballast.open("ab", buffering=0) as file:
        for piece in (bytes(1 << 20), bytes(1 << 12)):
            with contextlib.suppress(OSError):
                while True:
                    file.write(piece)


def _limit_files(job: DrillJob) -> None:
    """Half of the newest checkpoint's largest file: what is printed still fits."""
    newest = job.checkpoints()[-1]
    files = Path(job.run().store.url, job.run().name, newest.body.dir).iterdir()
    _set_limit(job, max(path.stat().st_size for path in files) // 2)


def _unlimit_files(job: DrillJob) -> None:
    _set_limit(job, resource.getrlimit(resource.RLIMIT_FSIZE)[0])


def _set_limit(job: DrillJob, size: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    for pid in [*(beat.pid for beat in job.beats().values()), *job.agents()]:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _memory_available() -> int:
    """Bytes that could be taken without anybody being pushed out."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0
