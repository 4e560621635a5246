"""Saves that write only new bytes, with codecs: their size, and that every reader gets the saved bytes."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import relight
from relight.catalog import Run
from relight.commit import Attempt, PackPlan, SaveInfo, SaveRequest, plan_save
from relight.commit.chunk_index import IncrementalState, chunks_of, rows_of
from relight.commit.save import new_id
from relight.errors import NoSpace
from relight.format import encode_tree
from relight.format.records import RetireBody
from relight.layout import Bytes, Item
from relight.layout.sources import copy_from
from relight.log import fold
from relight.policy import Keep
from relight.policy.compact import Compact, Conditions, Experience
from relight.reader.chunk_reader import read_tensors
from relight.reader.pack_reader import open_pack
from relight.reader.verify import verify_checkpoint
from relight.reclaim import execute, execute_sweep, plan_prune, plan_sweep
from relight.store import PAGE, ByteStore, LocalStore, MemoryStore, Properties, page_buffer

State = dict[str, np.ndarray]
WIDTHS = {"float32": "<f4", "int64": "<i8", "uint8": "<u1"}


def weights(megabytes: float, seed: int = 0) -> np.ndarray:
    """Return float32 values as training makes them."""
    return (np.random.default_rng(seed).standard_normal(int(megabytes * (1 << 18))) * 0.02).astype("<f4")


def state(seed: int = 0) -> State:
    """A frozen base, an adapter, a counter, noise."""
    return {
        "base/a": weights(9, seed), "base/b": weights(5.5, seed + 1), "adapter": weights(0.25, seed + 2),
        "noise": np.frombuffer(np.random.default_rng(seed + 3).bytes(3 << 20), np.uint8).copy(), "step": np.array([seed], "<i8"),
    }  # fmt: skip


def eager(**rules: Any) -> IncrementalState:
    """Reuse and codecs from the first save on."""
    return IncrementalState(Compact(**{"codecs": "always", **rules}), Experience(equal=1.0))


def request(step: int, contents: State, smaller: IncrementalState | None) -> SaveRequest:
    """A save of it."""
    names = {"<f4": "float32", "<i8": "int64", "|u1": "uint8"}
    items = [
        Item(name, names[values.dtype.str], values.shape, "param", Bytes(values.tobytes()), trainable=name == "adapter")
        for name, values in contents.items()
    ]
    return SaveRequest(SaveInfo(step=step), tree=encode_tree({}), items=items, smaller=smaller)


def stores(tmp_path: Path) -> list[ByteStore]:
    """Return stores with direct I/O, without it, and in memory."""
    return [LocalStore(tmp_path / "direct"), LocalStore(tmp_path / "cached", direct=False), MemoryStore()]


class Taken:
    """Fills a buffer of its own."""

    def __init__(self, length: int) -> None:
        self.data = bytearray(length)
        self.length = length

    def view(self) -> memoryview:
        """Return all of the memory."""
        return memoryview(self.data)


def read(store: ByteStore, run: str, which: str) -> State:
    """Return a checkpoint's contents, read by every method of a reader."""
    opened_run = Run(store, run)
    checkpoint = opened_run.history().find(which)
    assert checkpoint is not None
    opened = opened_run.open(checkpoint)
    (part,) = opened.parts
    sinks: dict[int, Any] = {index: Taken(tensor.length) for index, tensor in enumerate(part.tensors)}
    read_tensors(opened, part, sinks)
    return {
        tensor.name: np.frombuffer(sinks[index].data, WIDTHS[tensor.dtype]) for index, tensor in enumerate(part.tensors)
    }


def check(store: ByteStore, run: str, which: str, contents: State) -> None:
    """Assert that a checkpoint verifies and has the given contents."""
    opened_run = Run(store, run)
    checkpoint = opened_run.history().find(which)
    assert checkpoint is not None
    assert verify_checkpoint(store, opened_run.view(), checkpoint) == []
    seen = read(store, run, which)
    assert seen.keys() == contents.keys()
    for name, values in contents.items():
        assert np.array_equal(seen[name].view("u1"), values.reshape(-1).view("u1")), name


def body_of(store: ByteStore, run: str, which: str) -> Any:
    """Return the body of the COMMIT."""
    checkpoint = Run(store, run).history().find(which)
    assert checkpoint is not None
    return checkpoint.body


