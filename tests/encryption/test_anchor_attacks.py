"""Attacks on the anchor: an attacker who can write to the store forges records, then rolls the store back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from click.testing import CliRunner
from tests.encryption.test_key_ring import save

import relight
from relight.catalog.run import list_runs, open_run
from relight.cli import cli
from relight.errors import CorruptCheckpoint, RelightError, StoreUnavailable
from relight.format import Record, decode_record, encode_record, hexdigest
from relight.format.names import record_file
from relight.format.records import NoteBody
from relight.keys import StoreSecurity
from relight.keys.signing import write_signing_key
from relight.log import Log, fold
from relight.observe import subscribe
from relight.reclaim.rebuild import plan_rebuild
from relight.serve.reader import StoreFollower
from relight.store import ByteStore, LocalStore, open_bytes
from relight.store.anchored import anchor_of

RUN = "run"


class Lab:
    """A store with an anchor, and what an attacker does to it. ``signed``: trainers sign, and readers trust them alone."""

    def __init__(self, tmp_path: Path, signed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.set_num_threads(1)
        self.path, self.anchor = tmp_path / "s", tmp_path / "anchor"
        self.options: dict[str, Any] = {"anchor": str(self.anchor)}
        if signed:
            public = write_signing_key(str(tmp_path / "sign"))
            self.options |= {"sign": f"ed25519:file:{tmp_path / 'sign'}", "trust": public}
        for name, value in self.options.items():
            monkeypatch.setenv(f"RELIGHT_{name.upper()}", value)
        monkeypatch.setenv("COLUMNS", "200")

    def open(self, **changed: Any) -> ByteStore:
        return open_bytes(self.path, guard=StoreSecurity.from_settings(**{**self.options, **changed}))

    def plain(self) -> ByteStore:
        """The store as an attacker opens it: without keys or anchor."""
        return open_bytes(self.path, guard=StoreSecurity.from_settings(encrypt=(), sign="", trust=(), anchor=""))

    def log(self) -> Path:
        return self.path / RUN / "log"

    def head(self) -> int:
        return len(list(self.log().iterdir())) - 1

    def pins(self) -> list[str]:
        return sorted(path.name for path in self.anchor.rglob("0*") if path.is_file())

    def record(self, seq: int) -> Record:
        return decode_record((self.log() / record_file(seq)).read_bytes(), seq, "")

    def forge(self, *, seq: int | None = None, **changed: Any) -> int:
        """Put an unsigned record above the head; by default one that chains to it."""
        last = self.record(self.head())
        seq = self.head() + 1 if seq is None else seq
        made = msgspec.structs.replace(
            last, seq=seq, prev=last.file_hash, body=NoteBody(topic="forged", data={}), **changed
        )
        (self.log() / record_file(seq)).write_bytes(encode_record(made))
        return seq

    def forge_wrong_prev(self) -> None:
        """Put a record above the head that claims another one below it."""
        head = self.head()
        made = msgspec.structs.replace(
            self.record(head), seq=head + 1, prev="ab" * 32, body=NoteBody(topic="forged", data={})
        )
        (self.log() / record_file(head + 1)).write_bytes(encode_record(made))

    def roll_back(self, keep: int, also: int | None = None) -> None:
        """Remove the records from ``keep`` on, but ``also``, and all that they committed."""
        for path in self.log().iterdir():
            if int(path.stem) >= keep and int(path.stem) != also:
                path.unlink()
        for path in (self.path / RUN).iterdir():
            if path.name.startswith("0000") and int(path.name.split("-")[0]) > 1:
                shutil.rmtree(path)


@pytest.fixture(params=[False, True], ids=["unsigned", "signed"])
def lab(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A run with three checkpoints, seen by its anchor."""
    made = Lab(tmp_path, request.param, monkeypatch)
    for step in (1, 2, 3):
        save(made.open(), step)
    return made


