"""``python -m benchmarks.long_logs``: what reading a run's log costs, and appending to it, by its number of records.

Each log is of saves with ``keep=5`` retention and a new attempt after each 2,000 records. Its records and summaries are what the product
writes, written without fsync for speed. Times are of new processes; memory is the growth of the peak of their resident memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.store.servers import has_rados, moto, rados

from relight.format import Record, decode_record, encode_record, encode_store, hexdigest
from relight.format.digest import ZERO_HEX
from relight.format.names import CheckpointDir, record_file, summary_file
from relight.format.records import Body, CommitBody, FenceBody, NoteBody, RetireBody, RunBody, StoreRecord
from relight.format.topics import SUMMARY, SummaryNote
from relight.log import Log, LogView, fold
from relight.log.summary import SUMMARY_EVERY, condense, encode
from relight.store import MemoryStore, open_bytes
from relight.store.base import Entry, Properties

RUN, STORE_ID, RUN_ID, KEEP, ATTEMPT_EVERY = "run", "5" * 32, "6" * 32, 5, 2000
WRITER_EVERY = 64
"""Summaries that the generator leaves out, but for the last ones: a reader begins at the newest."""
APPENDS = 320


def bodies() -> Iterator[tuple[Body, int]]:
    """Records of a run that saves, retires and is restarted now and then."""
    step, epoch, live = 0, 0, list[str]()
    yield RunBody(name=RUN), 0
    while True:
        epoch += 1
        yield FenceBody(attempt=f"{epoch:016x}", reason="fresh" if epoch == 1 else "restored"), epoch
        for _ in range(ATTEMPT_EVERY // 2):
            step += 1
            name = f"{step:010d}"
            yield (
                CommitBody(
                    id=name,
                    step=step,
                    dir=str(CheckpointDir(step, name, epoch)),
                    root=hexdigest(name.encode()),
                    root_bytes=4000,
                    parents=live[-1:],
                    reason="every 60 s",
                    metrics={"loss": 1 / step},
                    logical_bytes=10**9,
                    stored_bytes=10**9,
                    new_bytes=10**9,
                    requires=[],
                ),
                epoch,
            )
            live.append(name)
            if len(live) > KEEP:
                yield RetireBody(ids=[live.pop(0)], reason="keep"), epoch


def write(log: Any, records: int) -> None:
    """Write a log of so many records with ``log(key, data)``."""
    prev, brief, tail, seq = ZERO_HEX, None, list[Record](), 0
    source = bodies()
    waiting: NoteBody | None = None
    while seq < records or waiting is not None:
        body, epoch = next(source) if waiting is None else (waiting, 0)
        waiting = None
        record = Record(
            seq=seq, prev=prev, store=STORE_ID, run=RUN_ID, epoch=epoch, time="2026-01-01T00:00:00Z", writer="host:1:abcd", body=body,
        )  # fmt: skip
        data = encode_record(record)
        record = decode_record(data, seq, "")
        log(f"{RUN}/log/{record_file(seq)}", data)
        prev = record.file_hash
        tail.append(record)
        due = SUMMARY_EVERY if records - seq < 3 * SUMMARY_EVERY else SUMMARY_EVERY * WRITER_EVERY
        if seq % due == due - 1:
            view = LogView(
                RUN,
                STORE_ID,
                RUN_ID,
                (*(brief.records if brief else ()), *tail),
                (),
                seq,
                prev,
                brief.summary if brief else None,
            )
            summary = condense(view, trusted=False)
            text = encode(summary)
            hash = hexdigest(text)
            log(f"{RUN}/log/{summary_file(seq, hash)}", text)
            waiting = SUMMARY.note(SummaryNote(upto=seq, hash=hash, bytes=len(text)))
            brief, tail = LogView(RUN, STORE_ID, RUN_ID, summary.records, (), seq, prev, summary), []
        seq += 1


def on_disk(place: Path, records: int) -> None:
    """Write a log into a directory."""
    place.mkdir()
    (place / "relight.json").write_bytes(encode_store(StoreRecord(id=STORE_ID, created="2026-01-01T00:00:00Z")))

    def put(key: str, data: bytes) -> None:
        path = place / key
        try:
            path.write_bytes(data)
        except FileNotFoundError:
            path.parent.mkdir(parents=True)
            path.write_bytes(data)

    write(put, records)


class Counting(MemoryStore):
    """An object store in memory that counts the requests S3 would get: a list of 1,000 names is one."""

    def properties(self) -> Properties:
        """See ``ByteStore``."""
        return replace(super().properties(), parallel_reads=32, needs_sync=False)

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def get(self, key: str, limit: int) -> bytes:
        """See ``ByteStore``."""
        self.calls["get"] += 1
        return super().get(key, limit)

    def put_once(self, key: str, data: bytes) -> bool:
        """See ``ByteStore``."""
        self.calls["put"] += 1
        return super().put_once(key, data)

    def list(self, prefix: str) -> Iterator[Entry]:
        """See ``ByteStore``."""
        entries = list(super().list(prefix))
        self.calls["list"] += max(1, -(-len(entries) // 1000))
        return iter(entries)


def requests(records: int) -> dict[str, Any]:
    """Requests of a first read and of appends."""
    store = Counting()
    store.put_once("relight.json", encode_store(StoreRecord(id=STORE_ID, created="2026-01-01T00:00:00Z")))
    write(store.put_once, records)
    store.calls.clear()
    log = Log(store, RUN)
    log.read()
    first = dict(store.calls)
    store.calls.clear()
    for number in range(APPENDS):
        log.append(lambda view, number=number: (NoteBody(topic="n", data={"n": number}), 0))  # type: ignore[misc]
    return {"first_read": first, "of_320_appends": dict(store.calls)}


def peak_kib() -> int:
    """The peak of this process's resident memory, in KiB."""
    match = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(match[1]) if match else 0


