"""Copies of checkpoints with codecs or shared chunks: they need no other checkpoint, and are no larger than necessary."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.commit.test_derived import Mixed
from tests.commit.test_smaller import State, body_of, check, eager, request, state, weights

import relight
from relight.catalog import Run
from relight.catalog.tiers import announce, drained_bytes
from relight.commit import Attempt
from relight.drain import drain, scrub
from relight.errors import CorruptCheckpoint, LeaseHeld, SaveFailed, StoreUnavailable
from relight.format.chunk_locations import OWN
from relight.format.names import CheckpointDir
from relight.format.records import RetireBody
from relight.log import Log, fold
from relight.policy import Tiers, tier
from relight.reader import Opened, verify_checkpoint
from relight.reader.pack_reader import open_pack
from relight.reclaim import execute, execute_sweep, plan_prune, plan_sweep
from relight.store import ByteStore, LocalStore, MemoryStore, put
from relight.store.base import Writer
from relight.store.wrapper import StoreWrapper
from relight.transfer import copying, execute_copy, plan_copy
from relight.transfer.repack import execute_repack, plan_repack
from relight.transfer.shared_copy import copy_together


def copied(source: Run, which: str, target: ByteStore, run: str = "r") -> str:
    """Copy a checkpoint. Return the copy's id."""
    checkpoint = source.history().find(which)
    assert checkpoint is not None
    report = execute_copy(plan_copy(source, [checkpoint], target, run))
    assert report.damaged == []
    return report.copied[0][1]


def files(root: Path) -> dict[str, bytes]:
    """Return the files in all checkpoint directories by name."""
    return {path.name: path.read_bytes() for path in root.glob("r/0*/*")}


def test_a_copy_stands_by_itself(tmp_path: Path) -> None:
    """A copy needs no other checkpoint.

    Coded chunks stay coded, shared chunks become its own. A copy of the copy is identical.
    """
    store, smaller = LocalStore(tmp_path / "s"), eager()
    attempt = Attempt.begin(store, "r")
    contents = state()
    attempt.save(request(0, contents, smaller))
    contents = {**contents, "adapter": weights(0.25, 7)}
    second = attempt.save(request(1, contents, smaller))
    assert body_of(store, "r", second.id).requires
    target, further = LocalStore(tmp_path / "t"), LocalStore(tmp_path / "u")
    copy = copied(Run(store, "r"), second.id, target)
    check(target, "r", copy, contents)
    body = body_of(target, "r", copy)
    whole = sum(values.nbytes for values in contents.values())
    assert body.requires == [] and body.stored_bytes == body.new_bytes < 0.9 * whole
    others = ("root.json", "draft.json")
    assert sum(len(data) for name, data in files(tmp_path / "t").items() if name not in others) == body.stored_bytes
    again = copied(Run(target, "r"), copy, further)
    check(further, "r", again, contents)
    chunks = [
        {name: data for name, data in files(tmp_path / folder).items() if name.endswith(".chunks")} for folder in "tu"
    ]
    assert chunks[0] == chunks[1] != {}


def test_an_uncoded_pack_is_a_plain_file(tmp_path: Path) -> None:
    """A copy of a shared but uncoded pack is a plain file that other tools can open."""
    store, smaller = LocalStore(tmp_path / "s"), eager(codecs="never")
    attempt = Attempt.begin(store, "r")
    attempt.save(request(0, state(), smaller))
    contents = {**state(), "adapter": weights(0.25, 7)}
    second = attempt.save(request(1, contents, smaller))
    assert body_of(store, "r", second.id).requires
    copy = copied(Run(store, "r"), second.id, LocalStore(tmp_path / "t"))
    check(LocalStore(tmp_path / "t"), "r", copy, contents)
    assert not [name for name in files(tmp_path / "t") if name.endswith(".chunks")]
    run = Run(LocalStore(tmp_path / "t"), "r")
    assert "stored-chunks" not in run.open(run.history().live[0]).root.features


