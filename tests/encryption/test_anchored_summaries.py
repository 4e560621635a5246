"""Summaries of logs that are signed, anchored or encrypted:

a summary has the guarantees of the records that it replaces.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relight.errors import CorruptCheckpoint
from relight.format.cipher import is_encrypted
from relight.format.names import parse_summary_file
from relight.format.records import NoteBody
from relight.keys import StoreSecurity
from relight.keys.files import write_key_file
from relight.keys.signing import write_signing_key
from relight.log import Log
from relight.log.summary import vouched
from relight.store import ByteStore, open_bytes

RUN = "run"


class Place:
    """A store with a long log, and its anchor. ``signed``: writers sign, and readers trust them alone."""

    def __init__(self, path: Path, signed: bool) -> None:
        self.path = path / "s"
        self.options: dict[str, Any] = {"encrypt": (), "sign": "", "trust": (), "anchor": str(path / "anchor")}
        if signed:
            public = write_signing_key(str(path / "sign"))
            self.options |= {"sign": f"ed25519:file:{path / 'sign'}", "trust": public}

    def open(self, **changed: Any) -> ByteStore:
        """Return the store as a new process opens it."""
        return open_bytes(self.path, guard=StoreSecurity.from_settings(**{**self.options, **changed}))

    def grow(self, records: int, **changed: Any) -> Log:
        """Append this many NOTEs."""
        log = Log(self.open(**changed), RUN)
        log.start()
        for _ in range(records):
            assert log.append(lambda view: (NoteBody(topic="n", data={}), 0)) is not None
        return log

    def log(self) -> Path:
        """Return the log's directory."""
        return self.path / RUN / "log"


@pytest.fixture(params=[False, True], ids=["unsigned", "signed"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Return a place with a log of 160 records and more, which its anchor has followed."""
    made = Place(tmp_path, request.param)
    made.grow(160)
    return made


def test_an_anchored_log_is_read_from_its_summary(place: Place) -> None:
    """The log is refused by a new process, and by a process with an anchor of earlier records only."""
    view = Log(place.open(), RUN).read()
    assert view.base > 100 and not view.faults
    place.grow(100)
    assert Log(place.open(), RUN).read().base > view.base
    late = place.open(anchor=str(place.path.parent / "other"))
    assert (
        Log(late, RUN).read().base > 100
        and Log(late, RUN).read().counted == Log(place.open(), RUN, whole=True).read().counted
    )
    place.grow(70, anchor=str(place.path.parent / "other"))
    assert Log(place.open(anchor=str(place.path.parent / "other")), RUN).read().base > 250


@pytest.mark.parametrize("last", [159, 130, 60])
def test_a_log_that_was_rolled_back_is_refused(place: Place, last: int) -> None:
    """It is refused even if a summary replaces all remaining records."""
    for path in place.log().glob("*.json"):
        if int(path.stem) > last:
            path.unlink()
    with pytest.raises(CorruptCheckpoint, match="rolled back"):
        Log(place.open(), RUN).read()


def test_records_that_a_writer_without_keys_appends_vouch_for_no_summary(place: Place) -> None:
    """A reader that trusts named signers takes the newest summary of theirs; others take the newest."""
    is_signed = bool(place.options["sign"])
    before = Log(place.open(anchor=""), RUN).read()
    place.grow(140, anchor="", sign="", trust=())
    view = Log(place.open(anchor=""), RUN).read()
    assert (view.base == before.base) == is_signed and bool(view.faults) == is_signed
    assert view.counted == Log(place.open(anchor=""), RUN, whole=True).read().counted


def test_a_signer_that_takes_unsigned_records_signs_for_no_reader_that_does_not(tmp_path: Path) -> None:
    """Its summary may contain records that the reader would not count."""
    place = Place(tmp_path, True)
    place.grow(20, anchor="")
    place.grow(1, anchor="", sign="", trust=())
    place.grow(90, anchor="", trust=())
    view = Log(place.open(anchor=""), RUN).read()
    assert any(vouched(record) is not None for record in view.records)
    assert view.base == -1 and len(view.faults) == 1


def test_an_encrypted_log_has_encrypted_summaries(tmp_path: Path) -> None:
    """Readers begin at the encrypted summaries."""
    place = Place(tmp_path, False)
    write_key_file(str(tmp_path / "key"))
    options = {"anchor": "", "encrypt": f"file:{tmp_path / 'key'}"}
    place.grow(150, **options)
    files = [path for path in place.log().iterdir() if parse_summary_file(path.name) is not None]
    assert len(files) == 2 and all(is_encrypted(file.read_bytes()) for file in files)
    assert Log(place.open(**options), RUN).read().base > 100