def measure(place: str) -> dict[str, Any]:
    """Measure the first read, appends and memory. ``place`` is a path or URL. Run it in a new process."""
    store = open_bytes(place)
    before = peak_kib()
    began = time.perf_counter()
    log = Log(store, RUN)
    live = len(fold(log.read()).live)
    first = time.perf_counter() - began
    times = []
    for number in range(APPENDS):
        began = time.perf_counter()
        log.append(lambda view, number=number: (NoteBody(topic="n", data={"n": number}), 0))  # type: ignore[misc]
        times.append(time.perf_counter() - began)
    grew = (peak_kib() - before) / 1024
    return {
        "live": live, "first_read_s": round(first, 4), "append_ms": round(1000 * sum(times) / APPENDS, 2),
        "append_median_ms": round(1000 * sorted(times)[APPENDS // 2], 2), "memory_mib": round(grew, 1),
    }  # fmt: skip


def in_bucket(records: int, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Measure with an S3-compatible server on this machine: Ceph's gateway if it is installed, else moto."""
    server_of = rados if has_rados() else moto
    folder.mkdir()
    with server_of(folder) as server:
        os.environ.update(server.environment)
        url = f"s3://{server.new_bucket()}/s"
        store = open_bytes(url)
        store.put_once("relight.json", encode_store(StoreRecord(id=STORE_ID, created="2026-01-01T00:00:00Z")))
        with ThreadPoolExecutor(16) as pool:
            waiting: deque[Future[bool]] = deque()

            def put(key: str, data: bytes) -> None:
                waiting.append(pool.submit(store.put_once, key, data))
                if len(waiting) > 256:
                    waiting.popleft().result()

            write(put, records)
        return [{"server": server_of.__name__, **in_new_process(url)} for _ in range(rounds)]


def in_new_process(place: str) -> dict[str, Any]:
    """The result of ``measure`` in a new process."""
    command = [sys.executable, "-m", "benchmarks.long_logs", "--measure", place]
    result: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, nargs="*", default=[1000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, nargs="*", default=[1000, 100_000])
    parser.add_argument("--s3", type=int, nargs="*", default=[1000, 100_000], help="records in an S3-compatible server")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    report: dict[str, Any] = {"disk": {}, "object_store": {}, "s3": {}}
    for records in options.records:
        folder = Path(tempfile.mkdtemp(prefix="long-logs-"))
        try:
            on_disk(folder / "s", records)
            rounds = [in_new_process(str(folder / "s")) for _ in range(options.rounds)]
            report["disk"][str(records)] = rounds
            print(records, *rounds, sep="\n  ", flush=True)
        finally:
            shutil.rmtree(folder)
    for records in options.requests:
        report["object_store"][str(records)] = requests(records)
        print(records, report["object_store"][str(records)], flush=True)
    for records in options.s3:
        folder = Path(tempfile.mkdtemp(prefix="long-logs-"))
        try:
            report["s3"][str(records)] = rounds = in_bucket(records, options.rounds, folder / "server")
            print("S3", records, *rounds, sep="\n  ", flush=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
