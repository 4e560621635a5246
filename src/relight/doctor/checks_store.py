"""Checks of a store. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from relight.doctor.facts import DoctorFacts
from relight.doctor.finding import CheckHit, check
from relight.errors import extra_command
from relight.units import count_text, duration_text, rate_text, size_text

_LOW_BYTES = 1 << 30
"""Free bytes that count as low in a store without a checkpoint, where the size of one is unknown."""
_LOW_INODES = 1000
_INODES_A_SAVE = 12
FSYNC_LEAST_S = 20e-6
"""Seconds that every device needs at least to make bytes durable; a system call without effect takes a microsecond."""
_SLOW_S = 2.0
_SOON_S = 86400.0
_OLD_KEY_DAYS = 365.0
_SHARED_WRITE = 0o002


def growth_bps(facts: DoctorFacts) -> float | None:
    """Return the growth, in bytes a second, of the store's runs that have retired nothing; None if it cannot be computed.

    A run counts if it has at least four checkpoints with a time, over more than a minute.
    """
    total = 0.0
    for run in facts.runs:
        times = [checkpoint.time_s for checkpoint in run.checkpoints if checkpoint.time_s is not None]
        if len(times) >= 4 and not run.retired and times[-1] - times[0] > 60:
            total += sum(checkpoint.new_bytes for checkpoint in run.checkpoints[1:]) / (times[-1] - times[0])
    return total or None


@check("store-away", "error", "store", "the store cannot be listed: it is unreachable, or refuses", "store")
def _away(facts: DoctorFacts) -> Iterator[CheckHit]:
    error = facts.store.error
    # An invalid setting prevents opening the store: the check of settings reports it.
    is_setting = error is not None and error.kind == "config" and bool(facts.config.bad)
    if error is not None and error.kind not in ("wrong_key", "not_found") and not is_setting:
        yield CheckHit(
            "the store cannot be listed",
            error.where or facts.store.url,
            error.what,
            "saves and restores fail",
            error.hint or "check the mount, the network and the credentials",
            f"relight ls {quote(facts.store.url)}",
        )


@check("nothing-there", "note", "store", "the path has neither a store nor a run yet", "not_found")
def _absent(facts: DoctorFacts) -> Iterator[CheckHit]:
    if facts.store.absent and facts.store.error is None and facts.store.is_directory:
        yield CheckHit(
            "nothing is saved there yet",
            facts.store.url,
            facts.store.absent,
            "if a run was saved before, this is the wrong path",
            "check the path; a run's first save creates it",
            "relight ls .",
        )


@check(
    "wrong-key",
    "error",
    "store",
    "the store is encrypted and no given key opens it, or it is not and a key was given",
    "wrong_key",
)
def _wrong_key(facts: DoctorFacts) -> Iterator[CheckHit]:
    errors = [facts.store.error, facts.store.record, *(run.error for run in facts.runs)]
    error = next((problem for problem in errors if problem is not None and problem.kind == "wrong_key"), None)
    if error is not None:
        yield CheckHit(
            "the given keys do not fit this store",
            error.where or facts.store.url,
            error.what,
            "saves and restores fail",
            error.hint or "name its key: RELIGHT_KEY=file:PATH",
            f"relight keys status {quote(facts.store.url)}",
        )


@check("not-a-directory", "error", "store", "the store's path is a file")
def _not_a_directory(facts: DoctorFacts) -> Iterator[CheckHit]:
    if not facts.store.is_directory:
        yield CheckHit(
            "the store's path is a file",
            facts.store.url,
            "it is not a directory",
            "every save fails",
            "choose another path, or move the file away",
            f"ls -l {quote(facts.store.url)}",
        )


@check(
    "relight-json",
    "error",
    "store",
    "`relight.json`, which identifies the store, is damaged or missing, and the store has runs",
)
def _record(facts: DoctorFacts) -> Iterator[CheckHit]:
    record = facts.store.record
    if record is not None and record.kind != "wrong_key" and facts.store.runs:
        yield CheckHit(
            "relight.json is damaged or missing",
            record.where or facts.store.url,
            record.what,
            "existing runs can still be read; only their own records show that they belong to this store",
            "restore it from a copy; if it is missing, a run's next attempt creates it again",
            f"relight verify {quote(facts.store.url)} --quick",
        )


@check(
    "unwritable",
    "error",
    "store",
    "a small file cannot be written there: permission is missing, or the file system is read-only",
    "store",
)
def _unwritable(facts: DoctorFacts) -> Iterator[CheckHit]:
    probe = facts.store.probe
    if probe is not None and probe.kind not in ("no_space", "corrupt", "wrong_key", "config"):
        read_only = (facts.store.mount is not None and "ro" in facts.store.mount.options) or "EROFS" in probe.what
        yield CheckHit(
            "the file system is read-only" if read_only else "nothing can be written there",
            probe.where or facts.store.url,
            probe.what,
            "every save fails",
            probe.hint or "check its owner and permissions",
            f"findmnt -T {quote(facts.store.url)}" if read_only else f"ls -ld {quote(facts.store.url)}",
        )


@check("full", "error", "store", "there is no space, quota or inode for even a small file", "no_space")
def _full(facts: DoctorFacts) -> Iterator[CheckHit]:
    probe = facts.store.probe
    if probe is not None and probe.kind == "no_space":
        yield CheckHit(
            "there is no space for even a small file",
            probe.where or facts.store.url,
            probe.what,
            "every save fails",
            "free space: relight prune removes checkpoints that no rule keeps, and gives the reasons",
            f"relight prune {quote(_run_or_store(facts))} --keep-last 3 --dry-run",
        )


@check("bytes-differ", "error", "store", "a read returns other bytes than were written", "corrupt")
def _bytes_differ(facts: DoctorFacts) -> Iterator[CheckHit]:
    probe = facts.store.probe
    if probe is not None and probe.kind == "corrupt":
        yield CheckHit(
            "the store returns other bytes than were written",
            probe.where or facts.store.url,
            probe.what,
            "new checkpoints are damaged from the beginning",
            "do not train on this machine: check disk, memory and controller",
            f"relight verify {quote(facts.store.url)}",
        )


@check("space", "error", "store", "the next checkpoint does not fit", "no_space")
def _space(facts: DoctorFacts) -> Iterator[CheckHit]:
    free, need = facts.store.free_bytes, facts.newest_bytes
    if free is not None and need and free < need:
        yield CheckHit(
            "the next checkpoint does not fit",
            facts.store.url,
            f"{size_text(free)} are free, the newest takes {size_text(need)}",
            "every save fails",
            "free space, or keep fewer checkpoints: keep=relight.keep(last=…)",
            f"relight prune {quote(_run_or_store(facts))} --keep-last 3 --dry-run",
        )


@check(
    "space-low",
    "warning",
    "store",
    "there is space for fewer than two checkpoints, or less than 1 GB without any checkpoint yet",
    "no_space",
)
def _space_low(facts: DoctorFacts) -> Iterator[CheckHit]:
    free, need = facts.store.free_bytes, facts.newest_bytes
    if free is not None and need and need <= free < 2 * need:
        yield CheckHit(
            "there is space for only one more checkpoint",
            facts.store.url,
            f"{size_text(free)} are free, the newest takes {size_text(need)}",
            "a save needs space before retention deletes an older checkpoint",
            "free space, or keep fewer checkpoints: keep=relight.keep(last=…)",
            f"relight prune {quote(_run_or_store(facts))} --keep-last 3 --dry-run",
        )
    elif free is not None and not need and free < _LOW_BYTES and facts.store.error is None:
        yield CheckHit(
            "there is little free space",
            facts.store.url,
            f"{size_text(free)} are free, and the size of a checkpoint is not known yet",
            "a checkpoint of a model with its optimizer takes 12 to 16 bytes a parameter",
            "choose a larger disk, or free space",
            f"df -h {quote(facts.store.url)}",
        )


@check(
    "space-soon",
    "warning",
    "store",
    "at the present rate of saves, and without any retention, the store is full within a day",
)
def _space_soon(facts: DoctorFacts) -> Iterator[CheckHit]:
    free, rate = facts.store.free_bytes, growth_bps(facts)
    if free is not None and rate and facts.newest_bytes <= free and free / rate < _SOON_S:
        yield CheckHit(
            f"the store is full in {duration_text(free / rate)}",
            facts.store.url,
            f"runs grow by {size_text(rate * 3600)} an hour, {size_text(free)} are free",
            "saves fail from then on",
            "set what to keep: keep=relight.keep(last=…, budget=…)",
            f"relight prune {quote(_run_or_store(facts))} --keep-last 3 --dry-run",
        )


@check(
    "retention",
    "warning",
    "store",
    "a run has never retired a checkpoint, and its checkpoints take more than half of the disk",
)
def _retention(facts: DoctorFacts) -> Iterator[CheckHit]:
    for run in facts.runs:
        taken = sum(checkpoint.new_bytes for checkpoint in run.checkpoints)
        size = facts.store.size_bytes
        if len(run.checkpoints) >= 5 and not run.retired and size and taken > size / 2:
            yield CheckHit(
                "the run never deletes a checkpoint",
                run.path,
                f"{len(run.checkpoints)} checkpoints take {size_text(taken)} of {size_text(size)}",
                "the disk fills up, and saves fail",
                "set what to keep: keep=relight.keep(last=…)",
                f"relight prune {quote(run.path)} --keep-last 3 --dry-run",
            )


@check("inodes", "warning", "store", "the file system has few inodes left")
def _inodes(facts: DoctorFacts) -> Iterator[CheckHit]:
    free = facts.store.free_inodes
    if free is not None and free < _LOW_INODES:
        yield CheckHit(
            "the file system has few inodes left",
            facts.store.url,
            f"{free} are free: enough for about {max(0, free // _INODES_A_SAVE)} checkpoints",
            "files cannot be created although there is free space",
            "remove small files there, or create the file system with more inodes",
            f"df -i {quote(facts.store.url)}",
        )


@check("in-memory", "warning", "store", "the store is in memory (tmpfs), and a restart of the machine destroys it")
def _in_memory(facts: DoctorFacts) -> Iterator[CheckHit]:
    mount = facts.store.mount
    if mount is not None and mount.is_memory and facts.store.there:
        yield CheckHit(
            "the store is in memory",
            facts.store.url,
            f"{mount.point} is {mount.type}",
            "a restart of the machine destroys it, and it uses memory that training needs",
            "choose a disk; Relight already keeps snapshots in memory",
            f"findmnt -T {quote(facts.store.url)}",
        )


@check(
    "barriers",
    "error",
    "store",
    "the file system is mounted so that a flush does not reach the disk (`nobarrier`, `barrier=0`, overlay's `volatile`)",
)
def _barriers(facts: DoctorFacts) -> Iterator[CheckHit]:
    mount = facts.store.mount
    if mount is None:
        return
    bad = sorted(
        mount.options & {"nobarrier", "barrier=0"}
        | (mount.options & {"volatile"} if mount.type == "overlay" else set())
    )
    if bad:
        yield CheckHit(
            "the file system reports bytes as durable before they are",
            mount.point,
            f"{mount.type} is mounted with {', '.join(bad)}",
            "a power cut destroys checkpoints that were reported as saved, or the whole file system",
            "mount it without these options",
            f"findmnt -T {quote(facts.store.url)}",
        )


@check(
    "fsync",
    "error",
    "store",
    "fsync on a disk returns faster than any disk can flush (in less than 20 µs): it does nothing",
)
def _fsync(facts: DoctorFacts) -> Iterator[CheckHit]:
    mount, took = facts.store.mount, facts.store.fsync_s
    backed = mount is not None and mount.source.startswith("/dev/")
    if took is not None and backed and took < FSYNC_LEAST_S:
        yield CheckHit(
            "fsync does nothing here",
            facts.store.url,
            f"4 KiB were durable after {duration_text(took)}; no device is that fast",
            "a power cut destroys checkpoints that were reported as saved",
            "check for a preloaded library, and for a disk that ignores flushes",
            f"findmnt -T {quote(facts.store.url)}",
        )


@check(
    "hard-links",
    "error",
    "store",
    "a name can be created twice on this file system, or not at all: commits need `link`",
)
def _links(facts: DoctorFacts) -> Iterator[CheckHit]:
    if facts.store.kind in ("disk", "stripe") and facts.store.exclusive is False:
        yield CheckHit(
            "a name can be created twice",
            facts.store.url,
            "two creations of one name both succeeded",
            "if two processes commit at once, each would believe that it alone did",
            "choose another file system",
            f"findmnt -T {quote(facts.store.url)}",
        )


@check(
    "conditional-writes",
    "error",
    "store",
    'the object store ignores "create if absent"',
    "This server ignores 'create if absent'",
)
def _conditional(facts: DoctorFacts) -> Iterator[CheckHit]:
    if facts.store.kind == "object" and facts.store.exclusive is False:
        promised = facts.config.single_writer
        yield CheckHit(
            "this server ignores 'create if absent'",
            facts.store.url,
            "a name was created twice"
            + ("; RELIGHT_SINGLE_WRITER asserts that at most one process writes" if promised else ""),
            "if two processes commit at once, each would believe that it alone did"
            + ("" if promised else "; Relight refuses to save there"),
            "upgrade the server, or choose another; or assert that at most one process ever writes there",
            "" if promised else "export RELIGHT_SINGLE_WRITER=1",
        )


@check(
    "mirror-degraded",
    "error",
    "store",
    "a drive of a mirrored store failed, or is not whole: what is saved has one copy",
)
def _mirror(facts: DoctorFacts) -> Iterator[CheckHit]:
    for drive in facts.store.drives:
        if drive.status != "good":
            since = f"since {drive.since}: " if drive.since else ""
            run = facts.runs[0].path if facts.runs else f"{facts.store.url}/RUN"
            yield CheckHit(
                "a drive of the mirrored store is set away"
                if drive.status == "away"
                else "a drive of the mirrored store is not whole",
                drive.path,
                f"{since}{drive.why}",
                "if the other drive fails as well, checkpoints are lost",
                f"mount the drive and rebuild it; if it is a new drive, add --new-drive {quote(drive.path)}",
                f"relight verify {quote(run)} --repair",
            )


@check("bucket-mount", "warning", "store", "the store is an object store that a FUSE mount shows as files")
def _bucket_mount(facts: DoctorFacts) -> Iterator[CheckHit]:
    mount = facts.store.mount
    if mount is not None and mount.is_bucket:
        yield CheckHit(
            "an object store is mounted as files",
            mount.point,
            f"{mount.source} is mounted as {mount.type}",
            "names are not created atomically, and renames copy: commits are slow, and not safe against a second writer",
            "use the bucket's own URL: s3://bucket/runs, gs://…, az://…",
            extra_command("objects"),
        )


@check("nfs-soft", "warning", "store", "NFS is mounted `soft`: calls fail after a timeout instead of waiting")
def _nfs_soft(facts: DoctorFacts) -> Iterator[CheckHit]:
    mount = facts.store.mount
    if mount is not None and mount.type.startswith("nfs") and mount.options & {"soft", "softerr"}:
        yield CheckHit(
            "NFS is mounted soft",
            mount.point,
            f"options: {','.join(sorted(mount.options))[:160]}",
            "calls to a busy server fail: saves fail, and other programs' writes may be lost",
            "mount it hard",
            f"nfsstat -m {quote(mount.point)}",
        )


@check("nfs-old", "warning", "store", "NFS is mounted with version 2 or 3")
def _nfs_old(facts: DoctorFacts) -> Iterator[CheckHit]:
    mount = facts.store.mount
    version = (
        (mount.option("vers") or mount.option("nfsvers") or "")
        if mount is not None and mount.type.startswith("nfs")
        else ""
    )
    if mount is not None and version[:1] in ("2", "3"):
        yield CheckHit(
            "NFS is mounted with an old version",
            mount.point,
            f"vers={version}",
            "if the answer to a creation is lost, Relight cannot determine which writer created the name; 4.0, 4.1 and 4.2 are tested",
            "mount it with vers=4.2",
            f"nfsstat -m {quote(mount.point)}",
        )


@check(
    "nfs-nocto", "error", "store", "NFS is mounted `nocto`, so that one machine does not see what another has written"
)
def _nfs_nocto(facts: DoctorFacts) -> Iterator[CheckHit]:
    mount = facts.store.mount
    if mount is not None and mount.type.startswith("nfs") and "nocto" in mount.options:
        yield CheckHit(
            "NFS is mounted without close-to-open consistency",
            mount.point,
            "nocto",
            "a machine may not see what another machine has committed: a run could start from scratch",
            "mount it without nocto",
            f"nfsstat -m {quote(mount.point)}",
        )


@check("clock-store", "warning", "store", "the store's clock and this machine's differ by more than 5 minutes")
def _clock_store(facts: DoctorFacts) -> Iterator[CheckHit]:
    skew = facts.store.skew_s
    if skew is not None and abs(skew) > 300:
        yield CheckHit(
            "the store's clock differs from this machine's",
            facts.store.url,
            f"the time of a newly written file is {duration_text(abs(skew))} {'ahead' if skew > 0 else 'in the past'}",
            "object stores refuse requests with a signature time that is 15 minutes off; displayed ages are wrong",
            "synchronize both with NTP",
            "chronyc tracking",
        )


@check("far", "warning", "store", "a small read takes more than 2 s")
def _far(facts: DoctorFacts) -> Iterator[CheckHit]:
    took = facts.store.answer_s
    if took is not None and took > _SLOW_S:
        yield CheckHit(
            "the store answers slowly",
            facts.store.url,
            f"a small read takes {duration_text(took)}",
            "listing a run takes one read for each record, and a commit takes several",
            "choose a nearer region, or a nearer tier: relight.Tiers(hot=…, cold=…)",
            f"relight ls {quote(facts.store.url)}",
        )


@check("slow-writes", "warning", "store", "writing a checkpoint takes longer than the interval between saves")
def _slow(facts: DoctorFacts) -> Iterator[CheckHit]:
    rate = facts.store.write_bps
    for run in facts.runs:
        newest, between = run.newest, run.interval_s
        if rate and newest is not None and between and newest.new_bytes / rate > between:
            yield CheckHit(
                "saves are due faster than they can be written",
                run.path,
                f"the newest takes {duration_text(newest.new_bytes / rate)} at {rate_text(rate)}, "
                f"and a save is due every {duration_text(between)}",
                "saves are postponed, and each failure loses more steps",
                "save less often, or on a faster disk",
                f"relight bench {quote(facts.store.url)}",
            )


@check("direct", "note", "store", "direct I/O, which bypasses the page cache, does not work")
def _direct(facts: DoctorFacts) -> Iterator[CheckHit]:
    mount = facts.store.mount
    if facts.store.direct is False and not (mount is not None and mount.is_memory):
        yield CheckHit(
            "direct I/O does not work there",
            facts.store.url,
            f"O_DIRECT is refused by {mount.type if mount is not None else 'the file system'}",
            "saves and restores evict other programs' data from the page cache",
            "no action is needed; XFS and ext4 support it",
            f"relight bench {quote(facts.store.url)}",
        )


@check("shared-write", "warning", "store", "every user of this machine may write to the store")
def _shared_write(facts: DoctorFacts) -> Iterator[CheckHit]:
    mode = facts.store.mode
    if mode is not None and mode & _SHARED_WRITE and not mode & 0o1000:
        yield CheckHit(
            "every user may write to the store",
            facts.store.url,
            f"its mode is {mode & 0o7777:04o}",
            "every user can delete or replace checkpoints",
            "remove the permission of other users",
            f"chmod o-w {quote(facts.store.url)}",
        )


@check("keys-old", "note", "store", "a key that opens the store has been in use for more than a year")
def _keys_old(facts: DoctorFacts) -> Iterator[CheckHit]:
    for key in facts.store.keys:
        if key.age_days > _OLD_KEY_DAYS:
            yield CheckHit(
                "a key has been in use for more than a year",
                facts.store.url,
                f"{key.label}: {count_text(key.age_days, 'day')}",
                "the longer a key is in use, the more places have a copy of it",
                "rotate it; nothing needs to be encrypted again",
                f"relight keys status {quote(facts.store.url)} --max-age 365",
            )


@check("keys-one", "note", "store", "only one key opens the encrypted store")
def _keys_one(facts: DoctorFacts) -> Iterator[CheckHit]:
    if facts.store.encrypted and len(facts.store.keys) == 1:
        yield CheckHit(
            "only one key opens this store",
            facts.store.url,
            f"the key is {facts.store.keys[0].label}",
            "if it is lost, every checkpoint is lost",
            "add another key, and keep it elsewhere",
            f"relight keys add {quote(facts.store.url)} file:NEW",
        )


@check("bench-leftovers", "note", "store", "the store has directories of a killed `relight bench`")
def _bench(facts: DoctorFacts) -> Iterator[CheckHit]:
    left = facts.store.leftovers
    if left:
        yield CheckHit(
            f"a killed relight bench has left {len(left)} director{'ies' if len(left) > 1 else 'y'}",
            facts.store.url,
            ", ".join(left[:4]),
            "they use space",
            "remove them, unless relight bench is running",
            f"rm -r {quote(facts.store.url)}/{quote(left[0])}",
        )


def _run_or_store(facts: DoctorFacts) -> str:
    return (
        max(facts.runs, key=lambda run: sum(checkpoint.new_bytes for checkpoint in run.checkpoints)).path
        if facts.runs
        else facts.store.url
    )
