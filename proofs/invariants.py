"""Rules of the log, of commits and of reclaiming that need no crash: mistakes of users and other processes break them.

One function each, which returns what is wrong. ``RULES`` lists them. The docstrings are the rules.
"""

from __future__ import annotations

import errno as codes
import functools
import os
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from proofs.disk_scenario import ROOT, fresh_disk
from relight.catalog.run import Run
from relight.commit import Attempt, delete_directory
from relight.errors import CheckpointNotFound, Fenced, RelightError, StoreUnavailable
from relight.format.digest import ZERO_HEX
from relight.format.names import LOG_DIR, CheckpointDir, record_file
from relight.format.records import Body, CommitBody, FenceBody, Record, RetireBody, RunBody, TagBody
from relight.log import Log, fold
from relight.policy import Candidate, decide_keep, keep
from relight.reader import verify_checkpoint, verify_log
from relight.reclaim import execute, execute_sweep, plan_prune, plan_sweep
from relight.store import ByteStore, LocalStore, put
from relight.testing.disks import HookedDisk, SimulatedDisk
from relight.testing.scenario import RUN, Fact, examine, no_rereads, perform, save

P = ParamSpec("P")
R = TypeVar("R")
Rule = Callable[[], list[str]]
RULES: list[Rule] = []
"""Filled by the decorator below."""


def rule(function: Rule) -> Rule:
    """Add a function to ``RULES``."""
    RULES.append(function)
    return function


def simulated() -> tuple[SimulatedDisk, LocalStore]:
    """Make an empty store on a simulated disk."""
    disk = fresh_disk()
    return disk, LocalStore(ROOT, disk=disk)


def saves(store: ByteStore, *steps: int) -> tuple[Attempt, list[str], list[Fact]]:
    """Begin an attempt and save these steps. Return the attempt, the ids and the facts."""
    attempt = Attempt.begin(store, RUN)
    facts: list[Fact] = [("begun", str(attempt.epoch))]
    for step in steps:
        perform(save(attempt, f"rules/{attempt.epoch}/{step}", step), facts)
    return attempt, [fact[1] for fact in facts if fact[0] == "saved"], facts


def rewrite(disk: SimulatedDisk, path: str, change: Callable[[bytes], bytes]) -> None:
    """Replace a file's bytes, as a bad disk or an editor does."""
    size = disk.lstat(path).st_size
    buffer = bytearray(size)
    fd = disk.open_read(path)
    disk.preadv(fd, memoryview(buffer), 0)
    disk.close(fd)
    disk.unlink(path)
    new = change(bytes(buffer))
    fd = disk.open_new(path)
    disk.pwrite(fd, memoryview(new), 0)
    disk.close(fd)


def flip(data: bytes, where: float = 0.75) -> bytes:
    """Return the bytes with one bit flipped."""
    position = min(int(len(data) * where), len(data) - 1)
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def directory_of(store: ByteStore, checkpoint_id: str) -> str:
    """Return the directory of a checkpoint, which may be live, retired or lost."""
    return next(entry.name for entry in store.list(RUN) if f"-{checkpoint_id}-" in entry.name)


def names(store: ByteStore) -> set[str]:
    """Return the names in the run, without the log."""
    return {entry.name for entry in store.list(RUN)} - {LOG_DIR}


@rule
def fenced_attempt_cannot_save() -> list[str]:
    """An attempt that another has superseded gets ``Fenced`` at its next save, commits nothing and leaves nothing."""
    _, store = simulated()
    first, _, _ = saves(store, 1)
    saves(store, 2)
    before, records = names(store), len(first.view().records)
    try:
        list(save(first, "rules/late", 3))
    except Fenced:
        pass
    else:
        return ["a fenced attempt saved"]
    problems = [] if names(store) == before else ["a fenced attempt left files"]
    return problems + ([] if len(first.view().records) == records else ["a fenced attempt wrote a record"])


def record(seq: int, epoch: int, body: Body) -> Record:
    """Return a record as readers see it."""
    return Record(seq=seq, prev=ZERO_HEX, store="s", run="r", epoch=epoch, time="", writer="", body=body)


