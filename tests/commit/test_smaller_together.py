"""Several ranks that share chunks with earlier saves: each finds its own donors, and the checkpoint names the donors of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as replace_struct
from thread_ranks import Ranks

from relight.catalog.run import Run
from relight.commit import SaveReport, SaveRequest
from relight.commit.chunk_index import DONORS_MAX, IncrementalState
from relight.errors import SaveFailed
from relight.format.records import RetireBody
from relight.layout import Bytes, Item
from relight.log import fold
from relight.policy import Keep
from relight.policy.compact import Compact, Experience
from relight.reader import open_checkpoint
from relight.reclaim import execute, execute_sweep, plan_prune, plan_sweep
from relight.versions.branching import branch

STILL = bytes(range(256)) * 40


class Sharing(Ranks):
    """Each rank has one tensor next to its row that never changes."""

    packs_written: Callable[[], None] | None = None
    """What rank 0 does once its packs are written."""

    def __init__(self, folder: Path, world: int, sharing: int) -> None:
        super().__init__(folder, world)
        self.smaller = [
            IncrementalState(Compact(codecs="never"), Experience(equal=1.0)) if rank < sharing else None
            for rank in range(world)
        ]

    def request(self, rank: int, step: int, timeout_s: float, value: int) -> SaveRequest:
        """See ``Ranks``."""
        usual = super().request(rank, step, timeout_s, (value + 7 * step) % 256)
        still = Item(f"still.{rank}@rank{rank}", "uint8", (len(STILL),), "buffer", Bytes(STILL), None, False)
        written = self.packs_written if rank == 0 else None
        return replace(usual, items=[*usual.items, still], smaller=self.smaller[rank], packs_written=written)


def bodies(ranks: Ranks) -> list[Any]:
    """Return the body of each live COMMIT."""
    return [checkpoint.body for checkpoint in fold(ranks.attempt.view()).live]


@pytest.mark.parametrize("sharing", [3, 1])
def test_the_commit_lists_the_donors_of_all_ranks(sharing: int, tmp_path: Path) -> None:
    """One record lists the donors of all ranks. Every checkpoint is complete, and few bytes are new."""
    ranks = Sharing(tmp_path, 3, sharing)
    for step in range(4):
        results = ranks.save(step)
        assert all(isinstance(result, SaveReport) for result in results), results
    ranks.check()
    first, *later = bodies(ranks)
    assert first.requires == []
    for commit in later:
        assert commit.requires == [first.id]
        assert commit.new_bytes <= first.new_bytes - sharing * (len(STILL) - 200)
        assert commit.stored_bytes == pytest.approx(first.stored_bytes, rel=0.1)
    view = ranks.attempt.view()
    opened = open_checkpoint(
        ranks.attempt.store, "run", fold(view).live[-1], store_id=view.store_id, run_id=view.run_id
    )
    assert set(opened.root.features) == {"short-parts", "stored-chunks"}


class Trained(Sharing):
    """A never trained parameter that does not change, and a trained row. No save was seen before."""

    def __init__(self, folder: Path, world: int, run: str) -> None:
        Ranks.__init__(self, folder, world, run)
        self.smaller = [IncrementalState(Compact(codecs="never")) for _ in range(world)]

    def request(self, rank: int, step: int, timeout_s: float, value: int) -> SaveRequest:
        """See ``Ranks``."""
        usual = super().request(rank, step, timeout_s, value)
        row, still = usual.items
        return replace(
            usual, items=[replace_struct(row, role="param", trainable=True), replace_struct(still, role="param")]
        )


def test_ranks_that_branch_off(tmp_path: Path) -> None:
    """Each rank reuses chunks of its part in the parent run, some of them of an earlier checkpoint there. The record
    requires all these checkpoints, the root has the feature, and the parent's retention keeps the checkpoints."""
    ranks = Trained(tmp_path, 3, "run")
    for step in range(4):
        assert all(isinstance(result, SaveReport) for result in ranks.save(step))
    newest = fold(ranks.attempt.view()).live[-1]
    assert newest.body.requires
    branch(Run(ranks.attempt.store, "run"), newest, "twig")
    twigs = Trained(tmp_path, 3, "twig")
    for step in range(4, 7):
        results = twigs.save(step)
        assert all(isinstance(result, SaveReport) for result in results), results
        twigs.check()
        ranks.check()
        for run in ("run", "twig"):
            execute(plan_prune(ranks.attempt.store, run, Keep(last=1)), ranks.attempt.store)
            execute_sweep(plan_sweep(ranks.attempt.store, run), ranks.attempt.store)
    first, *_, last = bodies(twigs)
    assert first.home == "run"
    assert set(last.requires) >= {newest.id, *newest.body.requires}
    assert last.new_bytes <= last.stored_bytes - 3 * (len(STILL) - 200)
    view = twigs.attempt.view()
    opened = open_checkpoint(
        twigs.attempt.store, "twig", fold(view).live[-1], store_id=view.store_id, run_id=view.run_id
    )
    assert set(opened.root.features) == {"short-parts", "stored-chunks", "other-runs"}


def test_donors_stay_for_all_ranks(tmp_path: Path) -> None:
    """Retention between saves, with another rank's chunks in each of the last two: nothing that is needed goes."""
    ranks = Sharing(tmp_path, 2, 2)
    for step in range(5):
        if step == 2:  # rank 1 stores everything itself once, so the two ranks have different donors
            assert ranks.smaller[1] is not None
            ranks.smaller[1].forget()
            ranks.smaller[1].seen.equal = 1.0
        assert all(isinstance(result, SaveReport) for result in ranks.save(step))
        execute(plan_prune(ranks.attempt.store, "run", Keep(last=1)), ranks.attempt.store)
        execute_sweep(plan_sweep(ranks.attempt.store, "run"), ranks.attempt.store)
        ranks.check()
    *donors, newest = bodies(ranks)
    assert newest.requires == [checkpoint.id for checkpoint in donors] == ["0000000000", "0000000002"]


def test_a_donor_that_was_retired_fails_all_of_them(tmp_path: Path) -> None:
    """If a donor was retired, the save fails on all ranks, and the next save stores everything itself."""
    ranks = Sharing(tmp_path, 2, 2)
    assert all(isinstance(result, SaveReport) for result in ranks.save(0))

    def retire() -> None:
        ranks.attempt.place.log.append(
            lambda view: (RetireBody(ids=["0000000000"], reason="by hand"), fold(view).epoch)
        )

    ranks.packs_written = retire
    results = ranks.save(1)
    ranks.packs_written = None
    assert all(isinstance(result, SaveFailed) for result in results), results
    assert any("was retired" in result.what for result in results)
    assert all(isinstance(result, SaveReport) for result in ranks.save(2))
    ranks.check()
    assert [commit.requires for commit in bodies(ranks)] == [[]]


def test_more_donors_than_a_name_can_list(tmp_path: Path) -> None:
    """If the donors do not fit into the record's name, everything is stored."""
    ranks = Sharing(tmp_path, 2, 2)
    assert all(isinstance(result, SaveReport) for result in ranks.save(0))
    for smaller in ranks.smaller:
        assert smaller is not None
        smaller.donors = tuple(f"{number:010d}" for number in range(DONORS_MAX + 1))
    assert all(isinstance(result, SaveReport) for result in ranks.save(1))
    assert [commit.requires for commit in bodies(ranks)] == [[], []]
