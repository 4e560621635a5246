"""Attacks on the anchor: an attacker who can write to the store forges records, then rolls the store back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner
from tests.encryption.test_key_ring import save

import relight
from relight.catalog.run import list_runs, open_run
from relight.cli import cli
from relight.errors import CorruptCheckpoint, RelightError
from relight.format import Record, decode_record, encode_record, hexdigest
from relight.format.names import record_file
from relight.format.records import NoteBody
from relight.keys import Guard
from relight.keys.signing import write_signing_key
from relight.log import Log
from relight.reclaim.rebuild import plan_rebuild
from relight.serve.reader import Reader
from relight.store import ByteStore, open_bytes

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
        return open_bytes(self.path, guard=Guard.of(**{**self.options, **changed}))

    def plain(self) -> ByteStore:
        """The store as an attacker opens it: without keys or anchor."""
        return open_bytes(self.path, guard=Guard.of(encrypt=(), sign="", trust=(), anchor=""))

    def log(self) -> Path:
        return self.path / RUN / "log"

    def head(self) -> int:
        return len(list(self.log().iterdir())) - 1

    def pins(self) -> list[str]:
        return sorted(one.name for one in self.anchor.rglob("0*") if one.is_file())

    def record(self, seq: int) -> Record:
        return decode_record((self.log() / record_file(seq)).read_bytes(), seq, "")

    def forge(self, *, seq: int | None = None, **changed: Any) -> int:
        """Put an unsigned record above the head; by default one that chains to it."""
        last = self.record(self.head())
        seq = self.head() + 1 if seq is None else seq
        made = msgspec.structs.replace(last, seq=seq, prev=last.file_hash, body=NoteBody(topic="forged", data={}), **changed)
        (self.log() / record_file(seq)).write_bytes(encode_record(made))
        return seq

    def roll_back(self, keep: int, also: int | None = None) -> None:
        """Remove the records from ``keep`` on, but ``also``, and all that they committed."""
        for one in self.log().iterdir():
            if int(one.stem) >= keep and int(one.stem) != also:
                one.unlink()
        for one in (self.path / RUN).iterdir():
            if one.name.startswith("0000") and int(one.name.split("-")[0]) > 1:
                shutil.rmtree(one)


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
    for words in (("show", f"{lab.path}/{RUN}@latest"), ("ls", f"{lab.path}/{RUN}"), ("log", f"{lab.path}/{RUN}"), ("verify", f"{lab.path}/{RUN}")):
        code, out, err = command(*words)
        assert code != 0 and "rolled back" in out + err and "no run" not in out + err, (words, out, err)
    for whole in (("ls", str(lab.path)), ("verify", str(lab.path)), ("top", str(lab.path), "--once")):
        code, out, err = command(*whole)
        assert "rolled back" in out + err and "no run yet" not in out + err, (whole, out, err)
    code, out, _ = command("ls", str(lab.path), "--json")
    assert [(row["run"], row["error"]) for row in json.loads(out)] == [(RUN, "corrupt")]
    code, out, err = command("doctor", "--quick", str(lab.path))
    assert "rolled back" in out + err and "nothing was saved" not in out, out
    reader = Reader("s", str(lab.path), lambda store, runs: None)
    reader.look()
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
    pins = sorted(one.name for one in Path(own).rglob("0*") if one.is_file())
    assert pins and int(pins[-1][:12]) == head == lab.head(), (pins, trusting)
    lab.roll_back(head)
    for reader in readers:
        with pytest.raises(CorruptCheckpoint, match="rolled back"):
            reader.read()
    with pytest.raises(CorruptCheckpoint, match="rolled back"):
        open_run(lab.open(anchor=own), RUN)


@pytest.mark.parametrize("what", ["the log", "the run", "the store"])
def test_a_run_that_vanished_is_refused(lab: Lab, what: str) -> None:
    """Nothing left of a run that the anchor remembers is a roll-back to before its beginning, not a run that is absent."""
    gone = {"the log": lab.log(), "the run": lab.path / RUN, "the store": lab.path}[what]
    shutil.rmtree(gone)
    if what == "the store":
        lab.path.mkdir()
    refused_by_all(lab)
    assert what != "the store" or not (lab.path / "relight.json").exists()


def test_a_reader_that_trusts_nobody_moves_no_signed_anchor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader without trust= cannot judge a signed log, so its look leaves the anchor for those who can."""
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
