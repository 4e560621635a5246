"""Acknowledgements to simulated processes.

They are checked at every COMMIT, at every acknowledgement, and at the end.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from proofs.durability_oracle import LOG, RUN, Truth
from proofs.shelf import DurableNames
from proofs.simulated_store import FaultFreeProcess, SimulatedStore
from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.errors import RelightError
from relight.format import Leaf, encode_tree, hexdigest
from relight.format.names import (
    READY_DIR,
    STORE_FILE,
    is_announcement_file,
    is_written_file,
    parse_record_file,
    parse_summary_file,
)
from relight.layout import Bytes, Item
from relight.log import Checkpoint, Log, LogView, fold
from relight.reader import open_checkpoint, read_tensors, verify_checkpoint
from relight.reclaim import execute_sweep, plan_sweep
from relight.reclaim.rebuild import execute_rebuild, plan_rebuild
from relight.store.durable import temporary_of

ROW = 8
FROZEN = b"\x17" * ROW
"""A second tensor of each rank, which is equal in all saves."""


@dataclass
class AcknowledgedSave:
    """One save, and the result of each rank: the ``kind`` of its error and −1, or ``""`` and the record's number."""

    id: str
    step: int
    epoch: int
    world: int
    agreed: bool
    doubted: bool = False
    """Whether an append of a rank failed with ``Uncertain``."""
    aborted: bool = False
    """Whether a rank aborted the save before it was ready."""
    outcomes: dict[int, tuple[str, int]] = field(default_factory=dict)

    def row(self, rank: int) -> bytes:
        """Return the bytes that ``rank`` saves."""
        return row_of(self.epoch, self.step, rank)


def row_of(epoch: int, step: int, rank: int) -> bytes:
    """Return bytes that identify the epoch, step and rank."""
    return bytes([epoch & 255, step >> 8 & 255, step & 255, rank, 0xA5, rank, step & 255, epoch & 255])


