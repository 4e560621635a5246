"""Servers that speak as object stores do, started as processes of their own for the length of some tests."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing-secret-7f3a", "AWS_REGION": "us-east-1"}


class Server(NamedTuple):
    """Where it listens, and the environment in which stores reach it."""

    address: str
    environment: dict[str, str]

    def new_bucket(self) -> str:
        """A new bucket's name."""
        name = f"b-{secrets.token_hex(6)}"
        make_bucket(self.address, name)
        return name


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_for(address: str, process: subprocess.Popen[bytes] | None = None, seconds: float = 30.0) -> None:
    """Until something listens there."""
    host, port = address.removeprefix("http://").split(":")
    ends = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1.0):
            return
        if time.monotonic() > ends or (process is not None and process.poll() is not None):
            raise RuntimeError(f"no server at {address}")
        time.sleep(0.05)


def make_bucket(address: str, name: str) -> None:
    """As its owner would, without a library: the server does not look at signatures."""
    request = urllib.request.Request(f"{address}/{name}", method="PUT", headers={"Authorization": "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request"})
    with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(request, timeout=10):
        pass


@contextlib.contextmanager
def moto(folder: Path) -> Iterator[Server]:
    """An S3-compatible server that honours conditions, in memory."""
    port = free_port()
    with open(folder / "moto.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("moto_server.py")), str(port)],
            stdout=log, stderr=log, env={**os.environ, "MOTO_S3_CUSTOM_ENDPOINTS": ""},
        )  # fmt: skip
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(address, process)
        yield Server(address, {**CREDENTIALS, "AWS_ENDPOINT_URL": address})
    finally:
        process.kill()
        process.wait()
