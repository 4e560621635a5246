"""Servers that speak as object stores do, started as processes of their own for the length of some tests."""

from __future__ import annotations

import base64
import contextlib
import hmac
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import NamedTuple

from relight.comm.ports import free_port

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing-secret-7f3a",
    "AWS_REGION": "us-east-1",
}


class Server(NamedTuple):
    """A server's address, and the environment in which stores reach it."""

    address: str
    environment: dict[str, str]

    def new_bucket(self) -> str:
        """A new bucket's name."""
        name = f"b-{secrets.token_hex(6)}"
        make_bucket(self, name)
        return name


def wait_for(address: str, process: subprocess.Popen[bytes] | None = None, seconds: float = 30.0) -> None:
    """Wait until a server listens at the address."""
    host, port = address.removeprefix("http://").split(":")
    ends = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1.0):
            return
        if time.monotonic() > ends or (process is not None and process.poll() is not None):
            raise RuntimeError(f"no server at {address}")
        time.sleep(0.05)


def make_bucket(server: Server, name: str) -> None:
    """Make a bucket, with the owner's credentials."""
    import boto3

    given = server.environment
    client = boto3.client(
        "s3",
        endpoint_url=server.address,
        region_name="us-east-1",
        aws_access_key_id=given["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=given["AWS_SECRET_ACCESS_KEY"],
    )
    client.create_bucket(Bucket=name)


@contextlib.contextmanager
def moto(folder: Path) -> Iterator[Server]:
    """Start an S3-compatible server that honours conditions, in memory."""
    port = free_port()
    with open(folder / "moto.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("moto_server.py")), str(port)],
            stdout=log,
            stderr=log,
            env={**os.environ, "MOTO_S3_CUSTOM_ENDPOINTS": ""},
        )
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(address, process)
        yield Server(address, {**CREDENTIALS, "AWS_ENDPOINT_URL": address})
    finally:
        process.kill()
        process.wait()


RADOS = """[global]
fsid={fsid}
mon host=127.0.0.1:{mon}
public addr=127.0.0.1
cluster addr=127.0.0.1
auth cluster required=none
auth service required=none
auth client required=none
osd pool default size=1
osd pool default min size=1
osd crush chooseleaf type=0
osd pool default pg num=8
osd pool default pgp num=8
mon allow pool size one=true
mon warn on pool no redundancy=false
mon max pg per osd=1000
run dir={folder}/run
log file={folder}/log/$name.log
admin socket={folder}/run/$name.asok
pid file={folder}/run/$name.pid
ms bind ipv6=false
[mon.a]
mon data={folder}/mon
mon addr=127.0.0.1:{mon}
[osd.0]
osd data={folder}/osd0
osd objectstore=memstore
memstore device bytes=12884901888
osd class load list=*
osd class default list=*
[client.rgw.a]
rgw frontends=beast endpoint=127.0.0.1:{rgw} tcp_nodelay=1
rgw dns name=127.0.0.1
"""


def has_rados() -> bool:
    """Whether Ceph's own object gateway is installed (Debian: radosgw, ceph-mon, ceph-osd, ceph-common)."""
    return os.geteuid() == 0 and all(
        shutil.which(program) for program in ("radosgw", "radosgw-admin", "ceph-mon", "ceph-osd", "ceph", "monmaptool")
    )


@contextlib.contextmanager
def rados(folder: Path) -> Iterator[Server]:
    """Ceph's object gateway over one store in memory: a server that is used in earnest."""
    for name in ("mon", "osd0", "run", "log"):
        (folder / name).mkdir(parents=True)
    fsid, mon, rgw = str(uuid.uuid4()), free_port(), free_port()
    conf = folder / "ceph.conf"
    conf.write_text(RADOS.format(fsid=fsid, mon=mon, rgw=rgw, folder=folder))
    given = {**CREDENTIALS, "AWS_ACCESS_KEY_ID": "testkey", "AWS_SECRET_ACCESS_KEY": "testsecret-7f3a"}
    root = ("--setuser", "root", "--setgroup", "root")

    def call(*command: str) -> None:
        subprocess.run(
            [*command],
            cwd=folder,
            check=True,
            capture_output=True,
            timeout=120,
            env={**os.environ, "CEPH_CONF": str(conf)},
        )

    try:
        call("monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v1:127.0.0.1:{mon}]", "monmap")
        call("ceph-mon", "-c", str(conf), "--mkfs", "-i", "a", "--monmap", "monmap", *root)
        call("ceph-mon", "-c", str(conf), "-i", "a", *root)
        disk = str(uuid.uuid4())
        call("ceph", "-c", str(conf), "osd", "new", disk)
        call("ceph-osd", "-c", str(conf), "-i", "0", "--mkfs", "--osd-uuid", disk, *root)
        call("ceph-osd", "-c", str(conf), "-i", "0", *root)
        user = (
            "--uid=t",
            "--display-name=t",
            f"--access-key={given['AWS_ACCESS_KEY_ID']}",
            f"--secret={given['AWS_SECRET_ACCESS_KEY']}",
        )
        call("radosgw-admin", "-c", str(conf), "user", "create", *user)
        call("radosgw", "-c", str(conf), "-n", "client.rgw.a", *root)
        address = f"http://127.0.0.1:{rgw}"
        wait_for(address, seconds=90)
        yield Server(address, {**given, "AWS_ENDPOINT_URL": address})
    finally:
        for pid_file in (folder / "run").glob("*.pid"):
            with contextlib.suppress(ValueError, ProcessLookupError):
                os.kill(int(pid_file.read_text()), signal.SIGKILL)


AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The emulator's own, the same everywhere."""


def azurite_command() -> str | None:
    """Return the command of Azure's emulator: ``AZURITE``, or the one on the path (npm: azurite)."""
    return os.environ.get("AZURITE") or shutil.which("azurite-blob")


def make_container(server: Server, name: str) -> None:
    """A new container, by a request signed as Azure's shared keys are."""
    account, date = server.environment["AZURE_STORAGE_ACCOUNT_NAME"], formatdate(usegmt=True)
    canonical = f"x-ms-date:{date}\nx-ms-version:2021-08-06\n/{account}/{account}/{name}\nrestype:container"
    signed = hmac.digest(base64.b64decode(AZURITE_KEY), ("PUT" + "\n" * 12 + canonical).encode(), "sha256")
    headers = {
        "x-ms-date": date, "x-ms-version": "2021-08-06", "Content-Length": "0",
        "Authorization": f"SharedKey {account}:{base64.b64encode(signed).decode()}",
    }  # fmt: skip
    with urllib.request.urlopen(
        urllib.request.Request(f"{server.address}/{name}?restype=container", method="PUT", headers=headers)
    ):
        pass


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[Server]:
    """Start Azure's own emulator of its blob storage."""
    command, port = azurite_command(), free_port()
    assert command is not None
    with open(folder / "azurite.log", "wb") as log:
        process = subprocess.Popen(
            [command, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder), "--skipApiVersionCheck", "--silent"],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(address, process)
        account = "devstoreaccount1"
        yield Server(
            f"{address}/{account}",
            {
                "AZURE_STORAGE_ACCOUNT_NAME": account,
                "AZURE_STORAGE_ACCOUNT_KEY": AZURITE_KEY,
                "AZURE_STORAGE_USE_EMULATOR": "true",
                "AZURITE_BLOB_STORAGE_URL": address,
            },
        )
    finally:
        process.kill()
        process.wait()
