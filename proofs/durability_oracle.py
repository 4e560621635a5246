"""The true history, computed from every change as it happens, by the rules of ``format.md``; and the files that it
needs.

Uses nothing of ``relight.log``: the rules are implemented a second time, so that an error there is noticed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from proofs.shelf import DurableNames
from relight.format import hexdigest
from relight.format.names import LOG_DIR, STORE_FILE, parse_dir, parse_record_file

RUN = "run"
LOG = f"{RUN}/{LOG_DIR}"


class CountingCommit(NamedTuple):
    """A COMMIT that is not void."""

    id: str
    seq: int
    epoch: int
    dir: str
    needs: dict[str, bytes]
    """Contents of its files by key, at the time of its COMMIT."""


class Truth:
    """Records in the order in which they were made, and what is wrong with them."""

    def __init__(self, shelf: DurableNames, check_files: Callable[[str], list[str]]) -> None:
        self._shelf, self._check_files = shelf, check_files
        shelf.watch = self
        self.wrong: list[str] = []
        self.counted: dict[str, CountingCommit] = {}
        """Commits by id, with retired ones."""
        self.epochs_of: dict[str, int | None] = {}
        """Epoch of a process's attempt, by the process's name; None for a tool."""
        self.is_log_lost = False
        """Whether records of the log were lost, and the log was not yet rebuilt."""
        self._reset()

    def _reset(self) -> None:
        self.records: list[dict[str, Any]] = []
        self._hash = "0" * 64
        self.live: dict[str, CountingCommit] = {}
        self.retired: set[str] = set()
        self.shelved: dict[str, CountingCommit] = {}
        """Retired checkpoints that are recallable."""
        self.tags: dict[str, str] = {}
        self.epoch = 0
        self.void = 0
        self._needs: dict[str, list[str]] = {}

    def created(self, key: str, data: bytes, process: str, over: bool) -> None:
        """See ``Watch``."""
        if over:
            self._report(f"(4) {key} is overwritten by {process}")
        folder, _, name = key.rpartition("/")
        if folder == LOG and parse_record_file(name) is not None:
            self._record(key, data, process)

    def deleted(self, key: str, process: str) -> None:
        """See ``Watch``."""
        if key in self._needs:
            self._report(f"(7) {process} deletes {key}, which checkpoint {self._needs[key][0]} needs")
        folder, _, name = key.rpartition("/")
        if (folder == LOG and parse_record_file(name) is not None) or key == STORE_FILE:
            self._report(f"(7) {process} deletes {key}")

    def on_durable(self, keys: list[str]) -> None:
        """See ``Watch``."""
        for key in keys:
            folder, _, name = key.rpartition("/")
            seq = parse_record_file(name) if folder == LOG else None
            if seq is None or seq >= len(self.records):
                continue
            body = self.records[seq]["body"]
            commit = self.live.get(body.get("id", "")) if self.records[seq]["kind"] == "COMMIT" else None
            if commit is not None and commit.seq == seq:
                loose = self.loose(commit)
                if loose:
                    self._report(f"(1) the COMMIT of {commit.id} is durable, and {loose[0]} is not")

    def loose(self, commit: CountingCommit) -> list[str]:
        """Return the names that a checkpoint needs and that are not durable."""
        needed = [*sorted(commit.needs), *sorted({key.rpartition("/")[0] for key in commit.needs}), RUN]
        return [key for key in needed if key in self._shelf.loose]

    def changed(self, commit: CountingCommit) -> list[str]:
        """Return its files that have changed since its COMMIT."""
        return [key for key, data in commit.needs.items() if self._bytes(key) != data]

    def is_durable(self, seq: int) -> bool:
        """Return whether a record and all before it would survive a power cut."""
        return not any(f"{LOG}/{number:012d}.json" in self._shelf.loose for number in range(seq + 1))

    def after_cut(self) -> None:
        """Read the log again from its beginning, as its newest records may be gone.

        Remove lost commits from ``counted``.
        """
        before = self.live.keys() | self.retired
        self._reset()
        check_files, self._check_files = self._check_files, lambda checkpoint_id: []
        number = 0
        while (file := self._shelf.files.get(f"{LOG}/{number:012d}.json")) is not None:
            self._record(f"{LOG}/{number:012d}.json", bytes(file.data), "the cut")
            number += 1
        self._check_files = check_files
        for lost in before - self.live.keys() - self.retired:
            self.counted.pop(lost, None)

    def lose_log(self, first: int) -> dict[str, CountingCommit]:
        """Remove the records from number ``first`` on. Return what was live; its files must stay until ``find_log``."""
        live, needed_by = self.live, self._needs
        self._shelf.lose(LOG, [f"{number:012d}.json" for number in range(first, len(self.records))])
        self.after_cut()
        self._needs, self.is_log_lost = needed_by, True
        return live

    def find_log(self) -> None:
        """Read the log again from its beginning, because it will now be rebuilt."""
        self.is_log_lost = False
        self.after_cut()

    def _record(self, key: str, data: bytes, process: str) -> None:
        frame = json.loads(data)["body"]
        seq = frame["seq"]
        if self.is_log_lost:
            self._report(f"(9) {process} makes record {seq}, a {frame['kind']}, of a log that was lost")
        if seq != len(self.records):
            self._report(f"(4) {process} makes record {seq} where {len(self.records)} would be the next")
        if frame["prev"] != self._hash:
            self._report(f"(4) record {seq} of {process} is not chained to the record before it")
        self._hash = hexdigest(data)
        self.records.append(frame)
        kind, body, epoch = frame["kind"], frame["body"], frame["epoch"]
        if kind == "FENCE":
            if epoch > self.epoch:
                self.epoch = epoch
            else:
                self._report(f"(3) the FENCE of {process} is void: epoch {epoch} exists already")
        elif kind in ("COMMIT", "RETIRE", "RECALL", "SWEEP", "TAG"):
            if epoch < self.epoch:
                self.void += 1
                return
            self.epoch = epoch
            own_epoch = self.epochs_of.get(process)
            if own_epoch is not None and own_epoch < self.epoch:
                self._report(
                    f"(3) {process} of attempt {own_epoch}, which attempt {self.epoch} has superseded, makes a {kind} that counts"
                )
            if kind == "COMMIT":
                self._commit(seq, epoch, body)
            elif kind == "RETIRE":
                self._retire(body["ids"], process, body.get("undo_s", 0) > 0)
            elif kind == "RECALL":
                self._recall(body["ids"])
            elif kind == "SWEEP":
                for checkpoint_id in body["ids"]:
                    self._forget(self.shelved.pop(checkpoint_id, None))
            elif body["id"] is None:
                self.tags.pop(body["name"], None)
            elif body["id"] in self.live:
                self.tags[body["name"]] = body["id"]

    def _commit(self, seq: int, epoch: int, body: dict[str, Any]) -> None:
        parsed = parse_dir(body["dir"])
        if parsed is None or parsed.epoch != epoch or body["id"] in self.live or body["id"] in self.retired:
            self.void += 1
            return
        prefix = f"{RUN}/{body['dir']}"
        root = self._shelf.files.get(f"{prefix}/root.json")
        names = ["root.json"]
        if root is not None:
            try:
                for rank in range(json.loads(bytes(root.data))["world"]):
                    packs = [name for name in self._shelf.dirs.get(prefix, {}) if name.startswith(f"pack-{rank:05d}-")]
                    names += [f"part-{rank:05d}.msgpack", *packs]
            except ValueError:
                pass
        keys = [f"{prefix}/{name}" for name in names]
        keys += [
            key for name in names if name.startswith("part-") for key in _elsewhere(self._bytes(f"{prefix}/{name}"))
        ]
        commit = CountingCommit(body["id"], seq, epoch, body["dir"], {key: self._bytes(key) for key in keys})
        self.live[commit.id] = self.counted[commit.id] = commit
        for key in commit.needs:
            self._needs.setdefault(key, []).append(commit.id)
        self.wrong += [f"(1) at its COMMIT: {text}" for text in self._check_files(commit.id)]

    def _retire(self, ids: list[str], process: str, may_come_back: bool) -> None:
        newest = next(reversed(self.live), "")
        for checkpoint_id in ids:
            if checkpoint_id == newest:
                self._report(f"(7) {process} retires {checkpoint_id}, the newest checkpoint")
            holding = sorted(name for name, target in self.tags.items() if target == checkpoint_id)
            if holding and checkpoint_id in self.live:
                self._report(f"(7) {process} retires {checkpoint_id}, which tag {holding[0]} keeps")
            commit = self.live.pop(checkpoint_id, None)
            if commit is not None:
                self.retired.add(checkpoint_id)
                if may_come_back:
                    self.shelved[checkpoint_id] = commit
                else:
                    self._forget(commit)
                for name in holding:
                    del self.tags[name]

    def _recall(self, ids: list[str]) -> None:
        for checkpoint_id in ids:
            commit = self.shelved.pop(checkpoint_id, None)
            if commit is not None:
                self.retired.discard(checkpoint_id)
                self.live[checkpoint_id] = commit
                self.wrong += [f"(1) at its RECALL: {key} has changed" for key in self.changed(commit)]
        self.live = {commit.id: commit for commit in sorted(self.live.values(), key=lambda commit: commit.seq)}

    def _forget(self, commit: CountingCommit | None) -> None:
        """Allow the deletion of its files."""
        for key in commit.needs if commit is not None else ():
            users = self._needs.get(key, [])
            if commit is not None and commit.id in users:
                users.remove(commit.id)
            if not users:
                self._needs.pop(key, None)

    def _bytes(self, key: str) -> bytes:
        file = self._shelf.files.get(key)
        return b"" if file is None else bytes(file.data)

    def _report(self, text: str) -> None:
        self.wrong.append(text)


def _elsewhere(part: bytes) -> list[str]:
    """Return the files of other checkpoints that hold chunks of this part; an empty list if the part is torn."""
    try:
        packs = msgspec.msgpack.decode(part)["packs"]
        return [f"{RUN}/{directory}/{file}" for pack in packs if len(pack) > 3 for directory, file in pack[3][1]]
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError):
        return []