@pytest.mark.parametrize("number", range(3))
def test_only_what_is_new_is_written(number: int, tmp_path: Path) -> None:
    """A frozen base is stored once for any number of saves. Every save restores exactly."""
    store, smaller = stores(tmp_path)[number], eager()
    attempt = Attempt.begin(store, "r")
    contents, saved = state(), []
    for step in range(4):
        contents = {**contents, "adapter": weights(0.25, 50 + step), "step": np.array([step], "<i8")}
        report = attempt.save(request(step, contents, smaller))
        saved.append((report.id, contents))
    for which, values in saved:
        check(store, "r", which, values)
    first, *later = [body_of(store, "r", which) for which, _ in saved]
    assert first.requires == [] and first.new_bytes == first.stored_bytes < 0.9 * first.logical_bytes
    for commit in later:
        assert commit.new_bytes < 0.03 * commit.logical_bytes and commit.requires[0] and first.id in commit.requires
        assert first.new_bytes * 0.95 < commit.stored_bytes < first.logical_bytes
    # references are resolved: a checkpoint requires only those that store the chunks themselves
    assert [checkpoint.requires for checkpoint in later][-1] == [first.id]


def test_a_save_without_new_bytes(tmp_path: Path) -> None:
    """A save of an equal state writes only the packs' headers, a part and a root."""
    store, smaller = LocalStore(tmp_path / "s"), eager()
    attempt = Attempt.begin(store, "r")
    contents = state()
    attempt.save(request(0, contents, smaller))
    again = attempt.save(request(1, contents, smaller))
    check(store, "r", again.id, contents)
    assert body_of(store, "r", again.id).new_bytes < 4096
    assert smaller.choice(Conditions(2)).coded, "what will change is worth coding, whatever nothing changed lately"


def test_without_codecs(tmp_path: Path) -> None:
    """New chunks are stored unchanged."""
    store, smaller = LocalStore(tmp_path / "s"), eager(codecs="never")
    attempt = Attempt.begin(store, "r")
    contents = state()
    first = attempt.save(request(0, contents, smaller))
    assert body_of(store, "r", first.id).new_bytes > body_of(store, "r", first.id).logical_bytes
    contents = {**contents, "base/b": weights(5.5, 9)}
    second = attempt.save(request(1, contents, smaller))
    check(store, "r", second.id, contents)
    assert body_of(store, "r", second.id).new_bytes < 6.6 * (1 << 20)


def test_a_donor_stays_while_it_is_needed(tmp_path: Path) -> None:
    """Retention and sweeps keep a donor while a checkpoint needs it. After that it is retired."""
    store, smaller = LocalStore(tmp_path / "s"), eager()
    attempt = Attempt.begin(store, "r")
    contents = state()
    ids = []
    for step in range(3):
        contents = {**contents, "adapter": weights(0.25, 50 + step)}
        ids.append(attempt.save(request(step, contents, smaller)).id)
        execute(plan_prune(store, "r", Keep(last=1)), store)
        execute_sweep(plan_sweep(store, "r"), store)
    assert [checkpoint.id for checkpoint in Run(store, "r").history().live] == [ids[0], ids[2]]
    check(store, "r", ids[2], contents)
    contents = state(seed=90)
    last = attempt.save(request(4, contents, smaller))
    execute(plan_prune(store, "r", Keep(last=1)), store)
    execute_sweep(plan_sweep(store, "r"), store)
    assert [checkpoint.id for checkpoint in Run(store, "r").history().live] == [last.id]
    check(store, "r", last.id, contents)
    assert not list((tmp_path / "s" / "r").glob(f"*{ids[0]}*"))


def test_a_donor_that_was_retired_meanwhile() -> None:
    """If a donor is retired during a save, the save fails without files. The next save stores everything itself."""
    store, smaller = MemoryStore(), eager()
    attempt = Attempt.begin(store, "r")
    contents = state()
    first = attempt.save(request(0, contents, smaller))

    def retire() -> None:
        attempt.place.log.append(lambda view: (RetireBody(ids=[first.id], reason="by hand"), fold(view).epoch))

    files = set(store._files)
    with pytest.raises(relight.SaveFailed, match=f"chunks of checkpoint {first.id}"):
        attempt.save(dataclasses.replace(request(1, contents, smaller), packs_written=retire))
    assert {key for key in store._files if "/log/" not in key} == {key for key in files if "/log/" not in key}
    after = attempt.save(request(2, contents, smaller))
    assert body_of(store, "r", after.id).requires == []
    check(store, "r", after.id, contents)