def commit_body(checkpoint_id: str, step: int, epoch: int) -> CommitBody:
    """Return the body of a COMMIT."""
    return CommitBody(
        id=checkpoint_id,
        step=step,
        dir=str(CheckpointDir(step, checkpoint_id, epoch)),
        root=ZERO_HEX,
        root_bytes=1,
        parents=[],
        reason="",
        metrics={},
        logical_bytes=1,
        stored_bytes=1,
        new_bytes=1,
        requires=[],
    )


@rule
def late_records_are_void() -> list[str]:
    """After a FENCE, a COMMIT, RETIRE or TAG of a lower epoch is void for every reader."""
    a, b = "a" * 10, "b" * 10
    start = [
        record(0, 0, RunBody(name=RUN)),
        record(1, 1, FenceBody(attempt="x", reason="")),
        record(2, 1, commit_body(a, 1, 1)),
        record(3, 2, FenceBody(attempt="y", reason="")),
    ]
    problems = []
    late: list[Body] = [commit_body(b, 2, 1), RetireBody(ids=[a], reason=""), TagBody(name="t", id=a)]
    for body in late:
        history = fold([*start, record(4, 1, body)])
        if [checkpoint.id for checkpoint in history.live] != [a] or history.tags or len(history.void) != 1:
            problems.append(f"a late {type(body).__name__} counts")
    if fold([*start, record(4, 2, commit_body(b, 2, 1))]).find(b):
        problems.append("a COMMIT of another epoch's directory counts")
    return problems


@rule
def retired_is_for_good() -> list[str]:
    """A retired checkpoint stays retired if its id is committed again, and its tags are removed with it."""
    a, b = "a" * 10, "b" * 10
    history = fold(
        [
            record(0, 0, RunBody(name=RUN)),
            record(1, 0, commit_body(a, 1, 0)),
            record(2, 0, commit_body(b, 2, 0)),
            record(3, 0, TagBody(name="t", id=a)),
            record(4, 0, RetireBody(ids=[a], reason="")),
            record(5, 0, commit_body(a, 1, 0)),
            record(6, 0, TagBody(name="t", id=a)),
        ]
    )
    return (
        []
        if [checkpoint.id for checkpoint in history.live] == [b] and not history.tags
        else ["a retired checkpoint is back"]
    )


@rule
def damaged_record_holds_the_sweep() -> list[str]:
    """While a record is damaged, only retired checkpoints are swept: the damaged record may be the COMMIT of any directory."""
    disk, store = simulated()
    _, ids, _ = saves(store, 1, 2)
    directory = directory_of(store, ids[0])
    rewrite(disk, f"{ROOT}/{RUN}/{LOG_DIR}/{record_file(2)}", flip)
    saves(store, 3)
    plan = plan_sweep(store, RUN)
    execute_sweep(plan, store)
    return [] if directory in names(store) else ["a checkpoint with a damaged COMMIT was swept"]


@rule
def running_attempt_is_not_swept() -> list[str]:
    """Files that the newest attempt may be writing are never swept."""
    _, store = simulated()
    attempt, _, _ = saves(store, 1)
    directory = str(CheckpointDir(2, "w" * 10, attempt.epoch))
    put(store, f"{RUN}/{directory}/root.json", b"{}")
    execute_sweep(plan_sweep(store, RUN), store)
    return [] if directory in names(store) else ["a save in progress was swept"]


@rule
def strangers_files_stay() -> list[str]:
    """A file that Relight did not name is never deleted, and neither is the directory it is in."""
    _, store = simulated()
    _, ids, _ = saves(store, 1)
    prefix = f"{RUN}/{directory_of(store, ids[0])}"
    put(store, f"{prefix}/notes.txt", b"mine")
    is_deleted = delete_directory(store, prefix)
    return (
        []
        if not is_deleted and [entry.name for entry in store.list(prefix)] == ["notes.txt"]
        else ["a file that Relight did not name was deleted"]
    )