def test_differences_are_written_out_and_what_is_derived_or_inexact_stays(tmp_path: Path) -> None:
    """Copies of what the agent writes: each kind of chunk restores to the same bits, without another checkpoint."""
    url, mixed = tmp_path / "s" / "run", Mixed(torch.bfloat16)
    rules = relight.Compact(codecs="always", full_every=8, lossy={"optimizer/*/exp_avg": "int8"})
    with relight.Checkpointer(
        url,
        **mixed.components,
        save=relight.every(steps=1),
        compact=rules,
        background=True,
        limits=relight.Limits(when_busy="queue"),
    ) as ckpt:
        ckpt.restore()
        for step in range(4):
            mixed.step()
            ckpt.save(step)
    source = Run(LocalStore(tmp_path / "s"), "run")
    before, after = Counter[str](), Counter[str]()
    for checkpoint in source.history().live:
        target = LocalStore(tmp_path / f"t{checkpoint.step}")
        copy = copied(source, checkpoint.id, target, "run")
        run = Run(target, "run")
        assert verify_checkpoint(target, run.view(), run.history().find(copy)) == []  # type: ignore[arg-type]
        for counts, opened in ((before, source.open(checkpoint)), (after, run.open(run.history().find(copy)))):  # type: ignore[arg-type]
            for part in opened.parts:
                for pack in part.packs:
                    for piece in pack.stored.pieces if pack.stored is not None else []:
                        counts["different"] += piece.base is not None
                        counts["derived"] += not piece.codec.portable
                        counts["lossy"] += not piece.codec.exact
                        counts["elsewhere"] += piece.home != OWN
        first, second = (
            relight.load(url, checkpoint.step),
            relight.load(tmp_path / f"t{checkpoint.step}" / "run", checkpoint.step),
        )
        assert torch.equal(first["model"]["2.weight"], second["model"]["2.weight"])
    assert min(before[kind] for kind in ("different", "derived", "lossy")) > 0, before
    assert after["different"] == after["elsewhere"] == 0
    assert (after["derived"], after["lossy"]) == (before["derived"], before["lossy"])


