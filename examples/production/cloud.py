"""An S3-compatible server. Its contents outlive an outage: the process is stopped and continued, not ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from relight.comm.ports import free_port

SERVER = Path(__file__).resolve().parents[2] / "tests" / "store" / "moto_server.py"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "production",
    "AWS_SECRET_ACCESS_KEY": "production-secret",
    "AWS_REGION": "us-east-1",
}


class Cloud:
    """A server that keeps its objects in memory. In an outage it is reachable and does not answer, as in most
    outages."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.port = folder, free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.url = "s3:/"
        self.environment = {**CREDENTIALS, "AWS_ENDPOINT_URL": self.address}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin, or answer again."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            return
        with (self.folder / "cloud.log").open("wb") as log:
            command = [sys.executable, str(SERVER), str(self.port)]
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "MOTO_S3_CUSTOM_ENDPOINTS": ""}
            )
        ends = time.monotonic() + 60
        while self.process.poll() is None and time.monotonic() < ends:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"the object store does not begin: see {self.folder / 'cloud.log'}")

    def new_bucket(self, name: str) -> None:
        """Make a bucket, with the owner's credentials."""
        self._client().create_bucket(Bucket=name)

    def directories(self, bucket: str, run: str) -> set[str]:
        """Return the directories of a run's checkpoints, committed or not."""
        pages = self._client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{run}/", Delimiter="/")
        names = [prefix["Prefix"].split("/")[1] for page in pages for prefix in page.get("CommonPrefixes", ())]
        return {name for name in names if name[0].isdecimal()}

    def _client(self) -> Any:
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.address,
            region_name="us-east-1",
            aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        )

    def pause(self) -> None:
        """No answers from now on."""
        if self.process is not None:
            self.process.send_signal(signal.SIGSTOP)

    def stop(self) -> None:
        """End the server for good."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