@rule
def newest_sound_checkpoint_stays() -> list[str]:
    """Retention keeps the newest checkpoint that verifies, although newer, damaged ones fill the quota.

    It always keeps the newest one.
    """
    disk, store = simulated()
    attempt, ids, facts = saves(store, 1, 2, 3, 4)
    for checkpoint_id in ids[2:]:
        path = f"{ROOT}/{RUN}/{directory_of(store, checkpoint_id)}/pack-00000-000.safetensors"
        rewrite(disk, path, flip)
    plan = plan_prune(store, RUN, keep(last=1))
    execute(plan, store, epoch=attempt.epoch)
    live = [checkpoint.id for checkpoint in attempt.history().live]
    problems = [] if ids[1] in live else ["the newest checkpoint that verifies was retired"]
    if ids[3] not in live or ids[3] in plan.going:
        problems.append("the newest checkpoint was retired")
    return problems


@rule
def quota_is_filled_by_sound_ones() -> list[str]:
    """Damaged checkpoints count for no quota.

    The newest that verifies and the newest stay, even if no rule keeps them.
    """
    old, good, damaged = (
        Candidate(name * 10, seq, seq, {"loss": float(seq)}, verified=name != "c")
        for seq, name in enumerate("abc", start=1)
    )
    kept = {decision.id[0] for decision in decide_keep(keep(last=2), [old, good, damaged]) if decision.keep}
    problems = [] if kept == {"a", "b", "c"} else [f"the last two sound ones and the newest are not {sorted(kept)}"]
    kept = {decision.id[0] for decision in decide_keep(keep(best=1), [old, good, damaged]) if decision.keep}
    return problems + (
        [] if kept == {"a", "b", "c"} else [f"the best, the newest that verifies and the newest are not {sorted(kept)}"]
    )


@rule
def nothing_goes_if_nothing_verifies() -> list[str]:
    """Retention removes nothing while no checkpoint that would stay is known to verify."""
    disk, store = simulated()
    attempt, ids, _ = saves(store, 1, 2, 3)
    for checkpoint_id in ids:
        rewrite(disk, f"{ROOT}/{RUN}/{directory_of(store, checkpoint_id)}/pack-00000-000.safetensors", flip)
    execute(plan_prune(store, RUN, keep(last=1)), store, epoch=attempt.epoch)
    return [] if len(attempt.history().live) == 3 else ["something was retired although nothing verifies"]


@rule
def what_is_tagged_meanwhile_stays() -> list[str]:
    """A checkpoint that is tagged between the plan and its execution is not retired."""
    _, store = simulated()
    attempt, ids, _ = saves(store, 1, 2, 3)
    plan = plan_prune(store, RUN, keep(last=1))
    Run(store, RUN).tag("gold", ids[0])
    execute(plan, store, epoch=attempt.epoch)
    live = [checkpoint.id for checkpoint in attempt.history().live]
    return [] if ids[0] in live and ids[1] not in live else ["a checkpoint tagged meanwhile was retired"]


@rule
def plans_do_not_undo_each_other() -> list[str]:
    """Of two plans made at the same time under different rules, the second is void if the first has retired what it relies on."""
    # the best are computed again before a retirement; milestones are not
    for rules in (keep(best=1, prune_abandoned=True), keep(every=4, prune_abandoned=True)):
        disk, store = simulated()
        attempt, ids, _ = saves(store, 3, 2, 1)
        rewrite(disk, f"{ROOT}/{RUN}/{directory_of(store, ids[2])}/pack-00000-000.safetensors", flip)
        own_plan = plan_prune(store, RUN, keep(last=1, prune_abandoned=True))  # verifies, and relies on the second
        # uses a known result, and relies on the first
        other_plan = plan_prune(store, RUN, rules, verified={ids[0]: True})
        if ids[0] not in own_plan.going or ids[1] not in other_plan.going:
            return ["the plans are not the ones that this rule is about"]
        execute(own_plan, store)
        execute(other_plan, store, epoch=attempt.epoch)
        if [checkpoint.id for checkpoint in attempt.history().live] != ids[1:]:
            return ["only a damaged checkpoint is left"]
    return []


