"""What was promised to whom, and whether it is so: checked at every COMMIT, at every answer, and at the end."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from relight.catalog import open_checkpoint, read_tensors, verify_checkpoint
from relight.commit import Attempt, SaveRequest
from relight.errors import RelightError
from relight.format import Leaf, encode_tree, hexdigest
from relight.format.names import READY_DIR, STORE_FILE, is_said_file, is_written_file, parse_record_file, parse_summary_file
from relight.layout import Bytes, Item
from relight.log import Checkpoint, Log, LogView, fold
from relight.reclaim import execute_sweep, plan_sweep
from relight.reclaim.rebuild import execute_rebuild, plan_rebuild
from relight.store.durable import temporary_of
from relight.testing.durability_oracle import LOG, RUN, Truth
from relight.testing.shelf import DurableNames
from relight.testing.simulated_store import Nobody, SimulatedStore

ROW = 8
FROZEN = b"\x17" * ROW
"""What a rank has besides its row, and does not change from save to save."""


@dataclass
class AcknowledgedSave:
    """One save, and what its ranks were told: ``kind`` of an error, or ``""`` and the record's number."""

    id: str
    step: int
    epoch: int
    world: int
    agreed: bool
    doubted: bool = False
    """Whether a rank's store could not say whether a record is there."""
    called_off: bool = False
    """Whether a rank has called it off before it was ready."""
    told: dict[int, tuple[str, int]] = field(default_factory=dict)

    def row(self, rank: int) -> bytes:
        """What ``rank`` holds of it."""
        return row_of(self.epoch, self.step, rank)


def row_of(epoch: int, step: int, rank: int) -> bytes:
    """Bytes that say whose they are."""
    return bytes([epoch & 255, step >> 8 & 255, step & 255, rank, 0xA5, rank, step & 255, epoch & 255])


