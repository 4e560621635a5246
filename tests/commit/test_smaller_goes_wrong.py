"""Saves that share chunks, when something else goes wrong: bytes that come damaged once, donors that rot or go, logs, tiers, repairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_smaller import body_of, check, eager, read, request, state, weights
from torch import nn

import relight
from relight.catalog import Run
from relight.catalog.tiers import announce
from relight.commit import Attempt
from relight.commit.chunk_index import IncrementalState
from relight.drain import drain
from relight.drain.scrub import scrub
from relight.log import fold
from relight.policy import Keep
from relight.policy.compact import Compact, Conditions, Experience
from relight.policy.keep import Candidate, decide_keep
from relight.reader.verify import verify_checkpoint
from relight.reclaim import execute, plan_prune, prune_a_share
from relight.reclaim.needs import oldest_together, unsure
from relight.run_records.verification import record_checked
from relight.store import LocalStore, MemoryStore


class Flaky(MemoryStore):
    """Gives one byte of one file wrong, once."""

    spoil = ""

    def open(self, key: str) -> Any:
        """See ``ByteStore``."""
        reader = super().open(key)
        if key == self.spoil:
            self.spoil = ""
            usual = reader.read_into

            def read_into(offset: int, into: memoryview) -> None:
                usual(offset, into)
                if into[:] and not spoilt:
                    spoilt.append(offset)
                    into[len(into) // 2] ^= 1

            spoilt: list[int] = []
            reader.read_into = read_into
        return reader


def test_bytes_damaged_in_one_read_are_read_again() -> None:
    """Neither a restore nor retention takes a transient read error of a coded chunk for damage."""
    store, smaller = Flaky(), eager()
    attempt = Attempt.begin(store, "r")
    contents = state()
    saved = attempt.save(request(0, contents, smaller))
    (key,) = [key for key in store._files if key.endswith(".chunks")]
    checkpoint = Run(store, "r").history().find(saved.id)
    assert checkpoint is not None
    store.spoil = key
    assert verify_checkpoint(store, Run(store, "r").view(), checkpoint) == [] and not store.spoil
    store.spoil = key
    assert (
        np.array_equal(read(store, "r", saved.id)["base/a"].view("u1"), contents["base/a"].view("u1"))
        and not store.spoil
    )


def flipped(file: Path) -> None:
    """Flip a bit in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def test_damaged_chunks_are_stored_again(tmp_path: Path) -> None:
    """Retention verifies the newest checkpoint before it retires others.

    If that is damaged, the next save does not build on it.
    """
    store = LocalStore(tmp_path / "s", direct=False)
    attempt = Attempt.begin(store, "r")
    attempt.make_smaller(Compact(codecs="never"), Experience(equal=1.0))
    contents = state()
    first = attempt.save(request(0, contents, None))
    attempt.save(request(1, {**contents, "adapter": weights(0.25, 5)}, None))
    second = attempt.save(request(2, {**contents, "adapter": weights(0.25, 6)}, None))
    (file,) = (tmp_path / "s" / "r").glob(f"*{first.id}*/*.chunks")
    flipped(file)
    verified: dict[str, bool] = {}
    prune_a_share(store, "r", Keep(last=1), verified=verified, log=attempt.place.log, epoch=attempt.epoch)
    assert verified[second.id] is False
    attempt.distrust(verified)
    third = attempt.save(request(3, contents, None))
    assert body_of(store, "r", third.id).requires == []
    check(store, "r", third.id, contents)


def test_damage_that_another_process_recorded_is_not_built_on(tmp_path: Path) -> None:
    """After ``relight verify`` has recorded a damaged donor, the next save stores everything, and verifies."""
    store = LocalStore(tmp_path / "s", direct=False)
    attempt = Attempt.begin(store, "r")
    attempt.make_smaller(Compact(codecs="never"), Experience(equal=1.0))
    contents = state()
    first = attempt.save(request(0, contents, None))
    attempt.save(request(1, {**contents, "adapter": weights(0.25, 5)}, None))
    (file,) = (tmp_path / "s" / "r").glob(f"*{first.id}*/*.chunks")
    flipped(file)
    record_checked(store, "r", {first.id: f"{file.name}: damaged"}, "relight verify")
    third = attempt.save(request(2, contents, None))
    assert body_of(store, "r", third.id).requires == []
    check(store, "r", third.id, contents)


