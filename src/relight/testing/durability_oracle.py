"""What is so, as somebody sees it who looks at every change at once: the history by the words of ``format.md``, and what it needs.

Nothing of ``relight.log`` decides here: the rules are written down a second time, so that a rule that is broken there is seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from relight.format import hexdigest
from relight.format.names import LOG_DIR, STORE_FILE, parse_dir, parse_record_file
from relight.testing.shelf import DurableNames

RUN = "run"
LOG = f"{RUN}/{LOG_DIR}"


class CountingCommit(NamedTuple):
    """A COMMIT that counts."""

    id: str
    seq: int
    epoch: int
    dir: str
    needs: dict[str, bytes]
    """Its files by their keys, as they were at its COMMIT."""


class Truth:
    """The records as they were made, and what is wrong with that."""

    def __init__(self, shelf: DurableNames, look: Callable[[str], list[str]]) -> None:
        self._shelf, self._look = shelf, look
        shelf.watch = self
        self.wrong: list[str] = []
        self.counted: dict[str, CountingCommit] = {}
        """By id, retired ones too."""
        self.epochs_of: dict[str, int | None] = {}
        """The attempt that a process belongs to, by the process's name; None of a tool."""
        self.is_log_lost = False
        """Whether records of the log were lost, and nobody has rebuilt it yet."""
        self._reset()

    def _reset(self) -> None:
        self.records: list[dict[str, Any]] = []
        self._hash = "0" * 64
        self.live: dict[str, CountingCommit] = {}
        self.retired: set[str] = set()
        self.shelved: dict[str, CountingCommit] = {}
        """Retired, and may be recalled."""
        self.tags: dict[str, str] = {}
        self.epoch = 0
        self.void = 0
        self._needs: dict[str, list[str]] = {}

    def created(self, key: str, data: bytes, who: str, over: bool) -> None:
        """See ``Watch``."""
        if over:
            self._report(f"(4) {key} is overwritten by {who}")
        folder, _, name = key.rpartition("/")
        if folder == LOG and parse_record_file(name) is not None:
            self._record(key, data, who)

    def deleted(self, key: str, who: str) -> None:
        """See ``Watch``."""
        if key in self._needs:
            self._report(f"(7) {who} deletes {key}, which checkpoint {self._needs[key][0]} needs")
        folder, _, name = key.rpartition("/")
        if (folder == LOG and parse_record_file(name) is not None) or key == STORE_FILE:
            self._report(f"(7) {who} deletes {key}")

    def on_durable(self, keys: list[str]) -> None:
        """See ``Watch``."""
        for key in keys:
            folder, _, name = key.rpartition("/")
            seq = parse_record_file(name) if folder == LOG else None
            if seq is None or seq >= len(self.records):
                continue
            body = self.records[seq]["body"]
            found = self.live.get(body.get("id", "")) if self.records[seq]["kind"] == "COMMIT" else None
            if found is not None and found.seq == seq:
                loose = self.loose(found)
                if loose:
                    self._report(f"(1) the COMMIT of {found.id} is durable, and {loose[0]} is not")

    def loose(self, found: CountingCommit) -> list[str]:
        """Names that a checkpoint needs and a power cut would take."""
        wanted = [*sorted(found.needs), *sorted({key.rpartition("/")[0] for key in found.needs}), RUN]
        return [key for key in wanted if key in self._shelf.loose]

    def changed(self, found: CountingCommit) -> list[str]:
        """Its files that are not what they were at its COMMIT."""
        return [key for key, data in found.needs.items() if self._bytes(key) != data]

    def is_durable(self, seq: int) -> bool:
        """Whether a record would survive a power cut, and all before it."""
        return not any(f"{LOG}/{number:012d}.json" in self._shelf.loose for number in range(seq + 1))

    def after_cut(self) -> None:
        """Read the log again from its beginning: some of its end may be gone. What counted and was lost is not forgotten by ``counted``."""
        before = self.live.keys() | self.retired
        self._reset()
        look, self._look = self._look, lambda checkpoint_id: []
        number = 0
        while (file := self._shelf.files.get(f"{LOG}/{number:012d}.json")) is not None:
            self._record(f"{LOG}/{number:012d}.json", bytes(file.data), "the cut")
            number += 1
        self._look = look
        for lost in before - self.live.keys() - self.retired:
            self.counted.pop(lost, None)

    def lose_log(self, first: int) -> dict[str, CountingCommit]:
        """Remove the records from number ``first`` on. Return what was live: until ``find_log`` nothing of it may be deleted."""
        live, needs = self.live, self._needs
        self._shelf.lose(LOG, [f"{number:012d}.json" for number in range(first, len(self.records))])
        self.after_cut()
        self._needs, self.is_log_lost = needs, True
        return live

    def find_log(self) -> None:
        """From now on the log is rebuilt: read it again from its beginning."""
        self.is_log_lost = False
        self.after_cut()

    def _record(self, key: str, data: bytes, who: str) -> None:
        frame = json.loads(data)["body"]
        seq = frame["seq"]
        if self.is_log_lost:
            self._report(f"(9) {who} makes record {seq}, a {frame['kind']}, of a log that was lost")
        if seq != len(self.records):
            self._report(f"(4) {who} makes record {seq} where {len(self.records)} would be the next")
        if frame["prev"] != self._hash:
            self._report(f"(4) record {seq} of {who} is chained to something else than the record before it")
        self._hash = hexdigest(data)
        self.records.append(frame)
        kind, body, epoch = frame["kind"], frame["body"], frame["epoch"]
        if kind == "FENCE":
            if epoch > self.epoch:
                self.epoch = epoch
            else:
                self._report(f"(3) the FENCE of {who} counts for nothing: epoch {epoch} is there already")
        elif kind in ("COMMIT", "RETIRE", "RECALL", "SWEEP", "TAG"):
            if epoch < self.epoch:
                self.void += 1
                return
            self.epoch = epoch
            mine = self.epochs_of.get(who)
            if mine is not None and mine < self.epoch:
                self._report(f"(3) {who} of attempt {mine}, which attempt {self.epoch} has superseded, makes a {kind} that counts")
            if kind == "COMMIT":
                self._commit(seq, epoch, body)
            elif kind == "RETIRE":
                self._retire(body["ids"], who, body.get("undo_s", 0) > 0)
            elif kind == "RECALL":
                self._recall(body["ids"])
            elif kind == "SWEEP":
                for one in body["ids"]:
                    self._forget(self.shelved.pop(one, None))
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
        keys += [key for name in names if name.startswith("part-") for key in _elsewhere(self._bytes(f"{prefix}/{name}"))]
        found = CountingCommit(body["id"], seq, epoch, body["dir"], {key: self._bytes(key) for key in keys})
        self.live[found.id] = self.counted[found.id] = found
        for key in found.needs:
            self._needs.setdefault(key, []).append(found.id)
        self.wrong += [f"(1) at its COMMIT: {text}" for text in self._look(found.id)]

    def _retire(self, ids: list[str], who: str, may_come_back: bool) -> None:
        newest = next(reversed(self.live), "")
        for one in ids:
            if one == newest:
                self._report(f"(7) {who} retires {one}, the newest there is")
            held = sorted(name for name, target in self.tags.items() if target == one)
            if held and one in self.live:
                self._report(f"(7) {who} retires {one}, which tag {held[0]} holds")
            found = self.live.pop(one, None)
            if found is not None:
                self.retired.add(one)
                if may_come_back:
                    self.shelved[one] = found
                else:
                    self._forget(found)
                for name in held:
                    del self.tags[name]

    def _recall(self, ids: list[str]) -> None:
        for one in ids:
            found = self.shelved.pop(one, None)
            if found is not None:
                self.retired.discard(one)
                self.live[one] = found
                self.wrong += [f"(1) at its RECALL: {key} is not what it was" for key in self.changed(found)]
        self.live = {one.id: one for one in sorted(self.live.values(), key=lambda one: one.seq)}

    def _forget(self, found: CountingCommit | None) -> None:
        """Its bytes may go."""
        for key in found.needs if found is not None else ():
            users = self._needs.get(key, [])
            if found is not None and found.id in users:
                users.remove(found.id)
            if not users:
                self._needs.pop(key, None)

    def _bytes(self, key: str) -> bytes:
        file = self._shelf.files.get(key)
        return b"" if file is None else bytes(file.data)

    def _report(self, text: str) -> None:
        self.wrong.append(text)


def _elsewhere(part: bytes) -> list[str]:
    """The files of other checkpoints in which chunks of this part are stored; none of a part that is torn."""
    try:
        packs = msgspec.msgpack.decode(part)["packs"]
        return [f"{RUN}/{directory}/{file}" for pack in packs if len(pack) > 3 for directory, file in pack[3][1]]
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError):
        return []