def command(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(cli, words)
    text = f"{done.stderr}{done.exception or ''}"
    return done.exit_code, done.stdout, text


def start(lab: Lab) -> None:
    model = torch.nn.Linear(2, 2)
    with relight.Checkpointer(lab.path / RUN, model=model, background=False, signals=False, **lab.options) as ckpt:
        ckpt.restore()


def readers(lab: Lab) -> dict[str, Callable[[], object]]:
    """Each way to read a run by the library; all must raise."""
    return {
        "open_run": lambda: open_run(lab.open(), RUN),
        "Log.start": lambda: Log(lab.open(), RUN).start(),
        "load": lambda: relight.load(lab.path / RUN),
        "Store": lambda: relight.open(lab.path / RUN).latest(),
        "Store of the whole": lambda: relight.open(lab.path).latest(RUN),
        "Checkpointer": lambda: start(lab),
        "recover": lambda: plan_rebuild(lab.open(), RUN),
        "save": lambda: save(lab.open(), 9),
    }


def refused_by_all(lab: Lab) -> None:
    """Every reader refuses the run, and none of them calls it absent."""
    for name, read in readers(lab).items():
        with pytest.raises(CorruptCheckpoint, match="rolled back") as raised:
            read()
        assert raised.value.kind == "corrupt", name
    assert RUN in list_runs(lab.open())
    for words in (
        ("show", f"{lab.path}/{RUN}@latest"),
        ("ls", f"{lab.path}/{RUN}"),
        ("log", f"{lab.path}/{RUN}"),
        ("verify", f"{lab.path}/{RUN}"),
    ):
        code, out, err = command(*words)
        assert code != 0 and "rolled back" in out + err and "no run" not in out + err, (words, out, err)
    for whole in (("ls", str(lab.path)), ("verify", str(lab.path)), ("top", str(lab.path), "--once")):
        code, out, err = command(*whole)
        assert "rolled back" in out + err and "no run yet" not in out + err, (whole, out, err)
    code, out, _ = command("ls", str(lab.path), "--json")
    assert [(row["run"], row["error"]) for row in json.loads(out)] == [(RUN, "corrupt")]
    code, out, err = command("doctor", "--quick", str(lab.path))
    assert "rolled back" in out + err and "nothing was saved" not in out, out
    reader = StoreFollower("s", str(lab.path), lambda store, runs: None)
    reader.poll()
    assert "rolled back" in reader.now.runs[RUN].error and reader.now.runs[RUN].health(0)[0] == "failed"


def test_a_forged_record_then_a_roll_back(lab: Lab) -> None:
    """A record that chains to the head may move the anchor only where no signers are named; the roll-back is refused either way."""
    before, head = lab.pins(), lab.head()
    forged = lab.forge()
    open_run(lab.open(), RUN)
    if "trust" in lab.options:
        assert lab.pins() == before
    assert max(int(name[:12]) for name in lab.pins()) >= head
    lab.roll_back(3, also=forged)
    refused_by_all(lab)


@pytest.mark.parametrize("how", ["far above", "wrong prev", "another run", "junk"])
def test_a_record_that_does_not_chain_moves_no_anchor(lab: Lab, how: str) -> None:
    """The anchor keeps its value until the new head is shown to chain to it."""
    before, head = lab.pins(), lab.head()
    last = lab.record(head)
    if how == "far above":
        lab.forge(seq=head + 9)
    elif how == "junk":
        (lab.log() / record_file(head + 1)).write_bytes(b"junk")
    else:
        changed = {"prev": hexdigest(b"x")} if how == "wrong prev" else {"run": "f" * 32, "prev": last.file_hash}
        made = msgspec.structs.replace(last, seq=head + 1, body=NoteBody(topic="forged", data={}), **changed)
        (lab.log() / record_file(head + 1)).write_bytes(encode_record(made))
    try:
        open_run(lab.open(), RUN)
    except RelightError as error:
        assert isinstance(error, CorruptCheckpoint)
    assert lab.pins() == before
    lab.roll_back(3, also=head + (9 if how == "far above" else 1))
    refused_by_all(lab)


def test_a_gap_that_an_attacker_makes_stays_what_it_was(lab: Lab) -> None:
    """A writer moves the anchor past junk, and the records below the junk stay bound."""
    head = lab.head()
    (lab.log() / record_file(head + 1)).write_bytes(b"junk")
    save(lab.open(), 4)
    open_run(lab.open(), RUN)
    assert max(int(name[:12]) for name in lab.pins()) == lab.head() > head + 1
    (lab.log() / record_file(head)).write_bytes(b"junk")
    refused_by_all(lab)


def test_records_below_the_anchored_one_count_for_good(lab: Lab) -> None:
    """A roll-back that keeps the anchored record, and removes or spoils those before it, is refused."""
    (lab.log() / record_file(lab.head() - 1)).write_bytes(b"junk")
    refused_by_all(lab)


def test_a_reader_that_stays_moves_the_anchor_and_notices(lab: Lab, tmp_path: Path) -> None:
    """A long-lived reader with an anchor of its own remembers what it read later, and refuses a log that ends before that."""
    own = str(tmp_path / "own anchor")
    store = lab.open(anchor=own)
    readers = [Log(store, RUN), Log(store, RUN)]
    readers[0].read()
    save(lab.open(), 4)
    head = readers[0].read().head
    trusting = "trust" in lab.options
    pins = sorted(path.name for path in Path(own).rglob("0*") if path.is_file())
    assert pins and int(pins[-1][:12]) == head == lab.head(), (pins, trusting)
    lab.roll_back(head)
    for reader in readers:
        with pytest.raises(CorruptCheckpoint, match="rolled back"):
            reader.read()
    with pytest.raises(CorruptCheckpoint, match="rolled back"):
        open_run(lab.open(anchor=own), RUN)


@pytest.mark.parametrize("what", ["the log", "the run", "the store"])
def test_a_run_that_vanished_is_refused(lab: Lab, what: str) -> None:
    """If nothing is left of a run that the anchor remembers, that is a roll-back to before its beginning, and not a
    missing run.
    """
    gone = {"the log": lab.log(), "the run": lab.path / RUN, "the store": lab.path}[what]
    shutil.rmtree(gone)
    if what == "the store":
        lab.path.mkdir()
    refused_by_all(lab)
    assert what != "the store" or not (lab.path / "relight.json").exists()


def test_a_reader_without_trust_moves_no_signed_anchor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader without trust= cannot judge a signed log. Its read leaves the anchor unchanged for readers that can."""
    lab = Lab(tmp_path, True, monkeypatch)
    save(lab.open(), 1)
    before = lab.pins()
    lab.forge()
    open_run(lab.open(trust=(), sign=""), RUN)
    Log(lab.open(trust=(), sign=""), RUN).append(lambda view: (NoteBody(topic="x", data={}), 1))
    assert lab.pins() == before
    assert len(open_run(lab.open(), RUN).history().live) == 1


def test_a_trusting_reader_follows_signed_records_past_junk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Junk in a signed log does not freeze the anchor of a reader: the next signed record moves it."""
    lab = Lab(tmp_path, True, monkeypatch)
    elsewhere = str(tmp_path / "trainer's anchor")
    save(lab.open(anchor=elsewhere), 1)
    open_run(lab.open(), RUN)
    lab.forge()
    save(lab.open(anchor=elsewhere), 2)
    open_run(lab.open(), RUN)
    assert max(int(name[:12]) for name in lab.pins()) == lab.head()
    lab.roll_back(2)
    refused_by_all(lab)


@pytest.fixture
def unsigned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """An anchored run with two checkpoints, without signatures."""
    lab = Lab(tmp_path, False, monkeypatch)
    for step in (1, 2):
        save(lab.open(), step)
    return lab


def note(log: Log, text: str = "x") -> None:
    log.append(lambda view: (NoteBody(topic="note", data={"text": text}), fold(view).epoch))


def failing(name: str, key_end: str, times: int = 1) -> Any:
    """Let a local store fail the first calls of one operation for keys that end so."""
    real, calls = getattr(LocalStore, name), list[str]()

    def fail(self: LocalStore, key: str, *rest: Any) -> Any:
        if key_end in key and len(calls) < times:
            calls.append(key)
            raise StoreUnavailable("away for a moment", where=key)
        return real(self, key, *rest)

    return mock.patch.object(LocalStore, name, fail)


def test_a_reader_that_stays_refuses_a_record_that_refutes_the_anchored_one(unsigned: Lab) -> None:
    """A forged record above the head that does not chain to it moves no anchor at a later read, and every later read refuses the log."""
    store = unsigned.open()
    reader, before = Log(store, RUN), unsigned.pins()
    reader.read()
    unsigned.forge_wrong_prev()
    for log in (reader, reader, Log(store, RUN)):
        with pytest.raises(CorruptCheckpoint, match="rolled back"):
            log.read()
    assert unsigned.pins() == before


def test_a_reader_that_stays_refuses_another_record_in_place_of_the_anchored_one(unsigned: Lab) -> None:
    """A log that is opened again in a process must have the anchored record itself, not another one of that number."""
    store, head = unsigned.open(), unsigned.head()
    Log(store, RUN).read()
    below = unsigned.record(head - 1)
    made = msgspec.structs.replace(below, seq=head, prev=below.file_hash, body=NoteBody(topic="forged", data={}))
    (unsigned.log() / record_file(head)).unlink()
    (unsigned.log() / record_file(head)).write_bytes(encode_record(made))
    unsigned.forge()
    with pytest.raises(CorruptCheckpoint, match="rolled back"):
        Log(store, RUN).read()


def test_a_trainer_does_not_save_above_a_record_that_refutes_the_anchored_one(unsigned: Lab) -> None:
    """A save that no process could resume fails: the writer refuses the log before it appends."""
    model = torch.nn.Linear(2, 2)
    with relight.Checkpointer(
        unsigned.path / "live", model=model, background=False, signals=False, **unsigned.options
    ) as ckpt:
        assert ckpt.save(1).id is not None
        log = unsigned.path / "live" / "log"
        head = len(list(log.iterdir())) - 1
        last = decode_record((log / record_file(head)).read_bytes(), head, "")
        made = msgspec.structs.replace(last, seq=head + 1, prev="ab" * 32, body=NoteBody(topic="forged", data={}))
        (log / record_file(head + 1)).write_bytes(encode_record(made))
        for step in (2, 3):
            failed = ckpt.save(step)
            assert isinstance(failed.error, CorruptCheckpoint) and "rolled back" in str(failed.error)
    assert not (log / record_file(head + 2)).exists()


def test_a_writer_reports_records_that_its_anchor_does_not_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer with records that readers would not trust emits anchor.failed, once for each run, and its own logs still agree."""
    lab = Lab(tmp_path, True, monkeypatch)
    save(lab.open(), 1)
    for changed in ({"sign": ""}, {"sign": "", "trust": ()}):
        seen = list[str]()
        store = lab.open(**changed)
        undo = subscribe(lambda event, seen=seen: seen.append(event.name))  # type: ignore[misc]
        log = Log(store, RUN)
        for _ in range(2):
            note(log)
            log.read()
        Log(store, RUN).read()
        undo()
        assert seen.count("anchor.failed") == 1, changed


def test_an_append_does_not_fail_if_its_anchor_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that was appended counts as appended, though a read for the anchor fails after it."""
    lab = Lab(tmp_path, False, monkeypatch)
    save(lab.open(anchor=""), 1)
    shutil.rmtree(lab.anchor, ignore_errors=True)
    store = lab.open()
    log = Log(store, RUN)
    log.read()
    anchor = anchor_of(store)
    assert anchor is not None
    with mock.patch.object(anchor, "raw", side_effect=StoreUnavailable("away")):
        note(log)
    note(log)
    assert max(int(name[:12]) for name in lab.pins()) == lab.head()


def test_a_record_that_could_not_be_read_for_a_moment_becomes_no_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The anchor moves past no record that the store failed to return; it counts later, and must count from then on."""
    lab = Lab(tmp_path, True, monkeypatch)
    save(lab.open(), 1)
    writer = Log(lab.open(anchor=""), RUN)
    note(writer)
    note(writer)
    head, before = lab.head(), lab.pins()
    store = lab.open()
    reader = Log(store, RUN)
    with failing("get", record_file(head - 1), times=99):
        reader.read()
    assert lab.pins() == before and not list(lab.anchor.rglob("gap-*"))
    reader.read()
    assert max(int(name[:12]) for name in lab.pins()) == head and not list(lab.anchor.rglob("gap-*"))
    (lab.log() / record_file(head - 1)).unlink()
    refused_by_all(lab)


@pytest.mark.parametrize("how", ["beyond the anchor", "below the anchor"])
def test_a_record_that_a_listing_lacks_is_asked_for_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A stale listing neither makes a gap of a record nor refuses a sound log."""
    monkeypatch.setattr("relight.log.log.TORN_MAX", 1)
    lab = Lab(tmp_path, True, monkeypatch)
    save(lab.open(), 1)
    writer = Log(lab.open(anchor="" if how == "beyond the anchor" else str(lab.anchor)), RUN)
    for _ in range(4):
        note(writer)
    real, hidden = LocalStore.list, record_file(lab.head() - 3)
    with mock.patch.object(
        LocalStore, "list", lambda self, prefix: (entry for entry in real(self, prefix) if entry.name != hidden)
    ):
        view = Log(lab.open(), RUN).read()
    assert not view.faults and not list(lab.anchor.rglob("gap-*"))
    assert max(int(name[:12]) for name in lab.pins()) == lab.head()


def test_a_head_that_does_not_come_just_now_is_not_gone(unsigned: Lab) -> None:
    """A listing that lacks the newest record, and a read of it that fails, are an outage and not a roll-back."""
    store, hidden = unsigned.open(), record_file(unsigned.head())
    log, real = Log(store, RUN), LocalStore.list
    log.read()
    with (
        mock.patch.object(
            LocalStore, "list", lambda self, prefix: (entry for entry in real(self, prefix) if entry.name != hidden)
        ),
        failing("get", hidden, times=99),
        pytest.raises(StoreUnavailable),
    ):
        log.read()
    log.read()


@pytest.mark.parametrize("what", ["gap-", "-whole"])
def test_a_gap_that_was_not_written_is_written_before_the_next_pin(unsigned: Lab, what: str) -> None:
    """An anchor that is unreachable for a moment loses no gap, and has no pin without its gaps."""
    log, head = Log(unsigned.open(), RUN), unsigned.head()
    log.read()
    (unsigned.log() / record_file(head + 1)).write_bytes(b"torn")
    with failing("put_once", what):
        note(log)
        assert max(int(name[:12]) for name in unsigned.pins()) == head
    note(log)
    assert [int(name[:12]) for name in unsigned.pins()] == [unsigned.head()]
    assert len(list(unsigned.anchor.rglob("gap-*"))) == 1
    assert len(Log(unsigned.open(), RUN).read().faults) == 1


def test_an_anchor_of_an_earlier_version_is_adopted_once(unsigned: Lab) -> None:
    """A pin without gaps of an earlier version refuses no sound store: what was damaged before is recorded, and bound from then on."""
    torn = unsigned.head() + 1
    (unsigned.log() / record_file(torn)).write_bytes(b"")
    save(unsigned.open(anchor=""), 3)
    for path in list(unsigned.anchor.rglob("*")):
        if path.is_file():
            path.unlink()
    folder, head = next(path for path in unsigned.anchor.rglob(RUN) if path.is_dir()), unsigned.head()
    (folder / f"{head:012d}-{hexdigest((unsigned.log() / record_file(head)).read_bytes())}").write_bytes(b"")
    seen = list[str]()
    undo = subscribe(lambda event: seen.append(event.name))
    with failing("put_once", "gap-"):
        log = Log(unsigned.open(), RUN)
        log.read()
    note(log)
    for _ in range(2):
        assert len(open_run(unsigned.open(), RUN).history().live) == 3
    undo()
    assert seen.count("anchor.adopted") == 1 and len(list(unsigned.anchor.rglob("gap-*"))) == 1
    assert [name.endswith("-whole") for name in unsigned.pins()] == [True]
    (unsigned.log() / record_file(torn - 1)).write_bytes(b"junk")
    refused_by_all(unsigned)


def test_junk_that_was_cleaned_away_was_never_seen(unsigned: Lab) -> None:
    """A process remembers the highest record that counts, not the highest file."""
    log, junk = Log(unsigned.open(), RUN), unsigned.log() / record_file(unsigned.head() + 3)
    junk.write_bytes(b"")
    log.read()
    junk.unlink()
    assert log.read().head == unsigned.head()
