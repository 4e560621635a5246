"""Flip every bit of every record, root and part: it is found and named, and the run resumes from the newest good checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from forge import DIRS, RUN, SEQ, STEPS, TENSORS, Forge, load, record_key, request, values

from relight.catalog import candidates
from relight.commit import Attempt
from relight.errors import CorruptCheckpoint, RelightError
from relight.format import decode_tree
from relight.format.records import NoteBody
from relight.layout import Bytes
from relight.log import Log, LogView, fold
from relight.reader import open_checkpoint, read_tensors, verify_checkpoint, verify_log
from relight.store import MemoryStore

FILES = [
    "relight.json",
    *(record_key(seq) for seq in SEQ.values()),
    *(f"{DIRS[letter]}/{name}" for letter in "abc" for name in ("root.json", "part-00000.msgpack")),
]
"""All but the packs, and but the directory of the retired checkpoint, which nothing refers to."""
SAVED = {letter: values(step) for letter, step in STEPS.items()}


def newest_good(store: MemoryStore, view: LogView) -> tuple[str, list[RelightError]]:
    """Return the letter of the newest good checkpoint, with every byte compared, and what was skipped."""
    passed: list[RelightError] = []
    for checkpoint in candidates(fold(view)):
        try:
            opened = open_checkpoint(store, RUN, checkpoint, store_id=view.store_id, run_id=view.run_id)
            part = opened.parts[0]
            decode_tree(part.tree, len(part.tensors), opened.prefix)
            buffers = {index: bytearray(tensor.length) for index, tensor in enumerate(part.tensors)}
            read_tensors(opened, part, {index: Bytes(buffer) for index, buffer in buffers.items()})
        except RelightError as error:
            passed.append(error)
            continue
        letter = checkpoint.id[0]
        saved = SAVED[letter]
        assert all(buffers[index] == saved[name] for index, (name, *_) in enumerate(TENSORS)), (
            "bytes that were not saved"
        )
        return letter, passed
    raise AssertionError("nothing whole was found")


def check(good: dict[str, bytes], key: str, byte: int, bit: int, *, then_save: bool) -> None:
    """One flipped bit is found, named and skipped."""
    data = bytearray(good[key])
    data[byte] ^= 1 << bit
    store = load({**good, key: bytes(data)})
    view = Log(store, RUN).read()
    letter, passed = newest_good(store, view)
    assert letter == ("b" if key.startswith(DIRS["c"]) or key == record_key(SEQ["c"]) else "c")
    files = [finding.file for finding in verify_log(store, view)]
    if "/log/" in key:
        assert [fault.file for fault in view.faults] == files == [key]
        assert not passed
    elif key == "relight.json":
        assert files == [key]
        assert not view.faults
        assert not passed
    else:
        assert not files
        letter = next(directory for directory in "abc" if key.startswith(DIRS[directory]))
        checkpoint = next(checkpoint for checkpoint in fold(view).live if checkpoint.id[0] == letter)
        findings = verify_checkpoint(store, view, checkpoint)
        assert [finding.file for finding in findings] == [key]
        with pytest.raises(CorruptCheckpoint) as caught:
            open_checkpoint(store, RUN, checkpoint, store_id=view.store_id, run_id=view.run_id)
        assert caught.value.where == key
        assert [error.where for error in passed] == ([key] if letter == "c" else [])
    if then_save:
        check_resumes(store, view)


def check_resumes(store: MemoryStore, before: LogView) -> None:
    """A new attempt loses no good checkpoint, and its first save is the newest checkpoint."""
    attempt = Attempt.begin(store, RUN)
    saved = attempt.save(request(40))
    history = fold(Log(store, RUN).read())
    assert [checkpoint.id for checkpoint in history.live] == [
        *(checkpoint.id for checkpoint in fold(before).live),
        saved.id,
    ]
    assert not verify_checkpoint(store, Log(store, RUN).read(), history.live[-1])


def places(good: dict[str, bytes], every: int) -> Iterator[tuple[str, int, int]]:
    """Yield ``(file, byte, bit)``: each byte of each file, and one bit in ``every``."""
    for key in FILES:
        for byte in range(len(good[key])):
            for bit in range(8):
                if (byte + bit) % every == 0:
                    yield key, byte, bit


def run(every: int, resume_every: int, capsys: pytest.CaptureFixture[str]) -> int:
    """Check all flips and return their number."""
    good = Forge().files
    started, count = time.perf_counter(), 0
    for count, (key, byte, bit) in enumerate(places(good, every), 1):
        try:
            check(good, key, byte, bit, then_save=count % resume_every == 0)
        except BaseException as error:
            raise AssertionError(f"{key}, byte {byte}, bit {bit}: {error!r}") from error
    with capsys.disabled():
        print(
            f"\n{count} flipped bits in {len(FILES)} records, roots, parts: all found ({time.perf_counter() - started:.0f} s)"
        )
    return count


def test_a_bit_of_every_fourth_byte(capsys: pytest.CaptureFixture[str]) -> None:
    """A bit flipped in any record, root or part is found and named, and the newest whole checkpoint is restored."""
    assert run(32, 5, capsys) > 2000


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_bit(capsys: pytest.CaptureFixture[str]) -> None:
    """Each of the eight bits: the run resumes after each flip."""
    assert run(1, 1, capsys) == 8 * sum(len(Forge().files[key]) for key in FILES)


@pytest.mark.parametrize("key", FILES)
@pytest.mark.parametrize("how", ["missing", "empty", "halved", "doubled", "zeroed", "a neighbour's", "one byte more"])
def test_a_file_damaged_as_a_whole(key: str, how: str) -> None:
    """A file that is gone, cut, doubled, zeroed or replaced is found and named, and the run resumes from the previous checkpoint."""
    good = Forge().files
    data = good[key]
    neighbour = FILES[FILES.index(key) - 2] if key != FILES[1] else FILES[2]
    damaged = {
        "empty": b"",
        "halved": data[: len(data) // 2],
        "doubled": data * 2,
        "zeroed": bytes(len(data)),
        "a neighbour's": good[neighbour],
        "one byte more": data + b"\n",
    }
    files = (
        {**good, key: damaged[how]}
        if how in damaged
        else {name: contents for name, contents in good.items() if name != key}
    )
    store = load(files)
    view = Log(store, RUN).read()
    last_gone = how == "missing" and key == record_key(SEQ["c"])  # no other record refers to it
    letter, passed = newest_good(store, view)
    assert letter == ("b" if key.startswith(DIRS["c"]) or key == record_key(SEQ["c"]) else "c")
    named = [finding.file for finding in verify_log(store, view)]
    for checkpoint in fold(view).live:
        named += [finding.file for finding in verify_checkpoint(store, view, checkpoint)]
    assert named == ([] if last_gone else [key])
    assert all(error.where == key for error in passed)
    check_resumes(store, view)


def test_a_damaged_fence_does_not_let_the_fenced_one_commit() -> None:
    """Two attempts are never current at the same time, even if the older one's FENCE is unreadable."""
    store = load(Forge().files)
    older = Attempt.begin(store, RUN)
    key = record_key(10)
    damaged = bytearray(store._files[key])
    damaged[200] ^= 1
    store._files[key] = bytes(damaged)
    newer = Attempt.begin(store, RUN)
    assert newer.epoch > older.epoch
    newer.save(request(40))
    with pytest.raises(RelightError):
        older.save(request(41))


@pytest.mark.parametrize("lost", [(0,), (0, 1, 2), (1, 6), (6, 9), (0, 1, 2, 3, 4, 5, 6), (8,)], ids=str)
def test_a_damaged_log_can_be_restarted_for_ever(lost: tuple[int, ...]) -> None:
    """Records that stay unreadable cost each restart an epoch or more, and never the last one: there is always one above."""
    store = load(Forge().files)
    for seq in lost:
        store._files[record_key(seq)] = b"damaged"
    epochs = [Attempt.begin(store, RUN).epoch for _ in range(60)]
    assert epochs == sorted(set(epochs))
    check_resumes(store, Log(store, RUN).read())


def test_two_lost_fences_leave_room_for_both() -> None:
    """The attempt of a missing FENCE never shares its epoch with a later attempt."""
    store = load(Forge().files)
    older = [Attempt.begin(store, RUN) for _ in range(3)]
    older[0].note(NoteBody(topic="weather", data={}))
    for seq in (11, 12):
        store.delete(record_key(seq))
    assert Attempt.begin(store, RUN).epoch > older[-1].epoch
