"""What can be wrong with a store. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from relight.doctor.facts import DoctorFacts
from relight.doctor.finding import CheckHit, check, gb, span

_LOW_BYTES = 1 << 30
"""Of a store without a checkpoint, whose size is a guess."""
_LOW_INODES = 1000
_INODES_A_SAVE = 12
FSYNC_LEAST_S = 20e-6
"""No device makes bytes durable sooner: a system call that does nothing takes a microsecond."""
_SLOW_S = 2.0
_SOON_S = 86400.0
_OLD_KEY_DAYS = 365.0
_SHARED_WRITE = 0o002


def growth_bps(facts: DoctorFacts) -> float | None:
    """Bytes a second by which the store's runs grow where nothing is ever retired; None if that cannot be told."""
    total = 0.0
    for run in facts.runs:
        times = [checkpoint.time_s for checkpoint in run.checkpoints if checkpoint.time_s is not None]
        if len(times) >= 4 and not run.retired and times[-1] - times[0] > 60:
            total += sum(checkpoint.new_bytes for checkpoint in run.checkpoints[1:]) / (times[-1] - times[0])
    return total or None


@check("store-away", "error", "store", "the store cannot be listed: it is away, or refuses", "store")
def _away(facts: DoctorFacts) -> Iterator[CheckHit]:
    error = facts.store.error
    said_before = error is not None and error.kind == "config" and bool(facts.config.bad)  # which is why it cannot be opened
    if error is not None and error.kind not in ("wrong_key", "not_found") and not said_before:
        yield CheckHit(
            "the store does not answer as it should",
            error.where or facts.store.url,
            error.what,
            "nothing is saved, and nothing restored",
            error.hint or "look at the mount, the network and the credentials",
            f"relight ls {quote(facts.store.url)}",
        )


@check("nothing-there", "note", "store", "there is neither a store nor a run at that path yet", "not_found")
def _absent(facts: DoctorFacts) -> Iterator[CheckHit]:
    if facts.store.absent and facts.store.error is None and facts.store.is_directory:
        yield CheckHit(
            "nothing was saved there yet",
            facts.store.url,
            facts.store.absent,
            "if something was, the path is another",
            "check the path; a run's first save makes it",
            "relight ls .",
        )


@check("wrong-key", "error", "store", "the store is encrypted and no key at hand opens it, or it is not and a key was given", "wrong_key")
def _wrong_key(facts: DoctorFacts) -> Iterator[CheckHit]:
    errors = [facts.store.error, facts.store.record, *(run.error for run in facts.runs)]
    error = next((problem for problem in errors if problem is not None and problem.kind == "wrong_key"), None)
    if error is not None:
        yield CheckHit(
            "the keys at hand do not fit this store",
            error.where or facts.store.url,
            error.what,
            "nothing is saved, and nothing restored",
            error.hint or "say where its key is: RELIGHT_KEY=file:PATH",
            f"relight keys status {quote(facts.store.url)}",
        )


@check("not-a-directory", "error", "store", "there is a file where the store should be")
def _not_a_directory(facts: DoctorFacts) -> Iterator[CheckHit]:
    if not facts.store.is_directory:
        yield CheckHit(
            "there is a file where the store should be",
            facts.store.url,
            "it is no directory",
            "nothing can be saved there",
            "choose another place, or move the file away",
            f"ls -l {quote(facts.store.url)}",
        )


@check("relight-json", "error", "store", "`relight.json`, which says which store it is, is damaged or gone while there are runs")
def _record(facts: DoctorFacts) -> Iterator[CheckHit]:
    record = facts.store.record
    if record is not None and record.kind != "wrong_key" and facts.store.runs:
        yield CheckHit(
            "relight.json is damaged or gone",
            record.where or facts.store.url,
            record.what,
            "runs that are there can be read still; whether they belong here is known from their records alone",
            "restore it from a copy; a run's next attempt makes one that is gone anew",
            f"relight verify {quote(facts.store.url)} --quick",
        )