def test_repaired_chunks_of_a_donor_are_not_built_on(tmp_path: Path) -> None:
    """A repair writes a whole pack next to the damaged chunks. Later saves do not refer to these chunks, in no tier."""
    near, far = LocalStore(tmp_path / "near", direct=False), LocalStore(tmp_path / "far", direct=False)
    attempt = Attempt.begin(near, "r")
    tiers = relight.Tiers(near=str(tmp_path / "near" / "r"), far=str(tmp_path / "far" / "r"))
    announce(attempt.place.log, tiers.tiers, attempt.epoch)
    smaller, contents = eager(), state()
    for step in range(2):
        attempt.save(request(step, {**contents, "adapter": weights(0.25, step)}, smaller))
        assert not drain(near, "r").errors
    for folder in ("near", "far"):
        (file,) = (tmp_path / folder / "r").glob("0000000000-*/*.chunks")
        flipped(file)
        assert all(damage.repaired_from for damage in scrub(near, "r").damage)
        newest = attempt.save(request(len(Run(near, "r").history().live), contents, smaller))
        assert not drain(near, "r").errors
        for store in (near, far):
            run = Run(store, "r")
            for checkpoint in run.history().live:
                assert verify_checkpoint(store, run.view(), checkpoint) == [], (folder, store, checkpoint.step)
            check(store, "r", newest.id, contents)


def test_a_resume_does_not_build_on_what_it_skipped(tmp_path: Path) -> None:
    """A resume skips checkpoints with damaged shared bytes. Its saves share nothing with them."""
    url, model = tmp_path / "s" / "r", nn.Linear(600, 600)
    optimizer = torch.optim.AdamW([model.bias])
    compact = relight.Compact(codecs="never", full_every=2)
    for begin, steps in ((0, 4), (2, 5)):
        with relight.Checkpointer(
            url, model=model, optimizer=optimizer, compact=compact, background=False, keep=relight.keep(last=50)
        ) as ckpt:
            assert ckpt.restore() == begin
            for step in range(begin, steps):
                model.bias.grad = torch.randn(600)
                optimizer.step()
                ckpt.save(step)
        if not begin:
            live = relight.open(url).checkpoints()
            assert [bool(checkpoint.requires) for checkpoint in live] == [False, True, False, True]
            (file,) = url.glob("0000000002-*/pack*")
            data = bytearray(file.read_bytes())
            data[-800_000] ^= 1
            file.write_bytes(data)
    after = [findings == [] for _, findings in relight.open(url).verify()]
    assert after == [True, True, False, False, True, True, True]


def test_a_save_by_another_process_in_between(tmp_path: Path) -> None:
    """If a trainer's own save let retention remove the agent's last save, the agent's next save stores everything."""
    store = LocalStore(tmp_path / "s")
    attempt = Attempt.begin(store, "r")
    agent = Attempt(attempt.place)
    for writer in (attempt, agent):
        writer.make_smaller(Compact(codecs="never"), Experience(equal=1.0))
    contents = state()
    agent.save(request(0, contents, None))
    assert attempt.smaller is not None
    attempt.smaller.searched = True  # otherwise its save would reuse that checkpoint, and retention would keep it
    attempt.save(request(1, contents, None))
    execute(plan_prune(store, "r", Keep(last=1)), store)
    after = agent.save(request(2, contents, None))
    assert body_of(store, "r", after.id).requires == []
    check(store, "r", after.id, contents)


