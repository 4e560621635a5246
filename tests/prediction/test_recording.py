"""Recordings: what was recorded is read back, size is bounded, damage is reported."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import made
import numpy as np
import pytest

from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, RelightError
from relight.format.strict import seal, sealed_payload
from relight.prediction import sealed_file
from relight.prediction.sample import SampleShape
from relight.prediction.trace import Happened, SampleRecorder, SampleTrace, keep_newest, name_of, read_trace, traces_in


def recorded(count: int = 50) -> SampleRecorder:
    """Return a recorder with ``count`` seconds of a leak."""
    recorder = SampleRecorder(made.SHAPE, hours=1)
    for sample in made.leak(count, 10, 40):
        recorder.add(sample)
    return recorder


def test_a_sample_has_a_column_for_each_of_its_numbers() -> None:
    """Values beyond the shape are left out. Values that a sample lacks are NaN."""
    shape = SampleShape(rooms=1, ranks=3, accelerators=1)
    row = dict(zip(shape.columns, shape.row(made.sample(1.0, step_s=2.0)), strict=True))
    assert row["host.cpu"] == 0.3 and row["room0.size_bytes"] == 100 * made.GB and row["rank0.step_s"] == 2.0
    assert (
        np.isnan(row["rank2.step_s"]) and row["accelerator0.clock_mhz"] == 1755 and "accelerator1.clock_mhz" not in row
    )


def test_a_recording_is_read_back_unchanged(tmp_path: Path) -> None:
    """Columns, times, values, failures and the additional fields are equal."""
    recorder = recorded()
    recorder.note(Happened(1e9 + 49.5, "memory", "leak"))
    trace = recorder.trace(host="n1")
    trace.write(tmp_path / "deep" / "one.trace")
    back = read_trace(tmp_path / "deep" / "one.trace")
    assert (
        back.columns == made.SHAPE.columns
        and back.happened == (Happened(1e9 + 49.5, "memory", "leak"),)
        and back.metadata == {"host": "n1"}
    )
    np.testing.assert_array_equal(back.at, 1e9 + np.arange(50))
    np.testing.assert_array_equal(back.values, trace.values)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["one.trace"], "no other file is left"


def test_the_ring_takes_its_memory_once_and_forgets_the_oldest() -> None:
    """Six hours of eight ranks and accelerators take less than 10 MB in memory. One hour keeps 3,600 rows."""
    recorder = recorded(4000)
    before = recorder.nbytes
    trace = recorder.trace()
    assert recorder.nbytes == before and len(trace.at) == 3600 and trace.at[-1] == 1e9 + 3999
    assert SampleRecorder(SampleShape()).nbytes < 10e6


def test_a_sample_that_is_not_later_takes_the_last_ones_place() -> None:
    """Times only grow, whatever a clock does."""
    recorder = recorded(10)
    recorder.add(made.sample(5.0, free=0.9))
    trace = recorder.trace()
    assert len(trace.at) == 10 and trace.at[-1] == 1e9 + 9 and trace.values[-1][2] == pytest.approx(90 * made.GB)


def test_each_damage_is_an_error_of_ours_and_soon(tmp_path: Path) -> None:
    """Cuts and 300 flipped bits of head and body raise ``CorruptCheckpoint`` within seconds."""
    path, rng, begun = tmp_path / "one.trace", random.Random(3), time.monotonic()
    recorded().trace(host="n1").write(path)
    whole = path.read_bytes()
    tries = [whole[:cut] for cut in (0, 1, 7, 8, 11, 12, 100, len(whole) // 2, len(whole) - 1)] + [whole + b"x"]
    for _ in range(300):
        offset = rng.randrange(len(whole) if rng.random() < 0.5 else 2000)
        tries.append(whole[:offset] + bytes([whole[offset] ^ 1 << rng.randrange(8)]) + whole[offset + 1 :])
    for data in tries:
        path.write_bytes(data)
        with pytest.raises(CorruptCheckpoint):
            read_trace(path)
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'"columns"', b'"Columns"'), (b'"version":1', b'"version":2'), (b'"shape":[50]', b'"shape":[1e300]'), (b'"shape":[50]', b'"shape":[-1]'),
     (b'"shape":[50]', b'"shape":[99999,99999]'), (b'"type":"<f8"', b'"type":"O"'), (b'"metadata":{', b'"metadata":' + b"[" * 100_000),
     (b'"n1"', b'"\xff\xfe"'), (b'"data":"', b'"data":"!'), (b'"relight":"recording"', b'"relight":"model"')],
    ids=["a field", "version", "huge", "negative", "large", "objects", "deep", "no text", "base64", "a model"],
)  # fmt: skip
def test_invalid_contents_are_refused(tmp_path: Path, old: bytes, new: bytes) -> None:
    """A right seal does not help: fields are checked, absurd sizes take no memory, and nesting takes no stack."""
    path = tmp_path / "one.trace"
    recorded().trace(host="n1").write(path)
    payload = sealed_payload(path.read_bytes(), "it", sealed_file.FILE_BYTES_MAX)
    assert old in payload
    path.write_bytes(seal(payload.replace(old, new, 1)))
    with pytest.raises(CorruptCheckpoint):
        read_trace(path)


def test_rows_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """An undamaged file with invalid contents is refused: times that fall, columns that are not there."""
    for times, values in (
        (np.array([2.0, 1.0]), np.zeros((2, 2))),
        (np.arange(2.0), np.zeros((2, 3))),
        (np.array([1.0, np.nan]), np.zeros((2, 2))),
    ):
        SampleTrace(("a", "b"), times, values).write(tmp_path / "one.trace")
        with pytest.raises(CorruptCheckpoint):
            read_trace(tmp_path / "one.trace")


def test_a_missing_or_too_large_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing file, a directory, and more bytes than a file may have are errors."""
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(CheckpointNotFound):
            read_trace(path)
    recorded().trace().write(tmp_path / "good")
    monkeypatch.setattr(sealed_file, "FILE_BYTES_MAX", 1000)
    with pytest.raises(CorruptCheckpoint, match="1001 bytes"):
        read_trace(tmp_path / "good")
    with pytest.raises(ConfigError):
        recorded().trace().write(tmp_path / "big")
    assert not (tmp_path / "big").exists()


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    """The file of before stands, and the error is one of ours."""
    path = tmp_path / "one.trace"
    recorded().trace().write(path)
    before = path.read_bytes()
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(RelightError):
            recorded(60).trace().write(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["one.trace"]


def test_only_the_newest_recordings_stay(tmp_path: Path) -> None:
    """Recordings are ordered by their names, which begin with the time."""
    for number in range(5):
        (tmp_path / name_of(1e9 + number)).touch()
    for other in ("mine.trace", "000000000001.text"):
        (tmp_path / other).touch()
    keep_newest(tmp_path, 2)
    assert [path.stem for path in traces_in(tmp_path)] == ["001000000003", "001000000004", "mine"]
    keep_newest(tmp_path, 5)
    assert len(os.listdir(tmp_path)) == 4