@check(
    "unwritable",
    "error",
    "store",
    "a small file cannot be written there, for want of permission or as the file system is read-only",
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
            probe.hint or "check who owns it, and its permissions",
            f"findmnt -T {quote(facts.store.url)}" if read_only else f"ls -ld {quote(facts.store.url)}",
        )


@check("full", "error", "store", "there is no room, quota or inode for even a small file", "no_space")
def _full(facts: DoctorFacts) -> Iterator[CheckHit]:
    probe = facts.store.probe
    if probe is not None and probe.kind == "no_space":
        yield CheckHit(
            "there is no room for a single small file",
            probe.where or facts.store.url,
            probe.what,
            "every save fails",
            "make room: relight prune removes what no rule keeps, and says why",
            f"relight prune {quote(_run_or_store(facts))} --keep-last 3 --dry-run",
        )


@check("bytes-differ", "error", "store", "other bytes come back than were written", "corrupt")
def _bytes_differ(facts: DoctorFacts) -> Iterator[CheckHit]:
    probe = facts.store.probe
    if probe is not None and probe.kind == "corrupt":
        yield CheckHit(
            "the store gives back other bytes than were written",
            probe.where or facts.store.url,
            probe.what,
            "what is saved is damaged from the beginning",
            "do not train on this: look at disk, memory and controller",
            f"relight verify {quote(facts.store.url)}",
        )


@check("space", "error", "store", "the next checkpoint does not fit", "no_space")
def _space(facts: DoctorFacts) -> Iterator[CheckHit]:
    free, need = facts.store.free_bytes, facts.newest_bytes
    if free is not None and need and free < need:
        yield CheckHit(
            "the next checkpoint does not fit",
            facts.store.url,
            f"{gb(free)} are free, the newest takes {gb(need)}",
            "every save fails",
            "make room, or keep fewer: keep=relight.keep(last=…)",
            f"relight prune {quote(_run_or_store(facts))} --keep-last 3 --dry-run",
        )


@check(
    "space-low", "warning", "store", "there is room for fewer than two checkpoints, or less than 1 GB where there is none yet", "no_space"
)
def _space_low(facts: DoctorFacts) -> Iterator[CheckHit]:
    free, need = facts.store.free_bytes, facts.newest_bytes
    if free is not None and need and need <= free < 2 * need:
        yield CheckHit(
            "there is room for one more checkpoint only",
            facts.store.url,
            f"{gb(free)} are free, the newest takes {gb(need)}",
            "a save needs room before the one that it replaces goes",
            "make room, or keep fewer: keep=relight.keep(last=…)",
            f"relight prune {quote(_run_or_store(facts))} --keep-last 3 --dry-run",
        )
    elif free is not None and not need and free < _LOW_BYTES and facts.store.error is None:
        yield CheckHit(
            "there is little room",
            facts.store.url,
            f"{gb(free)} are free, and nothing says how large a checkpoint will be",
            "a checkpoint of a model with its optimizer takes 12 to 16 bytes a parameter",
            "choose a larger disk, or make room",
            f"df -h {quote(facts.store.url)}",
        )


@check("space-soon", "warning", "store", "at the rate at which checkpoints come, and as none goes, the store is full within a day")
def _space_soon(facts: DoctorFacts) -> Iterator[CheckHit]:
    free, rate = facts.store.free_bytes, growth_bps(facts)
    if free is not None and rate and facts.newest_bytes <= free and free / rate < _SOON_S:
        yield CheckHit(
            f"the store is full in {span(free / rate)}",
            facts.store.url,
            f"runs grow by {gb(rate * 3600)} an hour, {gb(free)} are free",
            "saves fail from then on",
            "say what to keep: keep=relight.keep(last=…, budget=…)",
            f"relight prune {quote(_run_or_store(facts))} --keep-last 3 --dry-run",
        )


