"""Training that saves to an object store in the background, is killed, and goes on to the bit."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from tests.scripts import Script
from tests.store.servers import Server

import relight
from relight.agent import reach
from relight.catalog.run import Run
from relight.store import open_bytes
from relight.store.urls import split_run

TRAIN = """
import sys, torch, relight
url, until, ledger = sys.argv[1], int(sys.argv[2]), open(sys.argv[3], "a")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(512, 64))
optimizer = torch.optim.AdamW(model.parameters())
with relight.Checkpointer(url, model=model, optimizer=optimizer, save=relight.every(steps=3), keep=relight.keep(last=2)) as ckpt:
    for step in range(ckpt.restore(), until):
        x = torch.randn(32, 64)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item().hex(), file=ledger, flush=True)
        ckpt.step(step, loss=loss)
"""
STEPS = 60


def losses(ledger: Path) -> dict[int, str]:
    """Return the last logged loss of each step. A step that was logged twice must have equal losses."""
    by_step: dict[int, str] = {}
    for line in ledger.read_text().splitlines():
        step, loss = line.split()
        assert by_step.setdefault(int(step), loss) == loss, f"step {step} came out otherwise the second time"
    return by_step


@pytest.mark.parametrize("seed", [1])
def test_killed_training_resumes_to_the_bit(s3_server: Server, s3: str, tmp_path: Path, seed: int) -> None:
    """After each of three SIGKILLs at random moments training resumes from the bucket, with the losses of an
    undisturbed run."""

    def start(url: str, ledger: Path) -> Script:
        return Script(TRAIN, url, str(STEPS), str(ledger), RELIGHT_BACKGROUND="1")

    alone, killed = tmp_path / "alone", tmp_path / "killed"
    child = start(f"{s3}/ck/alone", alone)
    assert child.communicate(timeout=120)[1] is not None and child.returncode == 0
    rng = random.Random(seed)
    for life in range(4):
        child = start(f"{s3}/ck/killed", killed)
        if life < 3:
            wanted = rng.randrange(3, 14)
            began = len(killed.read_text().splitlines()) if killed.exists() else 0
            ends = time.monotonic() + 60
            while time.monotonic() < ends and child.poll() is None:
                if killed.exists() and len(killed.read_text().splitlines()) >= began + wanted:
                    break
                time.sleep(0.005)
            time.sleep(rng.random() * 0.3)
            child.send_signal(signal.SIGKILL)
        errors = child.communicate(timeout=120)[1]
    assert child.returncode == 0, errors
    assert losses(killed) == losses(alone)
    assert len(losses(alone)) == STEPS
    store_url, run = split_run(f"{s3}/ck/killed")
    opened = Run(open_bytes(store_url), run)
    assert max(checkpoint.step for checkpoint in opened.history().live) == STEPS - 1
    ends = time.monotonic() + 30
    while (agent := reach(store_url, run)) is not None:
        agent.close()
        assert time.monotonic() < ends, "the agent does not end"
        time.sleep(0.3)
    assert open_bytes(store_url).uploads("") == []


def test_a_versioned_bucket_is_used_like_any_other(s3: str) -> None:
    """Saves, retention, a restore and a second attempt work with versioning; what is deleted stays as noncurrent versions."""
    import boto3

    bucket = s3.removeprefix("s3://")
    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"], region_name="us-east-1")
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    for first in (0, 4):
        model = torch.nn.Linear(2, 2)
        with relight.Checkpointer(f"{s3}/demo", model=model, keep=relight.keep(last=2), background=False) as ckpt:
            assert ckpt.restore() == first
            for step in range(first, first + 4):
                torch.nn.init.constant_(model.weight, step)
                ckpt.step(step)
                ckpt.save(step)
    store = relight.open(f"{s3}/demo")
    assert [checkpoint.step for checkpoint in store.checkpoints()] == [6, 7]
    assert all(not findings for _, findings in store.verify())
    assert relight.load(f"{s3}/demo")["model"]["weight"][0, 0] == 7
    listed = client.list_object_versions(Bucket=bucket)
    assert listed["DeleteMarkers"] and len(listed["Versions"]) > sum(each["IsLatest"] for each in listed["Versions"])
