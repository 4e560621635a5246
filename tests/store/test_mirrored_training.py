"""A mirrored store under training, the commands, the doctor and the alerts, with drives that fail meanwhile."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import relight
from relight.catalog import Run
from relight.cli import cli
from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.doctor.checks_store import _mirror
from relight.doctor.facts import DoctorFacts
from relight.doctor.facts_store import collect_store
from relight.format import encode_tree
from relight.layout import Bytes, Item
from relight.monitoring.overview import Watcher
from relight.reader import verify_checkpoint
from relight.store import Disk
from relight.store.base import Uncertain
from relight.store.mirror_calls import Drive
from relight.store.mirror_files import MirrorReader
from relight.store.mirrored import MirroredStore
from relight.store.urls import open_bytes, split_run


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Return the URL of a run ``demo`` on two drives."""
    return f"stripe:mirrors=2,{tmp_path}/n0,{tmp_path}/n1,/ck/demo"


def output_of(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(cli, list(words), standalone_mode=False)
    assert done.exception is None, (words, done.output, done.exception)
    assert (done.return_value or 0) == code, (words, done.output)
    return done.output


def files(root: Path) -> dict[str, bytes]:
    """Return the files of a drive, without temporary ones and those that name the drive or its state."""
    own = ("stripe.json", "mirrors-", ".tmp-", ".rekey-")
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and not path.name.startswith(own)
    }


@pytest.mark.parametrize("lost", ["n0", "n1"])
@pytest.mark.parametrize("background", [False, True])
def test_training_continues_without_a_drive_and_the_drive_is_rebuilt(
    url: str, tmp_path: Path, lost: str, background: bool
) -> None:
    """A drive vanishes in the middle of a training run. Every save becomes a checkpoint; a scrub makes the drives equal again."""
    value, events = {"x": torch.zeros(400_000)}, list[str]()
    undo = relight.observe.subscribe(lambda event: events.append(event.name))
    with relight.Checkpointer(
        url, state={"value": value}, save=relight.every(steps=1), keep=relight.keep(last=3), background=background
    ) as ckpt:
        for step in range(ckpt.restore(), 8):
            if step == 3:
                ckpt.barrier()
                (tmp_path / lost).rename(tmp_path / "gone")
            value["x"] += 1
            ckpt.step(step)
            ckpt.barrier()
    undo()
    assert not (tmp_path / lost).exists()
    assert [name for name in events if name.startswith("store.mirror")] == ["store.mirror_away"], (
        "the trainer reports it"
    )
    assert torch.equal(relight.load(url)["value"]["x"], value["x"])
    (tmp_path / "gone").rename(tmp_path / lost)
    assert torch.equal(relight.load(url)["value"]["x"], value["x"]), "not from the old contents"
    assert "REBUILT" in output_of("verify", "--repair", url)
    assert files(tmp_path / "n0") == files(tmp_path / "n1")
    (tmp_path / ("n1" if lost == "n0" else "n0")).rename(tmp_path / "gone")
    assert torch.equal(relight.load(url)["value"]["x"], value["x"])


def save(url: str, step: int) -> None:
    relight.save(url, {"x": torch.full((300_000,), float(step)), "y": torch.arange(step + 9)}, step=step)


class SlowLinks(Disk):
    """A link of the log that takes ``seconds``, and then succeeds."""

    seconds = 0.0
    late = threading.Event()

    def link(self, source: str, target: str) -> None:
        """See ``Disk``."""
        if self.seconds and "/log/" in target:
            time.sleep(self.seconds)
            super().link(source, target)
            self.late.set()
            return
        super().link(source, target)


