"""Rehearsals of store failures: a full store, an unavailable store, damaged bytes."""

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
from relight.units import duration_text, size_text

FULL_S, AWAY_S = 4.0, 4.0
"""Least seconds for which the store is full, or unavailable: several saves are due meanwhile."""
_SMALL_BYTES = 64 << 20
_FAILED = re.compile(r"the save at step (\d+) failed")
OWN_MOUNTS = ("unshare", "--user", "--map-root-user", "--mount")


def full(stage: RehearsalStage, rehearsal: Rehearsal) -> RehearsalResult:
    """Fill the store for some seconds."""
    with _without_room(stage) as (job, means, fill, empty):
        job.ready()
        step = job.step()
        fill()
        broken = time.monotonic()
        failures = _continue_without(job, step, FULL_S)
        empty()
        freed = time.monotonic()
        saved = job.saves_again(job.durable(), "save after space was freed")
        and_then = ended(stage, job, incidents=0)
        why = f"training continued{failures}; a save was stored {duration_text(saved - freed)} after space was freed{and_then}"
        return RehearsalResult(why, steps_lost=0, means=f"{means}, for {duration_text(freed - broken)}")


def away(stage: RehearsalStage, rehearsal: Rehearsal) -> RehearsalResult:
    """Move the store's directory away, and back some seconds later."""
    with stage.job() as job:
        job.start()
        job.ready()
        step, elsewhere = job.step(), stage.store.with_name(f"{stage.store.name}.away")
        stage.store.rename(elsewhere)
        broken = time.monotonic()
        try:
            failures = _continue_without(job, step, AWAY_S)
            stored_step = job.durable()
        finally:
            meanwhile = move_back(elsewhere, stage.store)
        back = time.monotonic()
        if any(path.name == STORE_FILE for folder in meanwhile for path in folder.rglob("*")):
            raise Wrong("while its store was unavailable, the job created another store in its place")
        if stored_step > job.checkpoints()[-1].step:
            raise Wrong(
                f"while its store was unavailable, the job reported step {stored_step} as stored, and it is not"
            )
        saved = job.saves_again(job.durable(), "save after the store's return")
        left = sum(map(_bytes_in, meanwhile))
        and_then = ended(stage, job, incidents=0)
        why = f"training continued{failures}; a save was stored {duration_text(saved - back)} after the store was back{and_then}"
        if left:
            why += f"; failed saves had left {size_text(left)} at the store's path"
        return RehearsalResult(
            why, steps_lost=0, means=f"its directory was moved away for {duration_text(back - broken)}"
        )


def move_back(elsewhere: Path, store: Path) -> list[Path]:
    """Move the store back. Move what was created in its place meanwhile aside, and return that."""
    aside: list[Path] = []
    while True:
        with contextlib.suppress(FileNotFoundError):
            replaced = store.with_name(f"{store.name}.meanwhile-{len(aside)}")
            store.rename(replaced)
            aside.append(replaced)
        try:
            elsewhere.rename(store)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # a save has just created it again
                raise
        else:
            return aside


def damage(stage: RehearsalStage, rehearsal: Rehearsal) -> RehearsalResult:
    """Kill the whole job, change one byte of its newest checkpoint, and start the job again."""
    with stage.job() as job:
        job.start()
        job.ready()

        def two() -> bool | None:
            if len(job.checkpoints()) >= 2:
                return True
            job.ask_for_a_save()
            return None

        job.wait(two, "second checkpoint (a job that keeps only one has none to fall back to)")
        last, broken = job.step(), time.monotonic()
        job.warden.sweep()
        checkpoints = job.checkpoints()
        with spoiled(job, checkpoints[-1]) as where:
            bad = job.damage()
            whole = [checkpoint for checkpoint in checkpoints if checkpoint.id not in bad]
            if not whole:
                raise Wrong(f"all of its {len(checkpoints)} checkpoints need bytes of the damaged one")
            before, again = len(job.output()), time.monotonic()
            job.start()
            beats = steps_again(job)
            restored, back = (
                max(beat.restored for beat in beats.values()),
                max(beat.first_at for beat in beats.values()),
            )
            if restored != whole[-1].step:
                raise Wrong(
                    f"step {whole[-1].step} is the newest undamaged checkpoint, and training continued from step {restored}"
                )
            reported = (
                f"checkpoint {checkpoints[-1].id} (step {checkpoints[-1].step}) is skipped" in job.output()[before:]
            )
            if not reported and stage.target.built_in:
                raise Wrong(
                    f"the checkpoint of step {checkpoints[-1].step} is damaged, and the job did not report that"
                )
            and_then = ended(stage, job, incidents=0, may_be_damaged=tuple(bad))
        skipped = f"step {checkpoints[-1].step} was skipped, {'which the job reported' if reported else 'which its output does not report'}"
        why = f"{skipped}; after a restart, training continued from step {restored}, {duration_text(back - again)} later{and_then}"
        return RehearsalResult(
            why, back_s=round(back - broken, 3), steps_lost=last - restored, means=f"a byte of {where}"
        )