def test_groups_go_though_they_are_more_than_a_share(tmp_path: Path) -> None:
    """Windows of eight: retention keeps up, a share at a time."""
    store = MemoryStore()
    attempt = Attempt.begin(store, "r")
    attempt.make_smaller(Compact(codecs="never", full_every=8), Experience(equal=1.0))
    contents, most = {"base": weights(1.5), "noise": weights(0.1)}, 0
    for step in range(30):
        contents = {**contents, "noise": weights(0.1, 100 + step)}
        attempt.save(request(step, contents, None))
        prune_a_share(store, "r", Keep(last=2), verified={}, log=attempt.place.log, epoch=attempt.epoch)
        most = max(most, len(Run(store, "r").history().live))
    assert most <= 10
    assert all(
        verify_checkpoint(store, Run(store, "r").view(), checkpoint) == []
        for checkpoint in Run(store, "r").history().live
    )


def test_checkpoints_that_need_each_other_go_together(tmp_path: Path) -> None:
    """Checkpoints that need each other are retired together."""
    store, smaller = MemoryStore(), eager()
    attempt = Attempt.begin(store, "r")
    contents = state()
    ids = [
        attempt.save(request(step, {**contents, "step": np.array([step], "<i8")}, smaller if step < 3 else None)).id
        for step in range(6)
    ]
    history = Run(store, "r").history()
    assert oldest_together(history, ids[:5], None) == ids[:5]
    assert oldest_together(history, ids[:5], 2) == ids[:3]  # the first three need each other
    assert oldest_together(history, ids[3:5], 1) == ids[3:4]
    assert oldest_together(history, ids[:5], 4) == ids[:4]


def test_a_damaged_record_keeps_what_it_may_need(tmp_path: Path) -> None:
    """A damaged record may have been a COMMIT. While checkpoints of the run share chunks, no older one is deleted."""
    store, smaller = LocalStore(tmp_path / "s"), eager()
    attempt = Attempt.begin(store, "r")
    contents = state()
    ids = [
        attempt.save(request(step, {**contents, "adapter": weights(0.25, 9 + step)}, smaller)).id for step in range(3)
    ]
    smaller.forget()
    ids += [attempt.save(request(step, contents, smaller)).id for step in range(3, 6)]
    third = next(checkpoint for checkpoint in Run(store, "r").history().live if checkpoint.id == ids[2])
    record = tmp_path / "s" / "r" / "log" / f"{third.seq:012d}.json"
    data = bytearray(record.read_bytes())
    data[200] ^= 1
    record.write_bytes(data)
    view = Run(store, "r").view()
    assert unsure(view, fold(view)) == set(ids[:2])
    execute(plan_prune(store, "r", Keep(last=1)), store)
    live = [checkpoint.id for checkpoint in Run(store, "r").history().live]
    assert live == [*ids[:2], ids[3], ids[5]]  # the newest one's donors, and possible donors


def test_a_repair_that_was_cut_off_does_no_harm(tmp_path: Path) -> None:
    """A part of a pack next to its chunks is skipped."""
    store, smaller = LocalStore(tmp_path / "s"), eager()
    attempt = Attempt.begin(store, "r")
    contents = state()
    saved = attempt.save(request(0, contents, smaller))
    (chunks,) = (tmp_path / "s" / "r").glob(f"*{saved.id}*/*.chunks")
    chunks.with_suffix(".safetensors").write_bytes(b"x" * 100_000)
    check(store, "r", saved.id, contents)


def test_a_donor_that_was_cut_short_is_noticed_without_reading_it(tmp_path: Path) -> None:
    """The donor's length shows the damage, which is reported with the donor's name."""
    store, smaller = LocalStore(tmp_path / "s"), eager()
    attempt = Attempt.begin(store, "r")
    contents = state()
    first = attempt.save(request(0, contents, smaller))
    second = attempt.save(request(1, contents, smaller))
    (file,) = (tmp_path / "s" / "r").glob(f"*{first.id}*/*.chunks")
    file.write_bytes(file.read_bytes()[:-1])
    checkpoint = Run(store, "r").history().find(second.id)
    assert checkpoint is not None
    findings = verify_checkpoint(store, Run(store, "r").view(), checkpoint, data=False)
    assert findings and file.name in findings[0].detail and first.id in findings[0].detail