@rule
def newest_stays_in_every_plan() -> list[str]:
    """The newest checkpoint at a plan's execution stays, even if it was not the newest when the plan was made."""
    _, store = simulated()
    attempt, ids, _ = saves(store, 1, 2)
    plan = plan_prune(store, RUN, keep(last=1))
    verdicts = [type(candidate)(candidate.id, candidate.step, False, "") for candidate in plan.verdicts]
    execute(type(plan)(plan.run, plan.rules, verdicts, 0), store, epoch=attempt.epoch)
    return (
        []
        if [candidate.id for candidate in attempt.history().live] == ids[1:]
        else ["the newest checkpoint was retired"]
    )


@rule
def fenced_attempt_cannot_prune() -> list[str]:
    """An attempt that another has superseded retires nothing."""
    _, store = simulated()
    attempt, _, _ = saves(store, 1, 2)
    plan = plan_prune(store, RUN, keep(last=1))
    second = Attempt.begin(store, RUN)
    try:
        execute(plan, store, epoch=attempt.epoch)
    except Fenced:
        return [] if len(second.history().live) == 2 else ["a fenced attempt retired a checkpoint"]
    return ["a fenced attempt pruned"]


@rule
def unreadable_head_stops_the_appender() -> list[str]:
    """No record is chained after one that cannot be read for a moment: that record may be good, and would be refuted."""
    disk, store = simulated()
    _, ids, _ = saves(store, 1)
    head = f"{ROOT}/{RUN}/{LOG_DIR}/{record_file(2)}"

    class Sick(HookedDisk):
        def open_read(self, path: str) -> int:
            if path == head:
                raise OSError(codes.EIO, os.strerror(codes.EIO))
            return super().open_read(path)

    try:
        Attempt.begin(LocalStore(ROOT, disk=Sick(disk)), RUN)
    except StoreUnavailable:
        pass
    view = Log(store, RUN).read()
    if view.faults or not fold(view).find(ids[0]):
        return ["an unreadable record was chained over, and is refuted now that it can be read"]
    return []


@rule
def damaged_head_is_chained_unchanged() -> list[str]:
    """If the last record is damaged, only it is lost: the next one is chained to its unchanged bytes."""
    disk, store = simulated()
    _, ids, facts = saves(store, 1, 2)
    rewrite(disk, f"{ROOT}/{RUN}/{LOG_DIR}/{record_file(3)}", flip)
    _, more, later_facts = saves(store, 3)
    view = Log(store, RUN).read()
    live = [checkpoint.id for checkpoint in fold(view).live]
    problems = (
        []
        if [fault.seq for fault in view.faults] == [3]
        else [f"faults at {[fault.seq for fault in view.faults]}, not just at 3"]
    )
    if live != [ids[0], *more]:
        problems.append("a damaged record took others with it")
    return problems


@rule
def any_changed_bit_damages_a_record() -> list[str]:
    """With any byte of the newest record changed, which no later record is chained to, that record is damaged."""
    from relight.format import decode_record

    _, store = simulated()
    saves(store, 1)
    data = store.get(f"{RUN}/{LOG_DIR}/{record_file(2)}", 1 << 20)
    decode_record(data, 2, "")
    accepted = []
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1
        try:
            decode_record(bytes(changed), 2, "")
        except RelightError:
            continue
        accepted.append(position)
    return [f"a record with a changed byte counts: at {accepted[:5]} and {len(accepted)} in all"] if accepted else []


@rule
def resealed_record_is_refuted() -> list[str]:
    """A record that was changed and sealed again is refuted by the record chained to it."""
    from relight.format import decode_record, encode_record

    disk, store = simulated()
    saves(store, 1, 2)

    def forge(data: bytes) -> bytes:
        old = decode_record(data, 2, "")
        return encode_record(
            Record(**{**{name: getattr(old, name) for name in old.__struct_fields__}, "time": "forged"})
        )

    rewrite(disk, f"{ROOT}/{RUN}/{LOG_DIR}/{record_file(2)}", forge)
    view = Log(store, RUN).read()
    return [] if [fault.seq for fault in view.faults] == [2] else ["a forged record counts"]