class Promises:
    """The saves and tags of a schedule that were acknowledged, and an outside observer that checks the store against them."""

    def __init__(self, shelf: DurableNames, kinds: frozenset[str], seed: int) -> None:
        self.shelf, self.kinds, self._seed = shelf, kinds, seed
        self.outside = SimulatedStore(shelf, FaultFreeProcess(), random.Random(0), fine=False)
        self.truth = Truth(shelf, self._check_live)
        self.saves: dict[str, AcknowledgedSave] = {}
        self.tags: dict[str, str] = {}
        """Acknowledged tags."""
        self._log = Log(self.outside, RUN)
        self._cut = False

    def saved(self, epoch: int, step: int, turn: int, world: int, agreed: bool) -> AcknowledgedSave:
        """Return the save of that attempt, step and turn. The first rank that asks creates it."""
        checkpoint_id = hexdigest(f"{self._seed} {epoch} {step} {turn}".encode())[:10]
        return self.saves.setdefault(checkpoint_id, AcknowledgedSave(checkpoint_id, step, epoch, world, agreed))

    def after_cut(self) -> None:
        """Forget what was read of the log before a power cut."""
        self._log, self._cut = Log(self.outside, RUN), True
        self.truth.after_cut()

    def _check_live(self, checkpoint_id: str) -> list[str]:
        """Return what is wrong with a checkpoint that must be live."""
        view = self._log.read()
        checkpoint = fold(view).find(checkpoint_id)
        if checkpoint is None:
            return [f"{checkpoint_id} counts, and the history does not show it"]
        problems = [f"{checkpoint_id}: {finding}" for finding in verify_checkpoint(self.outside, view, checkpoint)]
        return problems or self.content(self.outside, view, checkpoint)

    def content(self, store: SimulatedStore, view: LogView, checkpoint: Checkpoint) -> list[str]:
        """Return what is wrong with the bytes of a checkpoint; they must all be of one save."""
        saved = self.saves[checkpoint.id]
        opened = open_checkpoint(store, RUN, checkpoint, store_id=view.store_id, run_id=view.run_id)
        problems = []
        if (len(opened.parts), checkpoint.step, checkpoint.epoch) != (saved.world, saved.step, saved.epoch):
            problems.append(
                f"(5) {checkpoint.id} is of {len(opened.parts)} ranks, step {checkpoint.step}, attempt {checkpoint.epoch}"
            )
        for rank, part in enumerate(opened.parts):
            buffer = bytearray(ROW)
            still = bytearray(FROZEN)
            read_tensors(opened, part, {0: Bytes(buffer)} | ({1: Bytes(still)} if len(part.tensors) > 1 else {}))
            if bytes(still) != FROZEN:
                problems.append(f"(5) {checkpoint.id} holds {still.hex()} where nothing ever changed")
            if bytes(buffer) != saved.row(rank):
                problems.append(f"(5) {checkpoint.id} holds bytes of another save: rank {rank} has {buffer.hex()}")
        return problems

    def acknowledged(self, process: str, saved: AcknowledgedSave, seq: int) -> None:
        """Check that process ``process`` may receive the acknowledgement of a save with record ``seq``."""
        truth = self.truth
        commit = truth.counted.get(saved.id)
        if commit is None:
            truth.wrong.append(f"(2) {process} has the acknowledgement of {saved.id}, and no COMMIT of it counts")
        elif (commit.seq, commit.epoch) != (seq, saved.epoch):
            truth.wrong.append(
                f"(4) {process} received record {seq} of attempt {saved.epoch} for {saved.id}: it is {commit.seq} of {commit.epoch}"
            )
        elif not truth.is_durable(seq):
            truth.wrong.append(
                f"(2) {process} has the acknowledgement of {saved.id}, and its COMMIT, record {seq}, is not durable"
            )
        elif saved.id in truth.live and truth.loose(commit):
            truth.wrong.append(
                f"(2) {process} has the acknowledgement of {saved.id}, and {truth.loose(commit)[0]} is not durable"
            )

    def judge(self) -> None:
        """Check the history, each save and each tag at the end of a schedule."""
        truth = self.truth
        history = fold(self._log.read()) if truth.records else None
        live = [commit.id for commit in history.live] if history is not None else []
        if live != list(truth.live) or (
            history is not None and (history.tags != truth.tags or history.epoch != truth.epoch)
        ):
            truth.wrong.append(f"(3) the history is {live}; by the rules of the format it is {list(truth.live)}")
        for commit in truth.live.values():
            if truth.changed(commit) or self._cut:
                truth.wrong += [f"(1) at the end: {text}" for text in self._check_live(commit.id)]
        for saved in self.saves.values():
            self._judge_save(saved)
        for name, target in self.tags.items():
            if truth.tags.get(name) != target and target not in truth.retired:
                truth.wrong.append(f"(2) tag {name} was acknowledged, and does not point at {target}")

    def _judge_save(self, saved: AcknowledgedSave) -> None:
        truth = self.truth
        commit = truth.counted.get(saved.id)
        kinds = {kind for kind, _ in saved.outcomes.values()}
        if "" in kinds and saved.id not in truth.live and saved.id not in truth.retired:
            truth.wrong.append(f"(2) {saved.id} was acknowledged, and is gone")
        if len({seq for kind, seq in saved.outcomes.values() if not kind}) > 1:
            truth.wrong.append(f"(4) ranks received different records of {saved.id}: {saved.outcomes}")
        if commit is None:
            return
        if not saved.agreed:
            truth.wrong.append(f"(5) {saved.id} is a checkpoint, though its ranks did not agree")
        if saved.aborted:
            truth.wrong.append(f"(6) {saved.id} is a checkpoint, though a rank aborted it before it was ready")
        final = kinds & {"late_ranks", "others_failed"}
        if final and saved.id in truth.live:
            truth.wrong.append(
                f"(6) {saved.id} is a checkpoint, and its save failed on a rank with {sorted(final)[0]}: {saved.outcomes}"
            )
        if saved.doubted and "unsaid" not in self.kinds:
            return
        if len(saved.outcomes) == saved.world and not kinds & {"", "died", "uncertain", "fenced"}:
            truth.wrong.append(f"(6) {saved.id} is a checkpoint, and its save failed on all ranks: {saved.outcomes}")

    def finale(self) -> None:
        """Begin a last attempt on a store that never fails, sweep, check for leftovers, save."""
        try:
            attempt = Attempt.begin(self.outside, RUN)
            execute_sweep(plan_sweep(self.outside, RUN), self.outside)
            for key in self._left():
                self.truth.wrong.append(f"(7) not removed: {key}")
            saved = self.saved(attempt.epoch, 99, 0, 1, True)
            item = Item("t", "uint8", (1, ROW), "param", Bytes(saved.row(0)), None, True)
            tree = encode_tree({"t": Leaf("tensor", (0,))})
            report = attempt.save(SaveRequest(SaveInfo(step=99), tree=tree, items=[item], id=saved.id))
            saved.outcomes[0] = ("", report.seq)
            if saved.id not in self.truth.live:
                self.truth.wrong.append("(2) the last save does not count")
        except RelightError as error:
            self.truth.wrong.append(f"(8) the run does not resume: {type(error).__name__}: {error}")

    def rebuild(self, before: Iterable[str]) -> None:
        """Rebuild the lost log. Each checkpoint of ``before`` was live and must be live again or recallable."""
        self._log = Log(self.outside, RUN)
        self.truth.find_log()
        try:
            execute_rebuild(plan_rebuild(self.outside, RUN), self.outside)
        except RelightError as error:
            self.truth.wrong.append(f"(9) the log cannot be rebuilt: {type(error).__name__}: {error}")
            return
        for checkpoint_id in before:
            if checkpoint_id not in self.truth.live and checkpoint_id not in self.truth.shelved:
                self.truth.wrong.append(f"(9) the rebuilt log lacks {checkpoint_id}, which was live")

    def _left(self) -> Iterator[str]:
        live = {f"{RUN}/{commit.dir}" for commit in (*self.truth.live.values(), *self.truth.shelved.values())}
        for key in sorted(self.shelf.dirs):
            if key not in ("", RUN, LOG) and key not in live and key.removesuffix(f"/{READY_DIR}") not in live:
                yield key
        for key in sorted(self.shelf.files):
            folder, _, name = key.rpartition("/")
            if key == STORE_FILE or (
                folder == LOG and (parse_record_file(name) is not None or parse_summary_file(name) is not None)
            ):
                continue
            if folder.removesuffix(f"/{READY_DIR}") in live and folder not in live and is_announcement_file(name):
                continue
            if folder in live and (is_written_file(name) or (temporary_of(name) and "temporary" not in self.kinds)):
                continue
            yield key