@check("retention", "warning", "store", "nothing was ever retired, and what is there takes more than half of the disk")
def _retention(facts: DoctorFacts) -> Iterator[CheckHit]:
    for run in facts.runs:
        taken = sum(checkpoint.new_bytes for checkpoint in run.checkpoints)
        size = facts.store.size_bytes
        if len(run.checkpoints) >= 5 and not run.retired and size and taken > size / 2:
            yield CheckHit(
                "nothing is ever removed",
                run.path,
                f"{len(run.checkpoints)} checkpoints take {gb(taken)} of {gb(size)}",
                "the disk fills up, and saves fail",
                "say what to keep: keep=relight.keep(last=…)",
                f"relight prune {quote(run.path)} --keep-last 3 --dry-run",
            )


@check("inodes", "warning", "store", "the file system has few inodes left")
def _inodes(facts: DoctorFacts) -> Iterator[CheckHit]:
    free = facts.store.free_inodes
    if free is not None and free < _LOW_INODES:
        yield CheckHit(
            "there are few inodes left",
            facts.store.url,
            f"{free} are free: enough for {max(0, free // _INODES_A_SAVE)} checkpoints or so",
            "files cannot be made although there is room for bytes",
            "remove small files there, or make the file system with more",
            f"df -i {quote(facts.store.url)}",
        )