@rule
def records_of_others_do_not_count() -> list[str]:
    """A record of another store or run is a fault, although it is sealed. So is a record under another number."""
    from relight.format import decode_record, encode_record

    problems = []
    for field, value in (("store", "5" * 32), ("run", "6" * 32)):
        disk, store = simulated()
        saves(store, 1)

        def forge(data: bytes, field: str = field, value: str = value) -> bytes:
            old = decode_record(data, 2, "")
            return encode_record(
                Record(**{**{name: getattr(old, name) for name in old.__struct_fields__}, field: value})
            )

        rewrite(disk, f"{ROOT}/{RUN}/{LOG_DIR}/{record_file(2)}", forge)
        if fold(Log(store, RUN).read()).live:
            problems.append(f"a record of another {field} counts")
    disk, store = simulated()
    saves(store, 1)
    disk.link(f"{ROOT}/{RUN}/{LOG_DIR}/{record_file(2)}", f"{ROOT}/{RUN}/{LOG_DIR}/{record_file(3)}")
    view = Log(store, RUN).read()
    if [fault.seq for fault in view.faults] != [3]:
        problems.append("a record counts under another's number")
    return problems


@rule
def disk_that_returns_other_bytes_gets_no_commit() -> list[str]:
    """If a part, a root or a pack's length reads back differently than it was written, the save fails before its COMMIT."""
    problems = []
    for suffix, cut in ((".msgpack", False), ("root.json", False), (".safetensors", True)):
        disk, store = simulated()
        attempt, ids, facts = saves(store, 1)

        class Lying(HookedDisk):
            def close(self, fd: int, suffix: str = suffix, cut: bool = cut, under: SimulatedDisk = disk) -> None:
                path, written = self._open[fd][0], self._on_fd("close", fd).file in self.new
                super().close(fd)
                if written and path.endswith(suffix):
                    rewrite(under, path, (lambda data: data[:-1]) if cut else flip)

            def open_new(self, path: str, *, direct: bool = False) -> int:
                fd = super().open_new(path, direct=direct)
                self.new.add(self._on_fd("open_new", fd).file)
                return fd

            new: set[int] = set()

        liar = Attempt.begin(LocalStore(ROOT, disk=Lying(disk)), RUN)
        try:
            list(save(liar, "rules/lie", 2))
            problems.append(f"committed although {suffix} reads back differently")
        except RelightError:
            pass
        problems += examine(store, Log(store, RUN), facts)
    return problems


@rule
def damage_is_found_by_verify() -> list[str]:
    """``verify`` names every damaged file of a checkpoint and of the log, and reports no sound one."""
    problems = []
    disk, store = simulated()
    _, ids, _ = saves(store, 1)
    directory = f"{RUN}/{directory_of(store, ids[0])}"
    files = [f"{directory}/{entry.name}" for entry in store.list(directory)]
    for key in (*files, f"{RUN}/{LOG_DIR}/{record_file(0)}", f"{RUN}/{LOG_DIR}/{record_file(2)}", "relight.json", ""):
        damaged = disk.clone()
        if key:
            rewrite(damaged, f"{ROOT}/{key}", flip)
        sick = LocalStore(ROOT, disk=damaged)
        view = Log(sick, RUN).read()
        findings = [checkpoint.file for checkpoint in verify_log(sick, view)]
        for checkpoint in fold(view).live:
            findings += [finding.file for finding in verify_checkpoint(sick, view, checkpoint)]
        named = any(finding.endswith(key) for finding in findings) if key else not findings
        if not named:
            problems.append(f"damage to {key or 'nothing'} gives findings about {findings}")
    return problems