@contextlib.contextmanager
def spoiled(job: DrillJob, checkpoint: Checkpoint) -> Iterator[str]:
    """Change one byte of a checkpoint such that it is damaged. Yield the file. Restore the byte afterwards, if the file still exists."""
    run = job.run()
    folder = Path(run.store.url, run.name, checkpoint.body.dir)
    packs = sorted(folder.glob("*.safetensors"), key=lambda path: -path.stat().st_size)
    # unlikely to be a header or padding
    places = [(pack, pack.stat().st_size * part // 16) for pack in packs for part in range(8, 16)]
    for pack, offset in places:
        _flip(pack, offset)
        if checkpoint.id in job.damage():
            try:
                yield f"{checkpoint.body.dir}/{pack.name}"
            finally:
                with contextlib.suppress(FileNotFoundError):
                    _flip(pack, offset)
            return
        _flip(pack, offset)
    raise CannotTry(f"changing a byte of {folder} damages no tensor")


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def _continue_without(job: DrillJob, step: int, seconds: float) -> str:
    """Wait ``seconds``, and until a step after ``step`` is made although saves fail. Return a clause about the failed saves."""
    begun, before = time.monotonic(), len(job.output())

    def has_stepped() -> bool | None:
        job.ask_for_a_save()
        return True if time.monotonic() > begun + seconds and job.step() > step else None

    job.wait(has_stepped, "step while nothing could be saved")
    failed = len(set(_FAILED.findall(job.output()[before:])))
    return f", and reported {failed} failed {'save' if failed == 1 else 'saves'}" if failed else ""


# -- a full disk ---------------------------------------------------------------------------------------------------------------


class NoRoom(NamedTuple):
    """Job with a store that can be filled."""

    job: DrillJob
    means: str
    fill: Callable[[], None]
    empty: Callable[[], None]


@contextlib.contextmanager
def _without_room(stage: RehearsalStage) -> Iterator[NoRoom]:
    """Start the job on a small in-memory file system, if one can be mounted; else with a limit on the size of its files."""
    size = _SMALL_BYTES if stage.target.built_in else 3 * _bytes_in(stage.store) + 4 * _SMALL_BYTES
    disk = stage.folder / "disk"
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}"]
    stage.folder.mkdir(parents=True, exist_ok=True)
    if size > _memory_available() // 2:
        reason = f"memory has no room for a file system of {size_text(size)}"
    else:
        reason = cannot([*OWN_MOUNTS, *mount, "none", str(stage.folder)])
    if reason:
        with stage.job() as job:
            job.start()
            means = f"a limit on the size of files, with another error than that of a full disk, because {reason}"
            yield NoRoom(job, means, partial(_limit_files, job), partial(_unlimit_files, job))
        return
    with DrillJob(stage.target, stage.folder, disk / "store", stage.limit, OWN_MOUNTS) as job:
        disk.mkdir()
        job.warden.call([*mount, "none", str(disk)])
        if stage.store.is_dir():
            job.warden.call(["cp", "--archive", str(stage.store), str(job.store)])
        job.start()
        ballast = Path(job.seen(disk / "ballast"))
        yield NoRoom(job, f"a full file system of {size_text(size)} in memory", partial(_fill, ballast), ballast.unlink)


def cannot(command: Sequence[str]) -> str:
    """Return why a command cannot run here; empty if it can."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False
        )
    except FileNotFoundError:
        return f"there is no {command[0]}"
    except subprocess.TimeoutExpired:
        return f"{command[0]} does not answer"
    lines = (done.stderr or done.stdout).strip().splitlines()
    return (lines[-1] if lines else f"{command[0]} ended with {done.returncode}") if done.returncode else ""


def _fill(ballast: Path) -> None:
    """Fill the file system to the last page."""
    with ballast.open("ab", buffering=0) as file:
        for piece in (bytes(1 << 20), bytes(1 << 12)):
            with contextlib.suppress(OSError):
                while True:
                    file.write(piece)


def _limit_files(job: DrillJob) -> None:
    """Limit files to half of the newest checkpoint's largest file, so that the log of the output still fits."""
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
    """Return the bytes of memory that can be used without swapping or evicting other processes."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0