@check("in-memory", "warning", "store", "the store lies in memory (tmpfs): nothing of it survives a restart of the machine")
def _in_memory(facts: DoctorFacts) -> Iterator[CheckHit]:
    mount = facts.store.mount
    if mount is not None and mount.is_memory and facts.store.there:
        yield CheckHit(
            "the store lies in memory",
            facts.store.url,
            f"{mount.point} is {mount.type}",
            "it is gone with the machine, and takes what training needs",
            "choose a disk; Relight keeps copies in memory by itself",
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
    bad = sorted(mount.options & {"nobarrier", "barrier=0"} | (mount.options & {"volatile"} if mount.type == "overlay" else set()))
    if bad:
        yield CheckHit(
            "the file system does not flush what it says is durable",
            mount.point,
            f"mounted {mount.type} with {', '.join(bad)}",
            "a power cut takes checkpoints that were told to be stored, or the whole file system",
            "mount it without",
            f"findmnt -T {quote(facts.store.url)}",
        )


@check("fsync", "error", "store", "fsync on a real disk is answered faster than any disk can (below 20 µs): it does nothing")
def _fsync(facts: DoctorFacts) -> Iterator[CheckHit]:
    mount, took = facts.store.mount, facts.store.fsync_s
    backed = mount is not None and mount.source.startswith("/dev/")
    if took is not None and backed and took < FSYNC_LEAST_S:
        yield CheckHit(
            "fsync does nothing here",
            facts.store.url,
            f"4 KiB were durable after {took * 1e6:.1f} µs; no device is that fast",
            "a power cut takes checkpoints that were told to be stored",
            "look for a preloaded library, or a disk that is set to lie",
            f"findmnt -T {quote(facts.store.url)}",
        )


@check("hard-links", "error", "store", "a name can be created twice on this file system, or not at all: commits need `link`")
def _links(facts: DoctorFacts) -> Iterator[CheckHit]:
    if facts.store.kind in ("disk", "stripe") and facts.store.exclusive is False:
        yield CheckHit(
            "a name can be created twice",
            facts.store.url,
            "two creations of one name both succeeded",
            "two processes that commit at once would both believe they did",
            "choose another file system",
            f"findmnt -T {quote(facts.store.url)}",
        )


@check("conditional-writes", "error", "store", 'the object store ignores "create if absent"', "This server ignores 'create if absent'")
def _conditional(facts: DoctorFacts) -> Iterator[CheckHit]:
    if facts.store.kind == "object" and facts.store.exclusive is False:
        promised = facts.config.single_writer
        yield CheckHit(
            "this server ignores 'create if absent'",
            facts.store.url,
            "a name was created twice" + ("; RELIGHT_SINGLE_WRITER promises that one process at most writes" if promised else ""),
            "two processes that commit at once would both believe they did" + ("" if promised else ", so saves are refused"),
            "upgrade the server, choose another; or promise that one process at most ever writes there",
            "" if promised else "export RELIGHT_SINGLE_WRITER=1",
        )


@check("bucket-mount", "warning", "store", "the store is an object store that a FUSE mount shows as files")
def _bucket_mount(facts: DoctorFacts) -> Iterator[CheckHit]:
    mount = facts.store.mount
    if mount is not None and mount.is_bucket:
        yield CheckHit(
            "an object store is mounted as files",
            mount.point,
            f"{mount.source} is mounted as {mount.type}",
            "names are not created atomically there, and renames copy: commits are slow, and not safe from a second writer",
            "name the bucket itself: s3://bucket/runs, gs://…, az://…",
            "pip install 'relight[objects]'",
        )


@check("nfs-soft", "warning", "store", "NFS is mounted `soft`: calls fail after a while instead of waiting")
def _nfs_soft(facts: DoctorFacts) -> Iterator[CheckHit]:
    mount = facts.store.mount
    if mount is not None and mount.type.startswith("nfs") and mount.options & {"soft", "softerr"}:
        yield CheckHit(
            "NFS is mounted soft",
            mount.point,
            f"options: {','.join(sorted(mount.options))[:160]}",
            "a server that is busy looks like one that refuses: saves fail, and other programs' writes may be lost",
            "mount it hard",
            f"nfsstat -m {quote(mount.point)}",
        )


@check("nfs-old", "warning", "store", "NFS is spoken in version 2 or 3")
def _nfs_old(facts: DoctorFacts) -> Iterator[CheckHit]:
    mount = facts.store.mount
    version = (mount.option("vers") or mount.option("nfsvers") or "") if mount is not None and mount.type.startswith("nfs") else ""
    if mount is not None and version[:1] in ("2", "3"):
        yield CheckHit(
            "NFS is spoken in an old version",
            mount.point,
            f"vers={version}",
            "the creation of a name whose answer was lost cannot be told from another's; 4.0, 4.1 and 4.2 are tested",
            "mount it with vers=4.2",
            f"nfsstat -m {quote(mount.point)}",
        )


@check("nfs-nocto", "error", "store", "NFS is mounted `nocto`, so that one machine does not see what another has written")
def _nfs_nocto(facts: DoctorFacts) -> Iterator[CheckHit]:
    mount = facts.store.mount
    if mount is not None and mount.type.startswith("nfs") and "nocto" in mount.options:
        yield CheckHit(
            "NFS is mounted without close-to-open consistency",
            mount.point,
            "nocto",
            "what another machine has committed may not be seen: a run could begin from nothing",
            "mount it without nocto",
            f"nfsstat -m {quote(mount.point)}",
        )


@check("clock-store", "warning", "store", "the store's clock and this machine's differ by more than 5 minutes")
def _clock_store(facts: DoctorFacts) -> Iterator[CheckHit]:
    skew = facts.store.skew_s
    if skew is not None and abs(skew) > 300:
        yield CheckHit(
            "the store's clock is another",
            facts.store.url,
            f"a file that was just written is {span(abs(skew))} {'ahead' if skew > 0 else 'old'}",
            "object stores refuse requests that are signed a quarter of an hour off; ages make no sense",
            "keep both by NTP",
            "chronyc tracking",
        )


@check("far", "warning", "store", "a small read takes more than 2 s")
def _far(facts: DoctorFacts) -> Iterator[CheckHit]:
    took = facts.store.answer_s
    if took is not None and took > _SLOW_S:
        yield CheckHit(
            "the store answers slowly",
            facts.store.url,
            f"a small read takes {took:.1f} s",
            "listing a run takes one for each record, a commit some",
            "choose a nearer region, or a nearer tier: relight.Tiers(hot=…, cold=…)",
            f"relight ls {quote(facts.store.url)}",
        )


@check("slow-writes", "warning", "store", "writing a checkpoint takes longer than there is between two")
def _slow(facts: DoctorFacts) -> Iterator[CheckHit]:
    rate = facts.store.write_bps
    for run in facts.runs:
        newest, between = run.newest, run.interval_s
        if rate and newest is not None and between and newest.new_bytes / rate > between:
            yield CheckHit(
                "saves are asked for faster than they can be written",
                run.path,
                f"the newest takes {span(newest.new_bytes / rate)} at {gb(rate)}/s, and one comes every {span(between)}",
                "saves are put off, and more steps are lost with each failure",
                "save less often, or on a faster disk",
                f"relight bench {quote(facts.store.url)}",
            )


@check("direct", "note", "store", "files cannot be read and written past the page cache")
def _direct(facts: DoctorFacts) -> Iterator[CheckHit]:
    mount = facts.store.mount
    if facts.store.direct is False and not (mount is not None and mount.is_memory):
        yield CheckHit(
            "direct I/O does not work there",
            facts.store.url,
            f"O_DIRECT is refused by {mount.type if mount is not None else 'the file system'}",
            "saves and restores push out what other programs have in the page cache",
            "nothing has to be done; XFS and ext4 have it",
            f"relight bench {quote(facts.store.url)}",
        )


@check("shared-write", "warning", "store", "everybody on this machine may write into the store")
def _shared_write(facts: DoctorFacts) -> Iterator[CheckHit]:
    mode = facts.store.mode
    if mode is not None and mode & _SHARED_WRITE and not mode & 0o1000:
        yield CheckHit(
            "everybody may write there",
            facts.store.url,
            f"its mode is {mode & 0o7777:04o}",
            "anybody can delete or replace checkpoints",
            "take it from others",
            f"chmod o-w {quote(facts.store.url)}",
        )


@check("keys-old", "note", "store", "a key that opens the store is in use for more than a year")
def _keys_old(facts: DoctorFacts) -> Iterator[CheckHit]:
    for key in facts.store.keys:
        if key.age_days > _OLD_KEY_DAYS:
            yield CheckHit(
                "a key is in use for more than a year",
                facts.store.url,
                f"{key.label}: {key.age_days:.0f} days",
                "the longer a key is in use, the more places it has been to",
                "exchange it; nothing is encrypted anew for that",
                f"relight keys status {quote(facts.store.url)} --max-age 365",
            )


@check("keys-one", "note", "store", "one key alone opens the encrypted store")
def _keys_one(facts: DoctorFacts) -> Iterator[CheckHit]:
    if facts.store.encrypted and len(facts.store.keys) == 1:
        yield CheckHit(
            "one key alone opens this store",
            facts.store.url,
            f"that is {facts.store.keys[0].label}",
            "who loses it has lost every checkpoint",
            "add one that is kept elsewhere",
            f"relight keys add {quote(facts.store.url)} file:NEW",
        )


@check("bench-leftovers", "note", "store", "directories of a bench that was killed lie in the store")
def _bench(facts: DoctorFacts) -> Iterator[CheckHit]:
    left = facts.store.leftovers
    if left:
        yield CheckHit(
            f"a bench that was killed has left {len(left)} director{'ies' if len(left) > 1 else 'y'}",
            facts.store.url,
            ", ".join(left[:4]),
            "they take room",
            "remove them, unless a bench is running",
            f"rm -r {quote(facts.store.url)}/{quote(left[0])}",
        )


def _run_or_store(facts: DoctorFacts) -> str:
    return (
        max(facts.runs, key=lambda run: sum(checkpoint.new_bytes for checkpoint in run.checkpoints)).path if facts.runs else facts.store.url
    )