def test_a_pack_repaired_as_a_file_is_copied_as_a_file() -> None:
    """A pack next to its damaged chunks is a repair: the copy uses the pack and none of the chunks."""
    store = MemoryStore()
    attempt = Attempt.begin(store, "r")
    saved = attempt.save(request(0, state(), eager()))
    run = Run(store, "r")
    checkpoint = run.history().live[0]
    opened = run.open(checkpoint)
    for part in opened.parts:
        for pack in part.packs:
            reader = open_pack(store, opened.prefix, pack)
            whole = bytearray(reader.size)
            reader.read_into(0, memoryview(whole))
            reader.close()
            put(store, f"{opened.prefix}/{pack.file}", bytes(whole))
            chunks = f"{opened.prefix}/{pack.file.removesuffix('.safetensors')}.chunks"
            data = bytearray(store.get(chunks, 1 << 30))
            data[len(data) // 2] ^= 1
            store.delete(chunks)
            put(store, chunks, bytes(data))
    target = MemoryStore()
    copy = copied(run, saved.id, target)
    check(target, "r", copy, state())
    assert body_of(target, "r", copy).stored_bytes > body_of(store, "r", saved.id).stored_bytes


class FailsOnce(StoreWrapper):
    """Refuses the first pack."""

    failed = False

    def rewrite(self, key: str, size: int) -> Writer:
        """See ``Rewrites``."""
        self._refuse(key)
        return super().rewrite(key, size)

    def write(self, key: str, size: int) -> Writer:
        """See ``ByteStore``."""
        self._refuse(key)
        return super().write(key, size)

    def _refuse(self, key: str) -> None:
        if "/pack-" in key and not self.failed:
            self.failed = True
            raise StoreUnavailable("the connection broke", where=key)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_repack_between_draft_and_copy_changes_no_byte(tmp_path: Path, damaged: bool) -> None:
    """A draft has chunks that stay coded. A repack of the original before the copy does not change what the copy stores, and if the
    stored chunks are damaged by then, another draft copies the plain file."""
    source = LocalStore(tmp_path / "s")
    attempt, smaller = Attempt.begin(source, "r"), eager()
    attempt.save(request(0, state(), smaller))
    contents = {**state(), "base/a": weights(9, 7)}
    attempt.save(request(1, contents, smaller))
    run, target = Run(source, "r"), LocalStore(tmp_path / "t")
    newest = run.history().live[-1]
    assert newest.requires
    log = Log(target, "r")
    log.start()
    with pytest.raises(StoreUnavailable, match="connection broke"):
        copy_together(run.open(newest), FailsOnce(target), log, fold(log.read()).epoch, command=True)
    (draft,) = (tmp_path / "t" / "r").glob("0*/draft.json")
    assert b'"coded":true' in draft.read_bytes()
    assert execute_repack(plan_repack(run, [newest.id])).repacked == [newest.id]
    if damaged:
        (chunks,) = (tmp_path / "s" / "r").glob("0000000001-*/*.chunks")
        data = bytearray(chunks.read_bytes())
        data[len(data) // 2] ^= 1
        chunks.write_bytes(data)
    opened = run.open(run.history().live[-1])
    copy = copy_together(opened, target, log, fold(log.read()).epoch, command=True).id
    copied = Run(target, "r")
    checkpoint = copied.history().find(copy)
    assert checkpoint is not None and checkpoint.body.new_bytes > 1 << 20
    assert verify_checkpoint(target, copied.view(), checkpoint) == []
    check(target, "r", copy, contents)


def test_a_repack_during_a_copy_by_one_process_makes_another_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the original is repacked and its stored chunks are lost after the draft, the copy begins again, and is whole."""
    source = LocalStore(tmp_path / "s")
    attempt, smaller = Attempt.begin(source, "r"), eager()
    attempt.save(request(0, state(), smaller))
    contents = {**state(), "base/a": weights(9, 7)}
    attempt.save(request(1, contents, smaller))
    run, target, real = Run(source, "r"), LocalStore(tmp_path / "t"), copying.stays_coded

    def then_repacked(opened: Opened) -> bool:
        coded = real(opened)
        if coded:
            execute_repack(plan_repack(run))
            (chunks,) = (tmp_path / "s" / "r").glob("0000000001-*/*.chunks")
            chunks.unlink()
        return coded

    monkeypatch.setattr(copying, "stays_coded", then_repacked)
    copy = copied(run, run.history().live[-1].id, target)
    check(target, "r", copy, contents)
    assert len(list((tmp_path / "t" / "r").glob("0*"))) == 1


def test_a_pack_of_another_length_is_not_finished(tmp_path: Path) -> None:
    """A pack that gets more or fewer bytes than announced is an error, in stores that would cut or pad it, too."""
    for store in (LocalStore(tmp_path / "t"), LocalStore(tmp_path / "u", direct=False), MemoryStore()):
        for size in (1 << 20, 3 << 20):
            with pytest.raises(SaveFailed, match="announced"):
                copying.write_pack_from(store.write("r/pack", size), iter([memoryview(bytes(2 << 20))]), size, "r/pack")
        assert [entry.name for entry in store.list("r")] == []


def test_a_damaged_chunk_is_not_copied(tmp_path: Path) -> None:
    """If any bit of a coded file is flipped, no copy is made."""
    store = LocalStore(tmp_path / "s")
    saved = Attempt.begin(store, "r").save(request(0, {"base": weights(5)}, eager()))
    (chunks,) = (tmp_path / "s" / "r").glob("0*/*.chunks")
    whole = chunks.read_bytes()
    run = Run(store, "r")
    for offset in range(0, len(whole), len(whole) // 7):
        data = bytearray(whole)
        data[offset] ^= 4
        chunks.write_bytes(data)
        target = MemoryStore()
        report = execute_copy(plan_copy(run, run.history().live, target, "r"))
        assert [(checkpoint_id, type(error)) for checkpoint_id, error in report.damaged] == [
            (saved.id, CorruptCheckpoint)
        ]
        assert [entry.name for entry in target.list("r")] == ["log"]


@pytest.mark.parametrize("file", ["root.json", "part-00000.msgpack", "pack-00000-000.chunks"])
def test_scrubbing_repairs_a_further_tier(tmp_path: Path, file: str) -> None:
    """A missing or damaged file of a coded copy is repaired from the nearest tier, which stores it in another way."""
    attempt, smaller = Attempt.begin(LocalStore(tmp_path / "near"), "r"), eager()
    announce(
        attempt.place.log,
        Tiers(near=str(tmp_path / "near" / "r"), far=str(tmp_path / "far" / "r")).tiers,
        attempt.epoch,
    )
    attempt.save(request(0, state(), smaller))
    contents = {**state(), "adapter": weights(0.25, 7)}
    attempt.save(request(1, contents, smaller))
    assert not drain(attempt.store, "r").errors
    far = LocalStore(tmp_path / "far")
    (path,) = (tmp_path / "far" / "r").glob(f"0000000001-*/{file}")
    whole = path.read_bytes()
    for damaged in (None, bytes([whole[0] ^ 1]) + whole[1:], whole[: len(whole) // 2]):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        report = scrub(attempt.store, "r")
        assert report.damage and all(
            finding.tier == "far" and finding.repaired_from == "near" for finding in report.damage
        ), report.damage
        run = Run(far, "r")
        check(far, "r", run.history().live[-1].id, contents)
        assert scrub(attempt.store, "r").damage == []
        if not file.endswith(".chunks"):
            assert path.read_bytes() == whole
        else:  # a repaired pack is a file next to them
            path.with_name("pack-00000-000.safetensors").unlink()
            path.write_bytes(whole)


def shared(
    folder: Path, count: int, keep: relight.Keep | None = None, **rules: Any
) -> tuple[Attempt, list[dict[str, Any]]]:
    """Save a frozen base and a changing adapter several times, and drain each save. Return the attempt and all
    contents."""
    attempt, smaller, wanted = Attempt.begin(LocalStore(folder / "near"), "r"), eager(**rules), []
    tiers = Tiers(near=str(folder / "near" / "r"), far=tier(str(folder / "far" / "r"), keep=keep))
    announce(attempt.place.log, tiers.tiers, attempt.epoch)
    for step in range(count):
        wanted.append({**state(), "adapter": weights(0.25, 100 + step)})
        attempt.save(request(step, wanted[-1], smaller))
        report = drain(attempt.store, "r")
        assert not report.errors and len(report.copied) == 1
    return attempt, wanted


@pytest.mark.parametrize("codecs", ["always", "never"])
def test_a_tier_takes_only_what_it_has_not(tmp_path: Path, codecs: str) -> None:
    """Chunks that the tier already has are not copied again. The copies share chunks, and each one is complete."""
    attempt, wanted = shared(tmp_path, 4, codecs=codecs)
    far = LocalStore(tmp_path / "far")
    live = Run(far, "r").history().live
    assert [bool(checkpoint.requires) for checkpoint in live] == [False, True, True, True]
    adapter = wanted[0]["adapter"].nbytes
    assert all(checkpoint.body.new_bytes < 1.2 * adapter + 30_000 for checkpoint in live[1:])
    assert (
        sum(len(path.read_bytes()) for path in (tmp_path / "far" / "r").glob("0*/pack*"))
        < live[0].body.stored_bytes + 4 * adapter
    )
    for checkpoint, contents in zip(live, wanted, strict=True):
        check(far, "r", checkpoint.id, contents)
    near = Run(attempt.store, "r").history()
    assert [bool(checkpoint.requires) for checkpoint in near.live] == [False, True, True, True]
    assert drained_bytes(near, "far") == {checkpoint.original_id: checkpoint.body.new_bytes for checkpoint in live}


def test_donors_stay_in_the_tier(tmp_path: Path) -> None:
    """Retention and sweeps of a tier keep donors. Kept checkpoints are complete."""
    attempt, wanted = shared(tmp_path, 6, relight.keep(last=2))
    far = LocalStore(tmp_path / "far")
    live = Run(far, "r").history().live
    assert [checkpoint.step for checkpoint in live] == [0, 4, 5], "the first has what the others need"
    execute_sweep(plan_sweep(far, "r"), far)
    for checkpoint in live:
        check(far, "r", checkpoint.id, wanted[checkpoint.step])


def test_a_donor_that_goes_meanwhile_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the donor is retired between the start of a copy and its commit, no copy that needs it is committed and nothing is left. The next attempt copies in full."""
    attempt, wanted = shared(tmp_path, 1)
    source, far, smaller = Run(attempt.store, "r"), LocalStore(tmp_path / "far"), eager()
    smaller_again = Attempt.begin(LocalStore(tmp_path / "other"), "r")
    smaller_again.save(request(0, wanted[0], smaller))
    contents = {**wanted[0], "adapter": weights(0.25, 9)}
    smaller_again.save(request(1, contents, smaller))
    other, inner = Run(smaller_again.store, "r"), copying.check_written

    def meanwhile(*given: Any) -> tuple[str, int]:
        log = Log(far, "r")
        log.read()
        ids = [checkpoint.id for checkpoint in Run(far, "r").history().live]
        log.append(lambda view: (RetireBody(ids=ids, reason="by hand"), fold(view).epoch))
        return inner(*given)

    newest = other.history().live[-1]
    assert newest.requires
    monkeypatch.setattr(copying, "check_written", meanwhile)
    with pytest.raises(LeaseHeld, match="retired meanwhile"):
        copying.copy_one(other.open(newest), far, Log(far, "r"), None)
    monkeypatch.undo()
    assert Run(far, "r").history().live == [] and len(list((tmp_path / "far" / "r").glob("0000000001-*"))) == 0
    copy = copying.copy_one(other.open(newest), far, Log(far, "r"), None)
    check(far, "r", copy, contents)
    assert body_of(far, "r", copy).requires == [] and source.history().live


def repacked_tier(folder: Path) -> tuple[Attempt, State, LocalStore]:
    """Copy two incremental saves, and make a third. At the target, repack the newest copy and retire its donor. Return the target
    and what the third contains."""
    attempt, smaller = Attempt.begin(LocalStore(folder / "near"), "r"), eager()
    tiers = Tiers(near=str(folder / "near" / "r"), far=str(folder / "far" / "r"))
    announce(attempt.place.log, tiers.tiers, attempt.epoch)
    for step in range(2):
        attempt.save(request(step, {**state(), "adapter": weights(0.25, 100 + step)}, smaller))
        assert not drain(attempt.store, "r").errors
    contents = {**state(), "adapter": weights(0.25, 102)}
    attempt.save(request(2, contents, smaller))
    far = LocalStore(folder / "far")
    execute_repack(plan_repack(Run(far, "r")))
    execute(plan_prune(far, "r", relight.keep(last=1)), far)
    assert [checkpoint.step for checkpoint in Run(far, "r").history().live] == [1]
    return attempt, contents, far


@pytest.mark.parametrize("how", ["alone", "together", "drain", "begun before"])
def test_copies_continue_after_a_repack_at_the_target(tmp_path: Path, how: str) -> None:
    """A repacked copy's former donors may be retired. Later incremental copies take no chunk from it, and are committed."""
    attempt, contents, far = repacked_tier(tmp_path)
    newest, log = Run(attempt.store, "r").history().live[-1], Log(far, "r")
    opened = Run(attempt.store, "r").open(newest)
    assert newest.requires
    epoch = fold(log.read()).epoch
    if how == "alone":
        copying.copy_one(opened, far, log, None)
    elif how == "drain":
        assert not drain(attempt.store, "r").errors
    else:
        if how == "begun before":
            directory = CheckpointDir(newest.step, newest.id, epoch)
            donor = fold(log.read()).live[-1].id
            draft = copying.CopyDraft(newest.original_id, donor, True, [])
            put(far, f"r/{directory}/draft.json", msgspec.json.encode(draft))
        copy_together(opened, far, log, epoch)
    (copy,) = (checkpoint for checkpoint in Run(far, "r").history().live if checkpoint.step == 2)
    assert not copy.requires
    check(far, "r", copy.id, contents)
    assert len(list((tmp_path / "far" / "r").glob("0000000002-*"))) == 1 + (how == "begun before")


@pytest.mark.parametrize("codecs", ["always", "never"])
@pytest.mark.parametrize("file", ["root.json", "part-00000.msgpack"])
def test_scrubbing_repairs_a_copy_that_shares_chunks(tmp_path: Path, file: str, codecs: str) -> None:
    """Root and part of a copy that shares chunks in its tier are repaired from the nearest tier, to the byte."""
    attempt, wanted = shared(tmp_path, 3, codecs=codecs)
    far = LocalStore(tmp_path / "far")
    for step in (1, 2):
        (path,) = (tmp_path / "far" / "r").glob(f"000000000{step}-*/{file}")
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        report = scrub(attempt.store, "r")
        assert [(finding.tier, finding.repaired_from) for finding in report.damage] == [("far", "near")], report.damage
        assert path.read_bytes() == whole
    for checkpoint, contents in zip(Run(far, "r").history().live, wanted, strict=True):
        check(far, "r", checkpoint.id, contents)


def test_a_new_tier_gets_each_in_turn(tmp_path: Path) -> None:
    """Copied by hand, all at once, from where they share: the first in full, the others with it."""
    attempt, wanted = shared(tmp_path, 3)
    source, target = Run(attempt.store, "r"), LocalStore(tmp_path / "t")
    report = execute_copy(plan_copy(source, source.history().live, target, "r"))
    assert len(report.copied) == 3 and not report.damaged
    live = Run(target, "r").history().live
    assert [len(checkpoint.requires) for checkpoint in live] == [0, 1, 1]
    for checkpoint, contents in zip(live, wanted, strict=True):
        check(target, "r", checkpoint.id, contents)