@pytest.mark.parametrize("away", ["n0", "n1"])
def test_a_record_that_arrives_late_has_its_files(tmp_path: Path, away: str) -> None:
    """If the only drive for a record is too slow, the record may still arrive: the save's files stay."""
    roots = [tmp_path / name for name in ("n0", "n1", "n2")]
    disk = SlowLinks()
    disk.late = threading.Event()
    store = MirroredStore(roots, disk=disk, wait_s=0.3)
    attempt = Attempt.begin(store, "demo")
    item = Item("x", "uint8", (1 << 16,), "param", Bytes(bytes(range(256)) * 256))

    def save_step(step: int) -> None:
        attempt.save(SaveRequest(SaveInfo(step=step), tree=encode_tree({}), items=[item]))

    save_step(1)
    (tmp_path / away).rename(tmp_path / "away")
    save_step(2)
    disk.seconds = 3.0
    with pytest.raises(Uncertain, match="may have been created"):
        save_step(3)
    assert disk.late.wait(30)
    disk.seconds = 0.0
    time.sleep(0.2)
    now = MirroredStore(roots)
    run = Run(now, "demo")
    assert [checkpoint.step for checkpoint in run.history().live] == [1, 2, 3]
    for checkpoint in run.history().live:
        assert verify_checkpoint(now, run.view(), checkpoint) == []


def test_scrub_of_a_new_drive(url: str, tmp_path: Path) -> None:
    """An empty drive is rebuilt once it is named, for all runs of the store. ``--json`` and the text state what was done."""
    other = url.replace("demo", "other")
    for step in (1, 2):
        save(url, step)
        save(other, step)
    shutil.rmtree(tmp_path / "n1")
    (tmp_path / "n1" / "ck").mkdir(parents=True)
    save(url, 3)
    text = output_of("verify", "--repair", url)
    assert f"AWAY  {tmp_path}/n1/ck" in text
    assert "--new-drive" in text
    report = json.loads(output_of("verify", "--repair", url, "--new-drive", str(tmp_path / "n1" / "ck"), "--json"))
    mirrors = report["mirrors"]["here"]
    assert (report["ok"], mirrors["rebuilt"]) == (True, [str(tmp_path / "n1" / "ck")])
    assert [drive["status"] for drive in mirrors["drives"]] == ["good", "good"]
    assert mirrors["files"] == len(files(tmp_path / "n1")) - 1, "all but the record of this scrub"
    assert files(tmp_path / "n0") == files(tmp_path / "n1")
    assert json.loads(output_of("verify", "--repair", url, "--json"))["mirrors"]["here"]["files"] == 0
    plain = str(tmp_path / "plain" / "demo")
    save(plain, 1)
    done = CliRunner().invoke(cli, ["verify", "--repair", plain, "--new-drive", "/x"])
    assert isinstance(done.exception, relight.ConfigError)


def test_scrub_repairs_each_drive_from_the_other(url: str, tmp_path: Path) -> None:
    """Different damage on both drives is repaired from the other; damage of both is reported, and keeps no drive from being whole."""
    for step in (1, 2, 3):
        save(url, step)
    before = files(tmp_path / "n0")
    packs = sorted((tmp_path / "n0").rglob("pack*"))
    for path in (packs[0], tmp_path / "n1" / packs[1].relative_to(tmp_path / "n0")):
        data = bytearray(path.read_bytes())
        data[5000] ^= 1
        path.write_bytes(data)
    (root,) = (tmp_path / "n1").glob("ck/demo/0000000003-*/root.json")
    root.unlink()
    record = tmp_path / "n0" / "ck/demo/log/000000000001.json"
    record.write_bytes(bytes(100))
    output_of("verify", "--repair", url, "--dry-run", code=1)
    text = output_of("verify", "--repair", url)
    assert text.count("REPAIRED") >= 3
    after = [files(tmp_path / name) for name in ("n0", "n1")]
    assert after[0] == after[1]
    assert {name: after[0][name] for name in before} == before
    for name in ("n0", "n1"):
        path = tmp_path / name / packs[2].relative_to(tmp_path / "n0")
        data = bytearray(path.read_bytes())
        data[9000] ^= 1
        path.write_bytes(data)
    text = output_of("verify", "--repair", url, code=1)
    assert "DAMAGED" in text
    assert [drive.status for drive in open_bytes(split_run(url)[0]).statuses()] == ["good", "good"]  # type: ignore[attr-defined]


