"""Makes stores of many runs and checkpoints in little time: real records of the log, without roots and parts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from relight.format import Record, encode_record, hexdigest
from relight.format.digest import ZERO_HEX
from relight.format.names import CheckpointDir, record_file
from relight.format.records import Body, CommitBody, FenceBody, RunBody, TagBody
from relight.log import require_store
from relight.store import open_bytes

LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"


def checkpoint_id(number: int) -> str:
    """Return a checkpoint's id of ten letters."""
    text = ""
    for _ in range(10):
        number, rest = divmod(number, 36)
        text = LETTERS[rest] + text
    return text


def make_run(root: Path, store_id: str, name: str, count: int, first: int, *, minutes: int = 10) -> None:
    """Make a run with ``count`` checkpoints up to now, with the log's own chain of records."""
    directory = root / name / "log"
    directory.mkdir(parents=True)
    run_id, previous = hexdigest(name.encode())[:32], ZERO_HEX
    begun = datetime.now(UTC) - timedelta(minutes=minutes * count)
    bodies: list[tuple[Body, int]] = [(RunBody(name=name), 0), (FenceBody(attempt="made", reason="made"), 1)]
    for number in range(count):
        id_, step = checkpoint_id(first + number), (number + 1) * 100
        parents = [checkpoint_id(first + number - 1)] if number else []
        body = CommitBody(
            id=id_, step=step, dir=str(CheckpointDir(step, id_, 1)), root=hexdigest(id_.encode()), root_bytes=1000, parents=parents, reason="every",
            metrics={"loss": 4.0 / (number + 1)}, logical_bytes=10**9, stored_bytes=8 * 10**8, new_bytes=8 * 10**8, requires=[],
        )  # fmt: skip
        bodies.append((body, 1))
    bodies.append((TagBody(name="best-so-far", id=checkpoint_id(first + count - 1)), 1))
    for seq, (body, epoch) in enumerate(bodies):
        time = begun + timedelta(minutes=minutes * seq)
        record = Record(
            seq=seq, prev=previous, store=store_id, run=run_id, epoch=epoch, time=time.strftime("%Y-%m-%dT%H:%M:%SZ"), writer="made:1:0", body=body
        )  # fmt: skip
        data = encode_record(record)
        (directory / record_file(seq)).write_bytes(data)
        previous = hexdigest(data)


def make_store(root: Path, runs: int, checkpoints: int) -> Path:
    """Make a store of ``runs`` runs, each with ``checkpoints`` checkpoints."""
    store_id = require_store(open_bytes(str(root))).id
    for number in range(runs):
        make_run(root, store_id, f"run-{number:03d}", checkpoints, number * checkpoints)
    return root