def test_damage_is_reported_and_skipped(tmp_path: Path) -> None:
    """A restore skips a checkpoint with a flipped bit in a donor's or coded chunk. A checkpoint without it restores."""
    store, smaller = LocalStore(tmp_path / "s", direct=False), eager()
    attempt = Attempt.begin(store, "r")
    contents = state()
    first = attempt.save(request(0, contents, smaller))
    second = attempt.save(request(1, {**contents, "adapter": weights(0.25, 7)}, smaller))
    third = attempt.save(request(2, state(40), smaller))
    (file,) = (tmp_path / "s" / "r").glob(f"*{first.id}*/*.chunks")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    view = Run(store, "r").view()
    for which, wrong in ((first.id, True), (second.id, True), (third.id, False)):
        checkpoint = Run(store, "r").history().find(which)
        assert checkpoint is not None
        findings = verify_checkpoint(store, view, checkpoint)
        assert bool(findings) is wrong
        assert all("base/" in finding.tensor and which in finding.file for finding in findings)
        if wrong:
            with pytest.raises(relight.CorruptCheckpoint):
                read(store, "r", which)


def test_any_range_of_a_pack_is_read(tmp_path: Path) -> None:
    """Any range of a pack is read as from a plain file."""
    store, smaller = LocalStore(tmp_path / "s"), eager()
    attempt = Attempt.begin(store, "r")
    contents = {"base": weights(9), "noise": state()["noise"]}
    attempt.save(request(0, contents, smaller))
    second = attempt.save(request(1, {**contents, "noise": contents["noise"][::-1].copy()}, smaller))
    checkpoint = Run(store, "r").history().find(second.id)
    assert checkpoint is not None
    opened = Run(store, "r").open(checkpoint)
    for pack in opened.parts[0].packs:
        reader = open_pack(store, opened.prefix, pack)
        whole = bytearray(reader.size)
        reader.read_into(0, memoryview(whole))
        rng = np.random.default_rng(0)
        for _ in range(40):
            start, end = sorted(rng.integers(0, reader.size + 1, 2).tolist())
            into = bytearray(end - start)
            reader.read_into(start, memoryview(into))
            assert into == whole[start:end]
        with pytest.raises(relight.CorruptCheckpoint):
            reader.read_into(reader.size - 3, memoryview(bytearray(4)))
        reader.close()


class Tight(MemoryStore):
    """A store with so much room and no more."""

    room = 0

    def write(self, key: str, size: int) -> Any:
        """See ``ByteStore``."""
        if size > self.room:
            raise NoSpace("full", where=key)
        return super().write(key, size)


def half_changed(store: Tight, smaller: IncrementalState) -> tuple[Attempt, np.ndarray, np.ndarray]:
    """40 MiB are saved, half of them changed. The store has space for half, but not for all."""
    store.room = 64 << 20
    attempt = Attempt.begin(store, "r")
    noise = np.frombuffer(np.random.default_rng(0).bytes(40 << 20), np.uint8)
    attempt.save(request(0, {"noise": noise}, smaller))
    store.room = 25 << 20
    changed = noise.copy()
    changed[: 20 << 20] = changed[: 20 << 20][::-1]
    return attempt, noise, changed


def test_room_for_what_is_new_is_enough() -> None:
    """A store that has no room for all of it takes what is new."""
    store, smaller = Tight(), eager()
    attempt, noise, changed = half_changed(store, smaller)
    second = attempt.save(request(1, {"noise": changed}, smaller))
    check(store, "r", second.id, {"noise": changed})
    store.room = 10 << 20
    with pytest.raises(NoSpace):
        attempt.save(request(2, {"noise": noise[::-1].copy()}, smaller))
    check(store, "r", second.id, {"noise": changed})