def test_damage_of_a_reused_chunk_names_the_donors_file(tmp_path: Path) -> None:
    """The errors of a restore and of verify name the donor's file."""
    store, smaller = LocalStore(tmp_path / "s", direct=False), eager(codecs="never")
    attempt = Attempt.begin(store, "r")
    contents = state()
    first = attempt.save(request(0, contents, smaller))
    second = attempt.save(request(1, contents, smaller))
    (file,) = (tmp_path / "s" / "r").glob(f"*{first.id}*/*.chunks")
    flipped(file)
    checkpoint = Run(store, "r").history().find(second.id)
    assert checkpoint is not None
    (finding,) = verify_checkpoint(store, Run(store, "r").view(), checkpoint)
    assert file.name in finding.detail and first.id in finding.detail
    with pytest.raises(relight.CorruptCheckpoint, match=first.id):
        read(store, "r", second.id)


def test_a_budget_counts_donors() -> None:
    """Donors that are kept for other checkpoints count in the budget, too."""

    def one(number: int, size: int, needed_by: list[str]) -> Candidate:
        return Candidate(f"{number}", number, number, {}, [], needed_by, True, "", size, float(number))

    users = [f"{number}" for number in range(1, 6)]
    checkpoints = [one(0, 100, users), *(one(number, 10, []) for number in range(1, 6))]
    assert [verdict.keep for verdict in decide_keep(Keep(budget=125), checkpoints)] == [
        True,
        False,
        False,
        False,
        True,
        True,
    ]
    assert [verdict.keep for verdict in decide_keep(Keep(budget=30), [one(number, 10, []) for number in range(5)])] == [
        False,
        False,
        True,
        True,
        True,
    ]


def test_tiers_repair_each_other(tmp_path: Path) -> None:
    """A further tier's files are repaired from a near tier that shares chunks. The opposite works, too."""
    near, far = tmp_path / "near" / "run", tmp_path / "far" / "run"
    model = nn.Linear(600, 600)
    optimizer = torch.optim.AdamW([model.bias])
    tiers = relight.Tiers(near=relight.tier(str(near)), far=relight.tier(str(far)))
    with relight.Checkpointer(
        tiers, model=model, optimizer=optimizer, compact=relight.Compact(codecs="always"), background=True
    ) as ckpt:
        ckpt.restore()
        for step in range(3):
            model.bias.grad = torch.randn(600)
            optimizer.step()
            ckpt.save(step)
    assert relight.open(near).latest().body.requires
    newest = max(far.glob("*-e*"))
    for name in ("part-00000.msgpack", "root.json", "pack-00000-000.chunks"):
        file = newest / name
        whole = file.read_bytes()
        damaged = bytearray(whole)
        damaged[len(damaged) // 2] ^= 1
        file.write_bytes(damaged)
        report = scrub(LocalStore(near.parent), "run")
        assert [finding.repaired_from for finding in report.damage] == ["near"], (name, report.damage)
        assert file.read_bytes() == whole or file.with_name("pack-00000-000.safetensors").exists()
        assert not any(findings for _, findings in relight.open(far).verify())
    newest_near = relight.open(near).latest().body
    (donor,) = near.glob(f"*{newest_near.requires[0]}*/*.chunks")
    data = bytearray(donor.read_bytes())
    data[len(data) // 2] ^= 1
    donor.write_bytes(data)
    report = scrub(LocalStore(near.parent), "run")
    far_ids = {checkpoint.id for checkpoint in relight.open(far).checkpoints()}
    donor_id = newest_near.requires[0]
    needs = {
        checkpoint.id
        for checkpoint in relight.open(near).checkpoints()
        if donor_id in (checkpoint.id, *checkpoint.requires)
    }
    assert newest_near.id in needs and {finding.id for finding in report.damage} == needs
    assert all(finding.repaired_from == ("far" if finding.id in far_ids else "") for finding in report.damage)
    assert {checkpoint.id: not findings for checkpoint, findings in relight.open(near).verify()}[newest_near.id]


def test_a_new_incremental_state_reuses_nothing() -> None:
    """A new ``IncrementalState`` knows no chunks and reuses none."""
    smaller = IncrementalState()
    smaller.check_there([])
    smaller.distrust({})
    assert smaller.choice(Conditions(2)).reuse is False and smaller.known(None).chunks == {}
