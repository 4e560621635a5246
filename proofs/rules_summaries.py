"""Rules about the summaries of logs: when a reader may use them. ``proofs.invariants`` lists them."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from proofs.crash import Observed
from proofs.disk_scenario import ROOT, fresh_disk, short_folders
from proofs.invariants import rule, simulated
from proofs.racing_disks import AfterLinks, MadeByTheDead
from proofs.rules_lines import line
from relight.format import Record, encode_record, hexdigest
from relight.format.names import LOG_DIR, folder_name, record_file, summary_file
from relight.format.records import NoteBody
from relight.format.topics import SUMMARY, SummaryNote
from relight.log import Log, fold, line_of
from relight.log import summary as summary_module
from relight.log.summary import decode, encode, vouched
from relight.policy import keep
from relight.reclaim import execute, plan_prune
from relight.store import ByteStore, LocalStore
from relight.testing.disks import CUTS, DiskCall, SimulatedDisk
from relight.testing.scenario import RUN, patched


def _replace(store: ByteStore, key: str, data: bytes) -> None:
    store.delete(key)
    store.put_once(key, data)


def _differs(store: ByteStore, what: str) -> list[str]:
    """Return where a reader that starts at a summary sees another history than a reader of all records."""
    brief, whole = Log(store, RUN).read(), Log(store, RUN, whole=True).read()
    short, full = fold(brief), fold(whole)
    problems = []
    if [checkpoint.id for checkpoint in short.live] != [checkpoint.id for checkpoint in full.live] or (
        short.tags,
        short.epoch,
    ) != (
        full.tags,
        full.epoch,
    ):
        problems.append(f"{what}: a reader that starts at a summary sees another history")
    if brief.head != whole.head or [fault.seq for fault in brief.faults] != [fault.seq for fault in whole.faults]:
        problems.append(f"{what}: it sees another head, or other faults")
    if any(
        line_of(short, checkpoint) != line_of(full, full.by_id[checkpoint.id])
        for checkpoint in short.live
        if checkpoint.id in full.by_id
    ):
        problems.append(f"{what}: it sees other lines of descent")
    return problems


def _run() -> ByteStore:
    """Make a run of two lines. The older one is retired, except for its last checkpoint."""
    _, store = simulated()
    _, ids = line(store, "fresh", None, 1, 2, 3, 4)
    line(store, "fresh", None, 1, 2)
    line(store, "start", ids[1], 3, 5, 7, 9)
    execute(plan_prune(store, RUN, keep(last=2)), store)
    line(store, "start", fold(Log(store, RUN).read()).live[-1].id, 11)
    return store


@rule
def a_summary_changes_nothing_that_is_seen() -> list[str]:
    """A reader that starts at a summary sees the same history, head and lines of descent as a reader of all records."""
    with short_folders(1):
        store = _run()
        return _differs(store, "a run") + ([] if Log(store, RUN).read().base > 0 else ["no summary was used"])


def _vouched(store: ByteStore) -> list[tuple[Record, tuple[int, str, int]]]:
    """Return the NOTEs of summaries, oldest first, and what each names."""
    records = Log(store, RUN, whole=True).read().records
    return [(record, named) for record in records if (named := vouched(record)) is not None]


def _key(upto: int, hash: str) -> str:
    return f"{RUN}/{LOG_DIR}/{summary_file(upto, hash)}"


@rule
def a_forged_summary_counts_for_nothing() -> list[str]:
    """A summary with other bytes than its NOTE names is not used, though it is well formed and of the same log."""
    with short_folders(1):
        store = _run()
        notes = _vouched(store)
        _, last = notes[-1]
        whole = decode(store.get(_key(*last[:2]), 1 << 20), "")
        forged = encode(replace(whole, live=whole.live[:1], tags={}, retired=(), alone=(), lines={}))[: last[2]]
        _replace(store, _key(*last[:2]), forged)
        return _differs(store, "a forged summary")


@rule
def a_void_note_vouches_for_nothing() -> list[str]:
    """A NOTE to which the next record is not chained is void, and the summary that it names is not used."""
    with short_folders(1):
        store = _run()
        note, (upto, hash, _) = _vouched(store)[-1]
        if note.seq == Log(store, RUN).read().head:
            Log(store, RUN).append(lambda view: (NoteBody(topic="later", data={}), fold(view).epoch))
        whole = decode(store.get(_key(upto, hash), 1 << 20), "")
        data = encode(replace(whole, live=whole.live[:1], tags={}, retired=(), alone=(), lines={}))
        digest = hexdigest(data)
        store.put_once(_key(upto, digest), data)
        body = SUMMARY.note(SummaryNote(upto=upto, hash=digest, bytes=len(data)))
        _replace(store, f"{RUN}/{LOG_DIR}/{record_file(note.seq)}", encode_record(structs.replace(note, body=body)))
        return _differs(store, "a void NOTE")


@rule
def a_stray_record_is_no_head() -> list[str]:
    """A record with a number far above the log's end is reported.

    The next record gets the number that it would have without it.
    """
    _, store = simulated()
    attempt, _ = line(store, "fresh", None, 1, 2)
    before = attempt.view().head
    store.put_once(f"{RUN}/{LOG_DIR}/000000999999.json", b"stray")
    view = Log(store, RUN).read()
    line(store, "start", None, 3)
    after = Log(store, RUN).read()
    problems = (
        []
        if view.head == before and [fault.seq for fault in view.faults] == [999_999]
        else ["a stray record is the head"]
    )
    return problems + (
        [] if after.head == before + 2 and len(fold(after).live) == 3 else ["records are appended after a stray one"]
    )


@rule
def a_folder_is_durable_with_its_records() -> list[str]:
    """A record is durable before the next one is chained to it, even if its process was killed before the fsync of its folder."""
    problems: set[str] = set()
    with short_folders(1):
        disk = fresh_disk()
        disks: list[SimulatedDisk] = []

        def see(number: int, when: str, call: DiskCall, inner: SimulatedDisk) -> None:
            if when == "after" and call.name == "mkdir" and f"/{LOG_DIR}/" in call.path:
                disks.append(inner.clone())

        line(LocalStore(ROOT, disk=Observed(disk, see)), "fresh", None, 1, 2, 3, 4, 5)
        for clone in disks:
            store = LocalStore(ROOT, disk=clone)
            _, ids = line(store, "start", None, 9)
            for kind in CUTS:
                after = LocalStore(ROOT, disk=clone.power_cut(1, kind))
                if ids[-1] not in [checkpoint.id for checkpoint in fold(Log(after, RUN).read()).live]:
                    problems.add("a checkpoint that was acknowledged is lost with the folder of its record")
    return sorted(problems) if disks else ["no folder was made"]


@rule
def a_synced_record_survives_with_its_folder() -> list[str]:
    """``Log.sync`` makes a record durable that two killed processes left: one made its folder, the other linked the record there.

    Both were killed before the fsync of the folder's name.
    """
    problems: set[str] = set()
    linked: list[SimulatedDisk] = []
    with short_folders(1):
        for nth in range(1, 4):
            disk = fresh_disk()
            line(LocalStore(ROOT, disk=disk), "fresh", None, 1)
            dying = AfterLinks(disk)
            raced = MadeByTheDead(dying, "lstat", f"{ROOT}/{RUN}/{LOG_DIR}/{folder_name(1)}", nth)
            line(LocalStore(ROOT, disk=raced), "start", None, 2, 3, 4, 5)
            linked += dying.linked
        for clone in linked:
            log = Log(LocalStore(ROOT, disk=clone), RUN)
            head = log.read().head
            log.sync(head)
            for kind in CUTS:
                if Log(LocalStore(ROOT, disk=clone.power_cut(1, kind)), RUN).read().head < head:
                    problems.add("a record that was synced is lost with its folder")
    return sorted(problems) if linked else ["no record was written in a folder"]


@rule
def a_summary_keeps_the_line_of_descent_of_forgotten_parents() -> list[str]:
    """A summary leaves a retired parent out: its child keeps its ancestors, and gets none of an abandoned line."""
    with short_folders(1), patched((summary_module, "REPEATED_WITHIN", 1)):
        _, store = simulated()
        line(store, "fresh", None, 1, 2, 3)
        line(store, "fresh", None, 4, 5, 6, 7, 8)
        execute(plan_prune(store, RUN, keep(last=2)), store)
        line(store, "start", fold(Log(store, RUN).read()).live[-1].id, 9, 10)
        forgotten = set(fold(Log(store, RUN, whole=True).read()).retired) - fold(Log(store, RUN).read()).retired.keys()
        return _differs(store, "forgotten parents") + ([] if forgotten else ["the summary has left nothing out"])