def in_memory(pack: PackPlan) -> memoryview:
    """Return a pack's bytes in one piece of memory, as an agent has them."""
    image, offset = page_buffer(-(-pack.size // PAGE) * PAGE), 0
    for source in pack.sources:
        copy_from(source, 0, image[offset : offset + source.length])
        offset += source.length
    return image


@pytest.mark.parametrize("mode", ["plain", "reuse", "image"])
def test_hashing_measures_its_waiting_time(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """If hashing threads run for a third of the time, hashing is measured as three times as long."""
    stretched = SimpleNamespace(
        thread_time=time.thread_time, perf_counter=lambda: 3 * time.thread_time(), monotonic=time.monotonic
    )
    monkeypatch.setattr("relight.commit.pack_writer.time", stretched)
    attempt = Attempt.begin(MemoryStore(), "run")
    attempt.make_smaller(Compact(reuse=mode == "reuse"))
    smaller = attempt.smaller
    assert smaller is not None
    for step in range(2):
        asked = request(step, {"base": weights(40)}, smaller)
        if mode == "image":
            saved = new_id()
            plan = plan_save(asked.items, id=saved)
            plan = dataclasses.replace(
                plan, packs=[dataclasses.replace(pack, image=in_memory(pack)) for pack in plan.packs]
            )
            asked = dataclasses.replace(asked, id=saved, plan=plan)
        attempt.save(asked)
    assert 2.5 <= smaller.seen.crowd <= 3.5


def test_earlier_knows_plain_packs_too(tmp_path: Path) -> None:
    """A checkpoint without codecs can be a donor."""
    store = LocalStore(tmp_path / "s")
    attempt = Attempt.begin(store, "r")
    contents = state()
    first = attempt.save(request(0, contents, None))
    checkpoint = Run(store, "r").history().find(first.id)
    assert checkpoint is not None
    smaller = eager()
    packs = Run(store, "r").open(checkpoint).parts[0].packs
    smaller.chunks = chunks_of(packs, rows_of(checkpoint.body.dir, packs))
    second = attempt.save(request(1, contents, smaller))
    assert body_of(store, "r", second.id).new_bytes < 8192
    check(store, "r", second.id, contents)


@pytest.mark.parametrize("cuts", [[100], [1, 99], [33, 33, 34], [50, 50]])
def test_any_range_of_what_is_not_in_one_piece(cuts: list[int]) -> None:
    """A pack with several sources is sampled like a pack that is in one piece of memory."""
    from relight.commit.incremental_writer import _range

    data, offset, sources = bytes(range(100)), 0, []
    for length in cuts:
        sources.append(Bytes(data[offset : offset + length]))
        offset += length
    plan = PackPlan("pack-00000-000.safetensors", 100, sources, [100])
    for begin in range(0, 100, 7):
        for length in (1, 20, 100 - begin):
            assert (
                bytes(_range(plan, begin, min(length, 100 - begin))) == data[begin : begin + min(length, 100 - begin)]
            )


def test_no_room_in_an_encrypted_store_is_reported_as_such() -> None:
    """An encrypted store reserves the announced size, because a smaller reservation would cut off the pack."""

    class Encrypts(Tight):
        def properties(self) -> Properties:
            return dataclasses.replace(super().properties(), encrypted=True)

    smaller = eager()
    attempt, _, changed = half_changed(Encrypts(), smaller)
    with pytest.raises(NoSpace):
        attempt.save(request(1, {"noise": changed}, smaller))


def test_leftovers_of_a_killed_rewriter_go_with_the_checkpoint(tmp_path: Path) -> None:
    """A new copy of a pack next to the old one is swept. A file with another name stays."""
    store = LocalStore(tmp_path / "s")
    attempt = Attempt.begin(store, "r")
    first = attempt.save(request(0, state(), None))
    attempt.save(request(1, state(1), None))
    directory = tmp_path / "s" / "r" / attempt.history().live[0].body.dir
    (directory / f".rekey-pack-00000-000.safetensors-{'0f' * 8}").write_bytes(b"half")
    report = execute(plan_prune(store, "r", Keep(last=1)), store)
    assert report.retired == [first.id] and not report.left and not directory.exists()


def test_strided_tensors_of_a_save_in_the_foreground(tmp_path: Path) -> None:
    """Samples of a chunk begin at any byte. A strided tensor is gathered, so it is sampled in whole elements."""
    value = {f"x{rows}": torch.zeros(rows, 7).t() for rows in range(3, 15)}
    value["bytes"] = torch.zeros(3, dtype=torch.uint8)
    with relight.Checkpointer(
        tmp_path / "run", state={"value": value}, save=relight.every(steps=1), compact=relight.Compact(codecs="always"),
        background=False, on_failure="raise",
    ) as ckpt:  # fmt: skip
        for step in range(ckpt.restore(), 4):
            value["x9"][step] += 1
            ckpt.step(step)
    loaded = relight.load(tmp_path / "run")["value"]
    assert all(torch.equal(loaded[name], tensor) for name, tensor in value.items())