def test_a_lying_drive_is_read_around_and_noted(url: str, tmp_path: Path) -> None:
    """All packs of one drive have wrong bytes: a restore is right, and the drive is doubted from then on."""
    save(url, 5)
    for number in (1, 0):  # whichever drive is asked first
        packs = {path: path.read_bytes() for path in (tmp_path / f"n{number}").rglob("pack*")}
        for path, data in packs.items():
            path.write_bytes(bytes(len(data)))
        assert float(relight.load(url)["x"][7]) == 5.0
        if [drive.status for drive in open_bytes(split_run(url)[0]).statuses()][number] == "doubted":  # type: ignore[attr-defined]
            break
        for path, data in packs.items():
            path.write_bytes(data)
    else:
        pytest.fail("no drive that was read from is doubted")
    assert "REBUILT" in output_of("verify", "--repair", url)


def test_the_doctor_and_the_alerts_show_it(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drive that is away is a finding with the command that rebuilds it, a line of readiness, a metric and an alert."""
    save(url, 1)
    store_url = split_run(url)[0]

    def seen() -> tuple[list[Any], Any]:
        facts = DoctorFacts(store=collect_store(open_bytes(store_url), quick=True))
        (run,) = Watcher([url], events=tmp_path / "events").poll(0.0)
        return list(_mirror(facts)), run.drives

    assert seen() == ([], ())
    (tmp_path / "n0").rename(tmp_path / "gone")
    save(url, 2)
    hits, drives = seen()
    assert hits[0].where == drives[0][0] == f"{tmp_path}/n0/ck"
    assert drives[0][1].startswith("away: ")
    assert hits[0].command.endswith(" --repair")
    assert "mirror-degraded" in output_of("doctor", url, "--json", code=1)
    assert "set away" in output_of("doctor", url, code=1)
    assert "drives of the mirrored store" in CliRunner().invoke(cli, ["doctor", "--ready", url, "--json"]).output


@pytest.mark.parametrize("first", [0, 1])
def test_encrypted_and_incremental_checkpoints(
    first: int, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies are of encrypted files: damage on one drive is read around, whichever is read first, and repaired, with the key."""
    in_turn = MirrorReader._in_turn

    def in_order(reader: MirrorReader, length: int) -> list[Drive]:
        for drive in reader._drives.values():
            drive.rate_bps = 1e9 if drive.number == first else 1e6
        return in_turn(reader, length)

    monkeypatch.setattr(MirrorReader, "_in_turn", in_order)
    key = tmp_path / "key"
    output_of("keys", "new", str(key))
    monkeypatch.setenv("RELIGHT_KEY", f"file:{key}")
    count = 3_000_000  # more than one read: damage in the middle is far from the first one
    value = {"x": torch.zeros(count), "y": torch.zeros(count)}
    with relight.Checkpointer(
        url, state={"value": value}, save=relight.every(steps=1), compact=relight.Compact(), background=False
    ) as ckpt:
        for step in range(ckpt.restore(), 4):
            value["x"][step] += 1
            ckpt.step(step)
    assert b"relight" not in next((tmp_path / "n0").rglob("pack*")).read_bytes()[:4096]
    before = files(tmp_path / "n0")
    for number, path in enumerate(sorted((tmp_path / "n0").rglob("p*-*"))):
        path = path if number % 2 else tmp_path / "n1" / path.relative_to(tmp_path / "n0")
        data = bytearray(path.read_bytes())
        data[len(data) * 6 // 10] ^= 1
        path.write_bytes(data)
    assert torch.equal(relight.load(url)["value"]["x"], value["x"])
    assert "REPAIRED" in output_of("verify", "--repair", url)
    after = [files(tmp_path / name) for name in ("n0", "n1")]
    assert after[0] == after[1]
    assert {name: after[0][name] for name in before} == before
    assert json.loads(output_of("verify", "--repair", url, "--json"))["damage"] == []
