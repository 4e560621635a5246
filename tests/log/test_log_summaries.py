"""Summaries of a log: a reader that begins at one sees what a reader of every record sees."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from relight.format.names import CheckpointDir
from relight.format.records import (
    Body,
    CommitBody,
    FenceBody,
    NoteBody,
    RecallBody,
    Record,
    RetireBody,
    RunBody,
    SweepBody,
    TagBody,
)
from relight.format.topics import BEST_BY, REBUILDING, REPACKED, RESULT, ROLLED_BACK
from relight.format.topics import REBUILT as REBUILT_NOTE
from relight.log import FRESH, History, LogView, fold, line_of, newest_good
from relight.log.ancestors import REBUILT
from relight.log.history import REPEATED_WITHIN
from relight.log.summary import condense, decode, encode
from relight.log.truncated import is_being_rebuilt
from relight.log.view import Fault

STORE, RUN = "5" * 32, "6" * 32


class Writer:
    """A log that processes append to at random: what each record is follows from the history so far, as in the product."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.records: list[Record] = []
        self.damaged: set[int] = set()
        self.step = 0
        self.parent: str | None = None
        self.names = self.epoch = 0
        self.put(RunBody(name="run"), 0)
        self.fence()

    def put(self, body: Body, epoch: int) -> None:
        """Append a record, which is damaged in 2 % of the cases."""
        seq = len(self.records)
        self.records.append(
            Record(
                seq=seq,
                prev="",
                store=STORE,
                run=RUN,
                epoch=epoch,
                time=f"2026-01-01T00:{seq // 60 % 60:02d}:{seq % 60:02d}Z",
                writer=f"host:{epoch}:x",
                body=body,
                file_hash=f"{seq:064x}",
            )
        )
        if seq > 1 and self.random.random() < 0.02:
            self.damaged.add(seq)

    def view(self, after: LogView | None = None) -> LogView:
        """Return a reader's view of every record, or of those after the summary in ``after``."""
        base = after.base if after is not None else -1
        counted = [record for record in self.records if record.seq > base and record.seq not in self.damaged]
        faults = [Fault(seq, f"log/{seq}", "damaged") for seq in sorted(self.damaged) if seq > base]
        summary = after.summary if after is not None else None
        head = len(self.records) - 1
        return LogView(
            "run", STORE, RUN, (*(summary.records if summary else ()), *counted), (*(summary.faults if summary else ()), *faults), head,
            f"{head:064x}", summary,
        )  # fmt: skip

    def history(self) -> History:
        """The history so far."""
        return fold(self.view())

    def fence(self) -> None:
        """An attempt takes charge: it restores the newest good checkpoint, an older one, one of another store, or nothing."""
        history = self.history()
        draw = self.random.random()
        good = newest_good(history)
        reason = "start"
        if good is None or draw < 0.1:
            reason, self.parent = (FRESH if draw < 0.07 else REBUILT if draw < 0.08 else "start"), None
        elif draw < 0.2:
            self.parent = f"{self.random.randrange(10**9):010d}"
        else:
            self.parent = (self.random.choice(history.live) if draw < 0.4 else good).id
            self.step = history.by_id[self.parent].step
        lost = sum(1 for seq in self.damaged)
        self.epoch = history.epoch + 1 + lost
        self.put(FenceBody(attempt=f"a{len(self.records)}", reason=reason), self.epoch)

    def act(self) -> None:
        """Append one record of some kind."""
        history = self.history()
        draw, pick = self.random.random(), self.random
        epoch, live = max(history.epoch, self.epoch), history.live  # the newest FENCE may be a damaged record
        if draw < 0.35 or not live:
            self.step += pick.randrange(1, 4)
            self.names += 1
            name = f"c{self.names:09d}"
            requires = [checkpoint.id for checkpoint in live[-2:] if pick.random() < 0.2]
            where = CheckpointDir(self.step, name, epoch)
            parents = [self.parent] if self.parent else []
            body = CommitBody(
                id=name, step=self.step, dir=str(where), root="a" * 64, root_bytes=9, parents=parents, reason="every", metrics={"loss": 1.0},
                logical_bytes=5, stored_bytes=5, new_bytes=5, requires=requires, suspect=pick.random() < 0.05,
            )  # fmt: skip
            self.put(body, epoch)
            self.parent = name
        elif draw < 0.65:
            needed = {donor for checkpoint in history.there for donor in checkpoint.requires}
            free = [
                checkpoint.id
                for checkpoint in live[:-2]
                if checkpoint.id not in needed and checkpoint.id not in history.tags.values()
            ]
            going = pick.sample(free, min(len(free), pick.randrange(1, 4)))
            if going:
                self.put(RetireBody(ids=going, reason="keep", undo_s=pick.choice([0.0, 0.0, 60.0])), epoch)
        elif draw < 0.70 and history.recallable:
            kind: type[Any] = pick.choice([SweepBody, SweepBody, RecallBody])
            ids = pick.sample(sorted(history.recallable), 1)
            self.put(SweepBody(ids=ids) if kind is SweepBody else RecallBody(ids=ids, reason=""), epoch)
        elif draw < 0.78:
            target = pick.choice([None, pick.choice(live).id])
            self.put(TagBody(name=pick.choice(["t", "u", "staging"]), id=target), epoch)
        elif draw < 0.84:
            self.fence()
        elif draw < 0.87:
            data: dict[str, Any] = {"before": pick.choice(live).step, "skip": f"{self.step}-{self.step + 2}", "lr": 0.5}
            self.put(NoteBody(topic=ROLLED_BACK.name, data=data), epoch)
        elif draw < 0.89:
            self.put(NoteBody(topic=BEST_BY.name, data={"metric": pick.choice("ab"), "mode": "min"}), epoch)
        elif draw < 0.91:
            self.put(NoteBody(topic=REPACKED.name, data={"id": pick.choice(live).id}), epoch)
        elif draw < 0.93:
            self.put(NoteBody(topic=pick.choice([REBUILDING.name, REBUILT_NOTE.name]), data={}), epoch)
        elif draw < 0.95:
            # void if the epoch is a superseded attempt's
            self.put(TagBody(name="late", id=pick.choice(live).id), max(0, epoch - 1))
        elif draw < 0.97 and history.retired:
            late = [
                retired
                for retired in history.retired.values()
                if len(self.records) - history.retired_at[retired.id] < REPEATED_WITHIN
            ]
            if late := [retired for retired in late if retired.epoch == epoch]:  # a repeated COMMIT
                self.put(pick.choice(late).body, epoch)
        elif draw < 0.985:
            about = pick.choice([*live, *history.retired.values()]).id
            metrics = json.dumps({pick.choice("ab"): len(self.records)})
            self.put(NoteBody(topic=RESULT.name, data={"id": about, "metrics": metrics, "by": "x"}), epoch)
        else:
            self.put(
                NoteBody(topic="verified", data={"whole": " ".join(checkpoint.id for checkpoint in live[-3:])}), epoch
            )