class Promises:
    """The saves of a schedule and what was told of them, and somebody outside who can look at everything."""

    def __init__(self, shelf: DurableNames, kinds: frozenset[str], seed: int) -> None:
        self.shelf, self.kinds, self._seed = shelf, kinds, seed
        self.outside = SimulatedStore(shelf, Nobody(), random.Random(0), fine=False)
        self.truth = Truth(shelf, self._check_live)
        self.saves: dict[str, AcknowledgedSave] = {}
        self.tags: dict[str, str] = {}
        """As they were acknowledged."""
        self._log = Log(self.outside, RUN)
        self._cut = False

    def saved(self, epoch: int, step: int, turn: int, world: int, agreed: bool) -> AcknowledgedSave:
        """The save of that attempt, step and turn: one, whichever rank asks first."""
        checkpoint_id = hexdigest(f"{self._seed} {epoch} {step} {turn}".encode())[:10]
        return self.saves.setdefault(checkpoint_id, AcknowledgedSave(checkpoint_id, step, epoch, world, agreed))

    def after_cut(self) -> None:
        """The power was cut: what is known of the log is known no more."""
        self._log, self._cut = Log(self.outside, RUN), True
        self.truth.after_cut()

    def _check_live(self, checkpoint_id: str) -> list[str]:
        """What is wrong with a checkpoint that is live, or should be."""
        view = self._log.read()
        one = fold(view).find(checkpoint_id)
        if one is None:
            return [f"{checkpoint_id} counts, and the history does not show it"]
        wrong = [f"{checkpoint_id}: {found}" for found in verify_checkpoint(self.outside, view, one)]
        return wrong or self.content(self.outside, view, one)

    def content(self, store: SimulatedStore, view: LogView, one: Checkpoint) -> list[str]:
        """Whether its bytes are one save's."""
        saved = self.saves[one.id]
        opened = open_checkpoint(store, RUN, one, store_id=view.store_id, run_id=view.run_id)
        wrong = []
        if (len(opened.parts), one.step, one.epoch) != (saved.world, saved.step, saved.epoch):
            wrong.append(f"(5) {one.id} is of {len(opened.parts)} ranks, step {one.step}, attempt {one.epoch}")
        for rank, part in enumerate(opened.parts):
            room = bytearray(ROW)
            still = bytearray(FROZEN)
            read_tensors(opened, part, {0: Bytes(room)} | ({1: Bytes(still)} if len(part.tensors) > 1 else {}))
            if bytes(still) != FROZEN:
                wrong.append(f"(5) {one.id} holds {still.hex()} where nothing ever changed")
            if bytes(room) != saved.row(rank):
                wrong.append(f"(5) {one.id} holds bytes of another save: rank {rank} has {room.hex()}")
        return wrong

    def acknowledged(self, who: str, saved: AcknowledgedSave, seq: int) -> None:
        """``who`` was told that it is saved, as record ``seq``."""
        truth = self.truth
        found = truth.counted.get(saved.id)
        if found is None:
            truth.wrong.append(f"(2) {who} is told that {saved.id} is saved, and no COMMIT of it counts")
        elif (found.seq, found.epoch) != (seq, saved.epoch):
            truth.wrong.append(
                f"(4) {who} is told that {saved.id} is record {seq} of attempt {saved.epoch}: it is {found.seq} of {found.epoch}"
            )
        elif not truth.is_durable(seq):
            truth.wrong.append(f"(2) {who} is told that {saved.id} is saved, and its COMMIT, record {seq}, is not durable")
        elif saved.id in truth.live and truth.loose(found):
            truth.wrong.append(f"(2) {who} is told that {saved.id} is saved, and {truth.loose(found)[0]} is not durable")

    def judge(self) -> None:
        """At the end: the history, each save, each tag."""
        truth = self.truth
        history = fold(self._log.read()) if truth.records else None
        live = [one.id for one in history.live] if history is not None else []
        if live != list(truth.live) or (history is not None and (history.tags != truth.tags or history.epoch != truth.epoch)):
            truth.wrong.append(f"(3) the history is {live}; by the format's words it is {list(truth.live)}")
        for one in truth.live.values():
            if truth.changed(one) or self._cut:
                truth.wrong += [f"(1) at the end: {text}" for text in self._check_live(one.id)]
        for saved in self.saves.values():
            self._judge_save(saved)
        for name, target in self.tags.items():
            if truth.tags.get(name) != target and target not in truth.retired:
                truth.wrong.append(f"(2) tag {name} was acknowledged, and does not point at {target}")

    def _judge_save(self, saved: AcknowledgedSave) -> None:
        truth = self.truth
        found = truth.counted.get(saved.id)
        kinds = {kind for kind, _ in saved.told.values()}
        if "" in kinds and saved.id not in truth.live and saved.id not in truth.retired:
            truth.wrong.append(f"(2) {saved.id} was acknowledged, and is gone")
        if len({seq for kind, seq in saved.told.values() if not kind}) > 1:
            truth.wrong.append(f"(4) ranks were told of different records of {saved.id}: {saved.told}")
        if found is None:
            return
        if not saved.agreed:
            truth.wrong.append(f"(5) {saved.id} is a checkpoint, though its ranks did not agree")
        if saved.called_off:
            truth.wrong.append(f"(6) {saved.id} is a checkpoint, though a rank called it off before it was ready")
        final = kinds & {"late_ranks", "others_failed"}
        if final and saved.id in truth.live:
            truth.wrong.append(f"(6) {saved.id} is a checkpoint, and a rank was told {sorted(final)[0]}: {saved.told}")
        if saved.doubted and "unsaid" not in self.kinds:
            return
        if len(saved.told) == saved.world and not kinds & {"", "died", "uncertain", "fenced"}:
            truth.wrong.append(f"(6) {saved.id} is a checkpoint, and all ranks were told that it failed: {saved.told}")

    def finale(self) -> None:
        """A last attempt, whose store never fails: it takes charge, sweeps, saves."""
        try:
            attempt = Attempt.begin(self.outside, RUN)
            execute_sweep(plan_sweep(self.outside, RUN), self.outside)
            for key in self._left():
                self.truth.wrong.append(f"(7) left behind: {key}")
            saved = self.saved(attempt.epoch, 99, 0, 1, True)
            item = Item("t", "uint8", (1, ROW), "param", Bytes(saved.row(0)), None, True)
            tree = encode_tree({"t": Leaf("tensor", (0,))})
            report = attempt.save(SaveRequest(step=99, tree=tree, items=[item], id=saved.id))
            saved.told[0] = ("", report.seq)
            if saved.id not in self.truth.live:
                self.truth.wrong.append("(2) the last save does not count")
        except RelightError as error:
            self.truth.wrong.append(f"(8) the run does not go on: {type(error).__name__}: {error}")

    def rebuild(self, before: Iterable[str]) -> None:
        """Rebuild the log that was lost. Each checkpoint of ``before``, which were live, has to be live again or recallable."""
        self._log = Log(self.outside, RUN)
        self.truth.find_log()
        try:
            execute_rebuild(plan_rebuild(self.outside, RUN), self.outside)
        except RelightError as error:
            self.truth.wrong.append(f"(9) the log cannot be rebuilt: {type(error).__name__}: {error}")
            return
        for one in before:
            if one not in self.truth.live and one not in self.truth.shelved:
                self.truth.wrong.append(f"(9) the rebuilt log lacks {one}, which was live")

    def _left(self) -> Iterator[str]:
        live = {f"{RUN}/{one.dir}" for one in (*self.truth.live.values(), *self.truth.shelved.values())}
        for key in sorted(self.shelf.dirs):
            if key not in ("", RUN, LOG) and key not in live and key.removesuffix(f"/{READY_DIR}") not in live:
                yield key
        for key in sorted(self.shelf.files):
            folder, _, name = key.rpartition("/")
            if key == STORE_FILE or (folder == LOG and (parse_record_file(name) is not None or parse_summary_file(name) is not None)):
                continue
            if folder.removesuffix(f"/{READY_DIR}") in live and folder not in live and is_said_file(name):
                continue
            if folder in live and (is_written_file(name) or (temporary_of(name) and "temporary" not in self.kinds)):
                continue
            yield key
