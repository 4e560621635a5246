"""The IAM policies of the guide to S3, enforced by a server: they suffice, and the reader's does not allow more than reading."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from tests.store.servers import CREDENTIALS, wait_for

from relight.comm.ports import free_port

ROOT = Path(__file__).parents[2]
WITHOUT_CHECKS = 100
"""Requests before the server checks permissions, to create bucket, users and policies."""
RUN = "s3://my-bucket/team/demo"
TRAIN = """
import sys, torch, relight
torch.manual_seed(0)
model = torch.nn.Linear(1500, 2000)
keep = relight.keep(last=2)
with relight.Checkpointer(sys.argv[1], model=model, keep=keep, on_failure="raise", background=False) as ckpt:
    start = ckpt.restore()
    for step in range(start, int(sys.argv[2])):
        with torch.no_grad():
            model.bias += 1
        ckpt.save(step).wait()
print("from", start)
"""


def policies() -> dict[str, dict[str, Any]]:
    """Return the guide's policies: of a process that trains, and of one that only restores."""
    text = (ROOT / "docs" / "guides" / "s3.md").read_text(encoding="utf-8")
    trains, restores = (json.loads(block) for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL)[:2])
    return {"trains": trains, "restores": restores}


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, str]]]:
    """Start a server that enforces policies. Yield the environment of a user with each policy, and of one without any."""
    port, folder = free_port(), tmp_path_factory.mktemp("iam")
    address = f"http://127.0.0.1:{port}"
    with open(folder / "moto.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "store" / "moto_server.py"), str(port)],
            stdout=log,
            stderr=log,
            env={**os.environ, **CREDENTIALS, "INITIAL_NO_AUTH_ACTION_COUNT": str(WITHOUT_CHECKS)},
        )
    try:
        wait_for(address, process)
        given = {
            "endpoint_url": address,
            "region_name": "us-east-1",
            "aws_access_key_id": "a",
            "aws_secret_access_key": "b",
        }
        boto3.client("s3", **given).create_bucket(Bucket="my-bucket")
        iam, given_to = boto3.client("iam", **given), {}
        for name, policy in {**policies(), "nothing": None}.items():
            iam.create_user(UserName=name)
            if policy is not None:
                iam.put_user_policy(UserName=name, PolicyName=name, PolicyDocument=json.dumps(policy))
            key = iam.create_access_key(UserName=name)["AccessKey"]
            given_to[name] = {
                **CREDENTIALS,
                "AWS_ENDPOINT_URL": address,
                "AWS_ALLOW_HTTP": "true",
                "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
                "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
            }
        for _ in range(WITHOUT_CHECKS):
            with contextlib.suppress(Exception):
                boto3.client("s3", **given).list_buckets()
        yield given_to
    finally:
        process.kill()
        process.wait()


def python(user: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python as that user."""
    environment = {**os.environ, **user, "RELIGHT_LOG": "quiet"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False, timeout=120
    )


def test_the_policies_suffice_and_the_readers_only_reads(users: dict[str, dict[str, str]]) -> None:
    """A trainer saves, resumes and removes old checkpoints. A reader verifies and loads, and cannot save. A stranger cannot read."""
    first = python(users["trains"], "-c", TRAIN, RUN, "4")
    assert first.stdout == "from 0\n", first.stderr
    assert python(users["trains"], "-c", TRAIN, RUN, "6").stdout == "from 4\n"
    listed = python(users["trains"], "-m", "relight", "ls", RUN, "--json")
    assert [row["step"] for row in json.loads(listed.stdout)] == [4, 5]
    for user in ("trains", "restores"):
        verified = python(users[user], "-m", "relight", "verify", RUN)
        assert verified.returncode == 0, verified.stdout + verified.stderr
    refused = python(users["restores"], "-c", TRAIN, RUN, "8")
    assert refused.returncode and "StoreUnavailable" in refused.stderr and "403" in refused.stderr, refused.stderr
    assert python(users["restores"], "-m", "relight", "verify", RUN).returncode == 0
    stranger = python(users["nothing"], "-m", "relight", "ls", RUN)
    assert stranger.returncode == 2 and "403" in stranger.stderr, stranger.stderr


def test_a_policy_allows_nothing_elsewhere(users: dict[str, dict[str, str]]) -> None:
    """The trainer's policy ends at its prefix."""
    elsewhere = python(users["trains"], "-c", TRAIN, "s3://my-bucket/other/demo", "1")
    assert elsewhere.returncode and "403" in elsewhere.stderr, elsewhere.stderr