def compare(brief: LogView, whole: LogView) -> None:
    """Assert that both views fold to the same."""
    folded, expected = fold(brief), fold(whole)
    assert [
        (
            checkpoint.id,
            checkpoint.seq,
            checkpoint.step,
            checkpoint.epoch,
            checkpoint.self_contained,
            checkpoint.requires,
            checkpoint.metrics,
        )
        for checkpoint in folded.live
    ] == [
        (
            checkpoint.id,
            checkpoint.seq,
            checkpoint.step,
            checkpoint.epoch,
            checkpoint.self_contained,
            checkpoint.requires,
            checkpoint.metrics,
        )
        for checkpoint in expected.live
    ]
    assert (folded.tags, folded.epoch, folded.skips, folded.best_by) == (
        expected.tags,
        expected.epoch,
        expected.skips,
        expected.best_by,
    )
    assert {key: record.seq for key, record in folded.recallable.items()} == {
        key: record.seq for key, record in expected.recallable.items()
    }
    assert folded.rolled_back_ids & folded.by_id.keys() == expected.rolled_back_ids & expected.by_id.keys()
    assert {key: value for key, value in folded.lr_factors.items() if key in folded.by_id or not key} == {
        key: value for key, value in expected.lr_factors.items() if key in expected.by_id or not key
    }
    assert newest_good(folded) == newest_good(expected) and is_being_rebuilt(brief) == is_being_rebuilt(whole)
    for head in folded.live:
        assert line_of(folded, head) == line_of(expected, expected.by_id[head.id]), head.id
    assert brief.counted == whole.counted and brief.head == whole.head


@pytest.mark.parametrize("seed", range(60))
def test_a_reader_that_begins_at_a_summary_sees_what_one_of_every_record_sees(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logs of saves, retirements with and without undo, recalls, tags, roll-backs, attempts and damage, condensed again and again."""
    # how long a summary keeps retired ids: in the product longer than these logs
    within = random.Random(seed).choice([0, 5, 40])
    monkeypatch.setattr("relight.log.history.REPEATED_WITHIN", within)
    monkeypatch.setattr("relight.log.summary.REPEATED_WITHIN", within)
    monkeypatch.setattr("tests.log.test_log_summaries.REPEATED_WITHIN", within)
    monkeypatch.setattr("relight.log.summary.FENCES_MAX", random.Random(seed).choice([1, 3, 64]))
    monkeypatch.setattr("relight.log.summary.FIRST_FENCES", 1)
    monkeypatch.setattr("relight.log.summary.OF_A_TOPIC", 2)
    writer = Writer(seed)
    brief: LogView | None = None
    every = random.Random(seed).randrange(1, 30)
    left = every
    for _ in range(220):
        writer.act()
        left -= 1
        if left <= 0 and len(writer.records) - 1 not in writer.damaged:
            left = every
            summary = condense(writer.view(brief), trusted=True)
            assert decode(encode(summary), "") == summary
            brief = LogView("run", STORE, RUN, summary.records, summary.faults, summary.upto, summary.hash, summary)
        if brief is not None and writer.random.random() < 0.2:
            compare(writer.view(brief), writer.view())
    assert brief is not None
    compare(writer.view(brief), writer.view())
