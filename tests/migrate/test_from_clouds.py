"""Checkpoints in Google Cloud Storage and Azure are read in place, with the same results as from a directory."""

from __future__ import annotations

import gc
import http.client
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_from_bucket import ORBAX, bring, upload
from tests.store.gcs_server import Bucket, gcs
from tests.store.servers import Server, azurite, azurite_command, make_container

from relight.errors import CorruptCheckpoint
from relight.importers import detect, import_checkpoint
from relight.importers.bucket import BucketFiles
from relight.importers.http_gateway import BucketGateway
from relight.importers.zarr import ZarrReader, kvstore_of
from relight.migrate import execute_migration, plan_migration
from relight.store import open_bytes, put

FORMS = ["files", "ocdbt", "files3", "ocdbt3"]
TENSORS = {"big.weight": torch.arange(900_000.0).reshape(900, 1000), "bias": torch.ones(7)}


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """Start a server of a bucket of Google Cloud Storage."""
    with gcs("bucket") as bucket:
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        yield bucket


@pytest.fixture(scope="module")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start Azure's emulator."""
    if azurite_command() is None:
        pytest.skip("azurite is not installed: make azure")
    with azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture
def azure(azure_server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a new container."""
    for name, value in azure_server.environment.items():
        monkeypatch.setenv(name, value)
    name = f"c-{secrets.token_hex(6)}"
    make_container(azure_server, name)
    return f"az://{name}"


def save_dcp(folder: Path) -> Path:
    """Save ``TENSORS`` by DCP."""
    dcp.save({"model": TENSORS}, checkpoint_id=folder, no_dist=True)
    return folder


def check_orbax(url: str, run: Path) -> None:
    """Import Orbax's checkpoint at ``url``, and compare it."""
    result, expected = bring(url, run), np.load(ORBAX / "expected.npz")
    assert torch.equal(result["params"]["dense.kernel"], torch.from_numpy(expected["kernel"]))
    assert torch.equal(result["params"]["dense.bias"], torch.from_numpy(expected["bias"]))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_in_google_cloud_storage(tmp_path: Path, google: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A DCP directory and a file are read by ranges, without a local copy, and migrated as from a directory."""
    google.add(save_dcp(tmp_path / "old"), "old/step-3")
    torch.save({"model": TENSORS, "step": 4}, tmp_path / "one.pt")
    google.objects["old/one.pt"] = (tmp_path / "one.pt").read_bytes()
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda *given, **named: pytest.fail("copied to a disk"))
    for name in ("step-3", "one.pt"):
        google.requests.clear()
        result = bring(f"gs://bucket/old/{name}", tmp_path / "new" / name.replace(".", "-"))
        assert all(torch.equal(result["model"][key], tensor) for key, tensor in TENSORS.items())
        reads = [request for request in google.requests if request.startswith("GET") and "list-type" not in request]
        assert reads and all("bytes=" in request for request in reads), reads
    plan = plan_migration("gs://bucket/old", str(tmp_path / "migrated"))
    assert sorted(item.step for item in plan.todo) == [3, 4] and not plan.unreadable
    assert execute_migration(plan).ok


@pytest.mark.parametrize("form", FORMS)
def test_orbax_in_google_cloud_storage(form: str, tmp_path: Path, google: Bucket) -> None:
    """tensorstore's driver reads the arrays in the bucket."""
    google.add(ORBAX / form, "old/3")
    check_orbax("gs://bucket/old/3", tmp_path / "new" / "run")
    assert any("/storage/v1/b/bucket/o/" in request for request in google.requests)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_in_azure(tmp_path: Path, azure: str) -> None:
    """A DCP directory in a container is read by ranges."""
    upload(save_dcp(tmp_path / "old"), f"{azure}/old")
    result = bring(f"{azure}/old", tmp_path / "new" / "run")
    assert all(torch.equal(result["model"][key], tensor) for key, tensor in TENSORS.items())


@pytest.mark.parametrize("form", FORMS)
def test_orbax_in_azure(form: str, tmp_path: Path, azure: str) -> None:
    """tensorstore reads the arrays through the gateway. If an object changes meanwhile, nothing is committed."""
    upload(ORBAX / form, f"{azure}/orbax")
    check_orbax(f"{azure}/orbax", tmp_path / "new" / "run")
    detected = detect(f"{azure}/orbax")
    chunk = next(
        str(path.relative_to(ORBAX / form))
        for path in (ORBAX / form).rglob("*")
        if path.is_file() and path.parent.name in ("d", "half", "c")
    )
    store = open_bytes(f"{azure}/orbax")
    store.delete(chunk)
    put(store, chunk, b"another")
    with pytest.raises(CorruptCheckpoint):
        import_checkpoint(detected, open_bytes(tmp_path / "new"), "other")
    assert not list((tmp_path / "new").glob("other/*-e*"))


def through_gateway(files: BucketFiles) -> dict[str, object]:
    """Return tensorstore's name for the gateway of ``files``."""
    files.gateway = files.gateway or BucketGateway(files)
    return files.gateway.kvstore("")


def test_the_gateway_sends_listed_objects_only(s3: str) -> None:
    """A request needs the gateway's header, and names a listed object. Ranges are those of HTTP."""
    put(open_bytes(f"{s3}/old"), "a b/one", bytes(range(200)))
    files = BucketFiles.from_url(f"{s3}/old")
    spec = through_gateway(files)
    put(open_bytes(f"{s3}/old"), "later", b"x")
    name, _, value = spec["headers"][0].partition(": ")  # type: ignore[index]
    host = str(spec["base_url"]).removeprefix("http://")

    def ask(path: str, span: str = "", method: str = "GET", secret: str = value) -> tuple[int, bytes, str]:
        connection = http.client.HTTPConnection(host, timeout=20)
        headers = {name: secret, **({"Range": f"bytes={span}"} if span else {})}
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        result = answer.status, answer.read(), answer.headers.get("Content-Range", answer.headers["Content-Length"])
        connection.close()
        return result

    data = bytes(range(200))
    assert ask("/a%20b/one") == (200, data, "200")
    assert ask("/a%20b/one", method="HEAD") == (200, b"", "200")
    assert ask("/a%20b/one", "3-9") == (206, data[3:10], "bytes 3-9/200")
    assert ask("/a%20b/one", "190-999") == (206, data[190:], "bytes 190-199/200")
    assert ask("/a%20b/one", "190-") == (206, data[190:], "bytes 190-199/200")
    assert ask("/a%20b/one", "-5") == (206, data[195:], "bytes 195-199/200")
    assert [ask("/a%20b/one", span)[0] for span in ("200-", "9-3", "500-600")] == [416] * 3
    assert [ask(path)[0] for path in ("/later", "/a%20b/../later", "/", "/a%20b")] == [404] * 4
    assert [ask("/a%20b/one", secret=secret)[0] for secret in ("", "x", "é")] == [403] * 3
    store = open_bytes(f"{s3}/old")
    store.delete("a b/one")
    put(store, "a b/one", bytes(200))
    files._blocks.clear()
    assert ask("/a%20b/one")[0] == 409
    del files, spec
    gc.collect()
    ends = time.monotonic() + 10
    while "relight-gateway" in [thread.name for thread in threading.enumerate()]:
        assert time.monotonic() < ends, "the server does not end with the files"
        time.sleep(0.01)


@pytest.mark.parametrize("form", FORMS)
def test_tensorstore_reads_through_the_gateway(form: str, s3: str) -> None:
    """tensorstore's driver for HTTP reads each form of Orbax's arrays through the gateway."""
    upload(ORBAX / form, f"{s3}/orbax")
    files = BucketFiles.from_url(f"{s3}/orbax")
    store, reader = through_gateway(files), ZarrReader()
    place = (
        {"driver": "ocdbt", "base": store, "path": "params.dense.kernel/"}
        if form.startswith("ocdbt")
        else {**store, "path": f"{store['path']}params.dense.kernel/"}
    )
    spec = {"driver": "zarr3" if form.endswith("3") else "zarr", "kvstore": place, "recheck_cached_data": "open"}
    source = reader.array(spec, "kernel").source()
    data = bytearray(source.length)
    source.fill(0, memoryview(data))
    assert bytes(data) == np.load(ORBAX / "expected.npz")["kernel"].tobytes()
    reader.close()


def test_a_public_bucket_needs_no_credentials(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``AWS_SKIP_SIGNATURE`` holds for tensorstore, too."""
    put(open_bytes(f"{s3}/old"), "_METADATA", b"{}")
    files = BucketFiles.from_url(f"{s3}/old")
    assert "aws_credentials" not in kvstore_of(files, "")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    assert kvstore_of(files, "")["aws_credentials"] == {"type": "anonymous"}