@rule
def damaged_bytes_are_never_restored() -> list[str]:
    """A restore fails if any file of the checkpoint has one changed bit. Earlier checkpoints restore."""
    wrong = []
    disk, store = simulated()
    _, ids, facts = saves(store, 1, 2)
    directory = f"{RUN}/{directory_of(store, ids[1])}"
    for entry in store.list(directory):
        # a restore does not read the header, which verify does
        unread = 6 if entry.name.endswith(".safetensors") else 0
        flips = [functools.partial(flip, where=part / 8) for part in range(unread, 9)]
        changes: tuple[Callable[[bytes], bytes], ...] = (
            *flips,
            lambda data: data[:-1],
            lambda data: data + b"\0",
            lambda data: b"",
            # a user's value in the root: only its hash protects it, as the file stays valid
            lambda data: data.replace(b'"rules/', b'"ruler/') if b'"rules/' in data else data[1:],
        )
        for change in changes:
            damaged = disk.clone()
            rewrite(damaged, f"{ROOT}/{directory}/{entry.name}", change)
            sick = LocalStore(ROOT, disk=damaged)
            problems = examine(sick, Log(sick, RUN), facts)
            if len(problems) != 1 or "does not restore" not in problems[0]:
                wrong.append(f"{entry.name} damaged: {problems or 'restored without an error'}")
    return wrong


@rule
def files_of_others_are_not_restored() -> list[str]:
    """A file of another checkpoint in place of one of the same kind is not accepted."""
    disk, store = simulated()
    _, ids, facts = saves(store, 1, 2)
    wrong = []
    for name in ("root.json", "part-00000.msgpack", "pack-00000-000.safetensors"):
        damaged = disk.clone()
        other_bytes = store.get(f"{RUN}/{directory_of(store, ids[0])}/{name}", 1 << 30)
        rewrite(damaged, f"{ROOT}/{RUN}/{directory_of(store, ids[1])}/{name}", lambda _, content=other_bytes: content)
        sick = LocalStore(ROOT, disk=damaged)
        problems = examine(sick, Log(sick, RUN), facts)
        if not any("does not restore" in problem for problem in problems):
            wrong.append(f"{name} of another checkpoint was accepted")
    return wrong


@rule
def lost_store_record_hides_nothing() -> list[str]:
    """Without ``relight.json`` a run is still readable, and continues under the store's old id."""
    disk, store = simulated()
    _, _, facts = saves(store, 1)
    disk.unlink(f"{ROOT}/relight.json")
    problems = examine(store, Log(store, RUN), facts)
    _, _, later_facts = saves(store, 2)
    return problems + examine(store, Log(store, RUN), [*facts, *later_facts])


@rule
def gap_in_the_log_is_a_fault() -> list[str]:
    """A missing record is reported as a fault, and only it is lost."""
    disk, store = simulated()
    _, ids, _ = saves(store, 1, 2, 3)
    disk.unlink(f"{ROOT}/{RUN}/{LOG_DIR}/{record_file(3)}")
    view = Log(store, RUN).read()
    live = [checkpoint.id for checkpoint in fold(view).live]
    return (
        []
        if [fault.seq for fault in view.faults] == [3] and live == [ids[0], ids[2]]
        else [f"live {live}, faults {view.faults}"]
    )


@rule
def listing_creates_no_run() -> list[str]:
    """Reading an absent run creates nothing."""
    disk, store = simulated()
    for read in (
        lambda: Log(store, RUN).read(),
        lambda: plan_sweep(store, RUN),
        lambda: plan_prune(store, RUN, keep(last=1)),
    ):
        try:
            read()
            return ["an absent run was read"]
        except CheckpointNotFound:
            pass
    return [] if not list(disk.scan("/disk")) else ["reading created something"]


def all_rules() -> list[Rule]:
    """Return all rules, with those of the other files."""
    from proofs import rules_lines, rules_store, rules_summaries  # they add their rules; they import this file

    assert {check.__module__ for check in RULES} > {
        rules_lines.__name__,
        rules_store.__name__,
        rules_summaries.__name__,
    }
    return RULES


def broken() -> Iterator[str]:
    """Yield what is wrong with any of the rules."""
    for check in all_rules():
        try:
            with no_rereads():
                problems = check()
        except Exception as error:
            problems = [repr(error)]
        for text in problems:
            yield f"{check.__name__}: {text}"
