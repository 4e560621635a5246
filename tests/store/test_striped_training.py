"""Runs on a stripe, end to end: the commands, tiers, and training that is killed and goes on to the bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tests.store.test_objects_training import losses

import relight
from relight.catalog.run import Run
from relight.cli import cli
from relight.commit import plan as plan_module
from relight.store.urls import open_bytes, split_run

TRAIN = """
import sys, torch, relight
url, until, ledger = sys.argv[1], int(sys.argv[2]), open(sys.argv[3], "a")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 3_000), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(3_000, 1000))
optimizer = torch.optim.AdamW(model.parameters())
with relight.Checkpointer(url, model=model, optimizer=optimizer, save=relight.every(steps=3), keep=relight.keep(last=2)) as ckpt:
    for step in range(ckpt.restore(), until):
        x = torch.randn(4, 64)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item().hex(), file=ledger, flush=True)
        ckpt.step(step, loss=loss)
"""
STEPS = 18


def url_of(tmp_path: Path, *names: str) -> str:
    return f"stripe:{','.join(str(tmp_path / name) for name in names)},/ck"


def output_of(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(cli, [*words], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.output


@pytest.mark.slow
def test_killed_training_resumes_to_the_bit(tmp_path: Path) -> None:
    """SIGKILL of a trainer with an agent that writes a pack to each of two drives: each attempt resumes, and all losses equal those of an undisturbed run."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    environment = {**os.environ, "RELIGHT_BACKGROUND": "1"}

    def start(url: str, ledger: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, str(script), url, str(STEPS), str(ledger)], env=environment, stderr=subprocess.PIPE
        )

    alone, killed, url = tmp_path / "alone", tmp_path / "killed", url_of(tmp_path, "n0", "n1")
    child = start(str(tmp_path / "plain" / "alone"), alone)
    assert child.communicate(timeout=120)[1] is not None and child.returncode == 0
    rng = random.Random(5)
    for life in range(3):
        child = start(f"{url}/demo", killed)
        if life < 2:
            began = len(killed.read_text().splitlines()) if killed.exists() else 0
            wanted, ends = began + rng.randrange(4, 9), time.monotonic() + 60
            while (
                time.monotonic() < ends
                and child.poll() is None
                and not (killed.exists() and len(killed.read_text().splitlines()) >= wanted)
            ):
                time.sleep(0.005)
            time.sleep(rng.random() * 0.3)
            child.send_signal(signal.SIGKILL)
        errors = child.communicate(timeout=120)[1].decode()
    assert child.returncode == 0, errors
    assert losses(killed) == losses(alone)
    store_url, run = split_run(f"{url}/demo")
    opened = Run(open_bytes(store_url), run)
    newest = opened.history().live[-1]
    packs = [
        path.parent.parent.parent.parent.name for path in tmp_path.glob(f"n?/ck/demo/{newest.body.dir}/*.safetensors")
    ]
    assert Counter(packs) == {"n0": 1, "n1": 1}
    assert json.loads(output_of("verify", f"{url}/demo", "--json"))["ok"] is True


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make a run of three checkpoints on three drives, with a pack on each."""
    monkeypatch.setattr(plan_module, "LANE_BYTES_MIN", 1 << 12)
    address = f"{url_of(tmp_path, 'n0', 'n1', 'n2')}/demo"
    for step in (1, 2, 3):
        relight.save(address, state(step), step=step)
    return address


def state(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {f"t{number}": torch.randn(5000 + number, generator=made) for number in range(9)}


def same(found: dict[str, torch.Tensor], seed: int) -> bool:
    return all(torch.equal(found[name], value) for name, value in state(seed).items())


def test_every_command_takes_the_url(url: str, tmp_path: Path) -> None:
    """Commands take the URLs of a store, run, checkpoint and its directory, to read, tag, hold and prune."""
    store_url, _ = split_run(url)
    assert all(len(list(tmp_path.glob(f"n{place}/ck/demo/*/*.safetensors"))) == 3 for place in range(3))
    assert "demo" in output_of("ls", store_url)
    ids = [row["id"] for row in json.loads(output_of("ls", url, "--json"))]
    assert len(ids) == 3
    for way in (
        f"{url}@2",
        f"{url}/{next(path.name for path in (tmp_path / 'n1/ck/demo').iterdir() if '0000000002-' in path.name)}",
    ):
        assert "step 2" in output_of("show", way)
    assert "COMMIT" in output_of("log", url)
    output_of("tag", url, "good", "1")
    output_of("tag", "--hold", url, "1", "--why", "a test")
    output_of("verify", url)
    output_of("verify", "--repair", url)
    output_of("prune", url, "--keep-last", "1", "--yes")
    assert same(relight.load(url), 3)
    assert same(relight.load(url, "good"), 1)
    assert len(list(tmp_path.glob("n?/ck/demo/*-e*"))) == 6, (
        "two checkpoints, on three drives, and nothing of the third"
    )
    assert relight.open(url).runs == ["demo"]


def test_copies_both_ways(url: str, tmp_path: Path) -> None:
    """Copies to a directory, from it to another stripe, and back.

    A store that is named with a trailing slash gets the run's name.
    """
    plain, other = str(tmp_path / "plain" / "copy"), url_of(tmp_path, "m0", "m1")
    output_of("cp", url, plain)
    output_of("cp", plain, f"{other}/")
    output_of("verify", plain)
    assert output_of("verify", f"{other}/copy")
    assert same(relight.load(f"{other}/copy"), 3)
    assert same(relight.load(plain, 1), 1)
    assert {path.name for path in tmp_path.glob("m?/ck/*")} == {"relight.json", "stripe.json", "copy"}


def test_as_a_tier(url: str, tmp_path: Path) -> None:
    """A stripe near, a directory far: drained, and restored from afar when a drive is lost with what was on it."""
    tiers = relight.Tiers(hot=f"{url}2", cold=str(tmp_path / "cold" / "demo"))
    value = {"x": torch.zeros(20_000)}
    with relight.Checkpointer(tiers, state={"value": value}, save=relight.every(steps=1), background=False) as ckpt:
        for step in range(ckpt.restore(), 3):
            value["x"] += step
            ckpt.step(step)
    assert "cold" in output_of("ls", f"{url}2", "--tiers")
    (tmp_path / "n1").rename(tmp_path / "lost")
    with pytest.raises(relight.StoreUnavailable, match="n1"):
        relight.load(f"{url}2")
    assert torch.equal(relight.load(str(tmp_path / "cold" / "demo"))["value"]["x"], value["x"])


def test_a_missing_drive_is_reported_by_every_command(url: str, tmp_path: Path) -> None:
    """No command takes it for empty or damaged, and none changes anything. Training does not start from scratch."""
    store_url, _ = split_run(url)
    plain = str(tmp_path / "plain" / "demo")
    relight.save(plain, state(9), step=9)
    (tmp_path / "n1").rename(tmp_path / "away")
    before = sorted(path for path in tmp_path.rglob("*"))
    for words in (
        ["ls", store_url], ["ls", url], ["show", f"{url}@2"], ["log", url], ["verify", url], ["prune", url, "--keep-last", "1", "--yes"],
        ["tag", url, "good", "1"], ["tag", "--hold", url, "1", "--why", "a test"], ["verify", "--repair", url], ["cp", "--tiers", url], ["cp", url, plain], ["cp", plain, url],
    ):  # fmt: skip
        done = CliRunner().invoke(cli, words)
        assert isinstance(done.exception, relight.StoreUnavailable), (words, done.output)
        assert "n1/ck is not there" in str(done.exception)
    value = {"x": torch.zeros(10)}
    with pytest.raises(relight.StoreUnavailable, match="n1"):
        relight.Checkpointer(url, save=None, state={"value": value}, background=False).restore()
    with pytest.raises(relight.StoreUnavailable, match="n1"):
        relight.save(url, value, step=9)
    assert sorted(path for path in tmp_path.rglob("*")) == before
    (tmp_path / "away").rename(tmp_path / "n1")
    assert same(relight.load(url), 3)
