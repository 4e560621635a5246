"""Old checkpoints in a bucket are read in place, with the same results as from a directory."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from old_ones import check_arrived, make, state
from safetensors.torch import save_file

import relight
from relight.errors import (
    CheckpointNotFound,
    ConfigError,
    CorruptCheckpoint,
    NoSpace,
    StoreUnavailable,
    UnsafeContent,
)
from relight.importers import detect, import_checkpoint
from relight.importers.bucket import BLOCK_BYTES, BucketFiles, Listing, is_bucket
from relight.importers.zarr import kvstore_of
from relight.migrate import execute_migration, plan_migration, roll_back
from relight.store import ObjectStore, Version, open_bytes, put
from relight.store.object_client import RetryTimes

ORBAX = Path(__file__).parents[1] / "importers" / "golden" / "orb"


def upload(folder: Path, url: str) -> None:
    """Copy a directory into a bucket."""
    store = open_bytes(url)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            put(store, str(path.relative_to(folder)), path.read_bytes())


def bring(url: str, run: Path) -> dict[str, Any]:
    """Import one checkpoint in this process and load it."""
    import_checkpoint(detect(url), open_bytes(run.parent), run.name)
    result: dict[str, Any] = relight.load(run)
    return result


def test_a_bucket_gives_the_same_as_a_directory(tmp_path: Path, s3: str) -> None:
    """The plan equals that of a directory.

    The checkpoints are brought and compared with the bucket, once, and can be rolled back.
    """
    old = tmp_path / "old"
    made = make(old, 4)
    upload(old, f"{s3}/some/old")
    put(open_bytes(f"{s3}/some"), "older/ckpt_5.pt", b"not below it")
    near = plan_migration(str(old), str(tmp_path / "near"))
    new = tmp_path / "new"
    plan = plan_migration(f"{s3}/some/old/", str(new), check=1.0)
    assert [item.path for item in plan.todo] == [f"{s3}/some/old/{item.name}" for item in near.todo]
    assert [(item.name, item.run, item.step, item.format, item.bytes, item.tensors) for item in plan.todo] == [
        (item.name, item.run, item.step, item.format, item.bytes, item.tensors) for item in near.todo
    ]
    report = execute_migration(plan)
    assert (report.ok, len(report.brought), report.checked, report.wrong, report.failed) == (True, 4, 4, [], [])
    check_arrived(new, made)
    again = plan_migration(f"{s3}/some/old", str(new))
    assert (len(again.todo), len(again.there)) == (0, 4)
    assert sum(map(len, roll_back(f"{s3}/some/old", str(new)).gone.values())) == 4


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_folders_of_frameworks_are_read_in_place(tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A DCP folder, a Hugging Face folder and a file are read without a local copy and without unneeded bytes."""
    old = tmp_path / "old"
    tensors = {"big.weight": torch.arange(900_000.0).reshape(900, 1000), "bias": torch.ones(7)}
    old.mkdir()
    dcp.save({"model": tensors}, checkpoint_id=old / "dcp", no_dist=True)
    (old / "hf").mkdir()
    (old / "hf" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    save_file(tensors, old / "hf" / "model.safetensors", metadata={"format": "pt"})
    torch.save({"model": tensors, "step": 3}, old / "one.pt")
    upload(old, f"{s3}/old")
    asked: list[int] = []
    ranged = ObjectStore.read_range

    def counted(self: ObjectStore, path: str, etag: str | None, offset: int, into: memoryview) -> None:
        assert etag, "read without an etag"
        asked.append(len(into))
        ranged(self, path, etag, offset, into)

    monkeypatch.setattr(ObjectStore, "read_range", counted)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda *given, **named: pytest.fail("laid down here"))
    for name in ("dcp", "hf", "one.pt"):
        asked.clear()
        result = bring(f"{s3}/old/{name}", tmp_path / "new" / name.replace(".", "-"))
        assert all(torch.equal(result["model"][key], tensor) for key, tensor in tensors.items()), name
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        assert size <= sum(asked) <= size + 12 * BLOCK_BYTES, name


def test_only_a_tensor_that_is_not_contiguous_is_copied_to_a_file(
    tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transposed tensor is gathered through an unnamed file.

    Without room for it the import fails and commits nothing.
    """
    wide = torch.arange(60_000.0).reshape(200, 300)
    torch.save({"model": {"turned": wide.T, "plain": torch.ones(5)}}, tmp_path / "one.pt")
    upload(tmp_path, f"{s3}/old")
    result = bring(f"{s3}/old/one.pt", tmp_path / "new" / "run")
    assert torch.equal(result["model"]["turned"], wide.T)

    def full(*given: object, **named: object) -> object:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(NoSpace, match="TMPDIR"):
        bring(f"{s3}/old/one.pt", tmp_path / "new" / "other")
    assert not list((tmp_path / "new").glob("other/*-e*"))


@pytest.mark.parametrize("how", ["replaced", "deleted", "replaced at its end"])
def test_what_changes_while_it_is_read_does_not_come_in(how: str, tmp_path: Path, s3: str) -> None:
    """If the object is replaced or deleted during the import, the import fails and commits nothing."""
    data = [torch.full((50_000,), float(number)) for number in range(2)]
    for number, value in enumerate(data):
        torch.save({"w": value}, tmp_path / f"{number}.pt")
    store = open_bytes(f"{s3}/old")
    put(store, "one.pt", (tmp_path / "0.pt").read_bytes())
    result = detect(f"{s3}/old/one.pt")

    def change() -> None:
        store.delete("one.pt")
        if how != "deleted":
            put(store, "one.pt", (tmp_path / "1.pt").read_bytes())

    if how == "replaced at its end":
        unchanged = result.files.check_unchanged
        result.files.check_unchanged = lambda: (change(), unchanged())  # type: ignore[method-assign, assignment, return-value]
    else:
        change()
    with pytest.raises(CorruptCheckpoint, match="while it was read"):
        import_checkpoint(result, open_bytes(tmp_path / "new"), "run")
    assert not list((tmp_path / "new").glob("run/*-e*"))


def test_a_bucket_is_walked_as_a_directory(tmp_path: Path, s3: str) -> None:
    """A Relight store in the bucket and NEW are skipped, empty folder objects are ignored, and broken files are
    named."""
    make(tmp_path / "old", 1)
    upload(tmp_path / "old", f"{s3}/old")
    relight.save(f"{s3}/old/mine/run", {"x": 1}, step=1)
    store = open_bytes(f"{s3}/old")
    put(store, "bad/ckpt_3.pt", b"PK\x03\x04" + bytes(500))
    put(store, "bad/notes.txt", b"PK\x03\x04" + bytes(500))
    console = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"], region_name="us-east-1")
    for key in ("old/first/", "old/empty/"):
        console.put_object(Bucket=s3.removeprefix("s3://"), Key=key, Body=b"")
    plan = plan_migration(f"{s3}/old", f"{s3}/old/new")
    assert [item.name for item in plan.todo] == ["first/ckpt_0.pt"]
    assert [name for name, _ in plan.unreadable] == ["bad/ckpt_3.pt"]
    assert execute_migration(plan).brought[0]["run"] == "first"
    assert [item.name for item in plan_migration(f"{s3}/old", f"{s3}/old/new").there] == ["first/ckpt_0.pt"]
    result = relight.load(f"{s3}/old/new/first")
    assert torch.equal(result["model"]["w"], state(0)["model"]["w"])
    console.put_object(Bucket=s3.removeprefix("s3://"), Key="old//odd.pt", Body=b"")
    with pytest.raises(StoreUnavailable, match="old//odd.pt"):  # a name that no path can have
        plan_migration(f"{s3}/old", f"{s3}/old/new")


def test_the_commands_take_urls(s3: str, tmp_path: Path) -> None:
    """``relight import`` takes an object's URL, ``relight import --all`` an empty place, with right output and exit
    codes."""
    torch.save({"model": {"w": torch.ones(3)}, "step": 4}, tmp_path / "one.pt")
    upload(tmp_path, f"{s3}/old")

    def relight_(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "relight", *words], capture_output=True, text=True, check=False)

    done = relight_("import", f"{s3}/old/one.pt", str(tmp_path / "new" / "run"), "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["path"], result["step"], result["tensors"], result["there"]) == (f"{s3}/old/one.pt", 4, 1, False)
    done = relight_("import", "--all", f"{s3}/none", str(tmp_path / "other"), "--dry-run")
    assert done.returncode and f"this path does not exist [{s3}/none]" in done.stderr


@pytest.mark.parametrize("form", ["files", "ocdbt", "files3", "ocdbt3"])
def test_orbax_is_read_in_place(form: str, tmp_path: Path, s3: str) -> None:
    """tensorstore reads Orbax's arrays in the bucket. If an object changes meanwhile, nothing is committed."""
    upload(ORBAX / form, f"{s3}/orbax")
    expected = np.load(ORBAX / "expected.npz")
    result = bring(f"{s3}/orbax", tmp_path / "new" / "run")
    assert torch.equal(result["params"]["dense.kernel"], torch.from_numpy(expected["kernel"]))
    assert torch.equal(result["params"]["dense.bias"], torch.from_numpy(expected["bias"]))
    detected = detect(f"{s3}/orbax")
    chunk = next(
        str(path.relative_to(ORBAX / form))
        for path in (ORBAX / form).rglob("*")
        if path.is_file() and path.parent.name in ("d", "half", "c")
    )
    store = open_bytes(f"{s3}/orbax")
    store.delete(chunk)
    put(store, chunk, b"another")
    with pytest.raises(CorruptCheckpoint):
        import_checkpoint(detected, open_bytes(tmp_path / "new"), "other")
    assert not list((tmp_path / "new").glob("other/*-e*"))


def test_tensorstores_names_of_buckets() -> None:
    """Google Cloud Storage is read by tensorstore's driver, and Azure through the gateway, as tensorstore has no driver."""
    files = BucketFiles(Listing("az://container/old", {"_METADATA": Version(3, "x")}), "", is_folder=True)
    spec = kvstore_of(files, "")
    assert (spec["driver"], spec["path"]) == ("http", "/") and kvstore_of(files, "") == spec
    assert files.gateway is not None
    files.gateway.close()
    gcs = BucketFiles(Listing("gs://bucket/old", {"3/_METADATA": Version(3, "x")}), "", is_folder=True)
    assert kvstore_of(gcs, "3") == {"driver": "gcs", "bucket": "bucket", "path": "old/3/"}


def test_where_nothing_is(s3: str, tmp_path: Path) -> None:
    """Empty and missing places and unknown schemes are refused. Bucket paths are recognised by their scheme."""
    for url in (s3, f"{s3}/none", f"{s3}/none/deeper.pt"):
        with pytest.raises(CheckpointNotFound, match="this path does not exist"):
            plan_migration(url, str(tmp_path / "new"))
    with pytest.raises(CheckpointNotFound, match="s3://"):
        plan_migration("ftp://somewhere/old", str(tmp_path / "new"))
    with pytest.raises(ConfigError):
        detect("s3://")
    assert [is_bucket(url) for url in ("s3://a", "GS://a/b", "az://a", "https://a/b", "s3:/a", "/s3://a", "s3")] == [
        True,
        True,
        True,
        *4 * [False],
    ]


def test_a_listing_without_an_end_ends(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing that repeats a page for ever, or is longer than the limit, is aborted."""
    page = [{"path": "a/one", "size": 1, "e_tag": "x"}]
    call = ObjectStore._call

    def lists(pages: Any) -> None:
        monkeypatch.setattr(
            ObjectStore, "_call", lambda self, name: (lambda *a, **k: pages) if name == "list" else call(self, name)
        )

    def for_ever() -> Any:
        while True:
            yield page

    lists(for_ever())
    with pytest.raises(StoreUnavailable, match="repeats itself without end"):
        ObjectStore(f"{s3}/a", patience=RetryTimes(deadline_s=5)).versions("", 1000)
    lists([{"path": f"a/{number}", "size": 1, "e_tag": None}] for number in range(10**9))
    with pytest.raises(UnsafeContent, match="more than 1,000"):
        ObjectStore(f"{s3}/a").versions("", 1000)


def test_names_in_a_listing() -> None:
    """A listing separates direct and nested entries of names with equal beginnings, and omits names that are invalid
    paths."""
    from relight.store import Version

    version = Version(3, None)
    names = ["a/x", "a/b/y", "a-b/z", "a0", "a", "e//f", "../g", "h/", "k/l"]
    listing = Listing("s3://b", {**dict.fromkeys(names, version), "k": Version(0, None)})
    assert listing.below("a") == ["a/b/y", "a/x"]
    assert listing.inside("") == [("a", False), ("a", True), ("a-b", True), ("a0", False), ("k", True)]
    assert listing.inside("a") == [("b", True), ("x", False)]
    assert listing.below("") == sorted(listing.versions)


def test_short_reads_are_made_of_blocks(s3: str) -> None:
    """Reads are right at any offset, across pieces and at the object's end. A read beyond the end is damage."""
    from relight.importers.files import pread

    data = np.random.default_rng(0).integers(0, 256, 3 * BLOCK_BYTES + 77, "u1").tobytes()
    put(open_bytes(f"{s3}/old"), "one", data)
    files = BucketFiles.from_url(f"{s3}/old/one")
    with files.open("") as handle:
        for offset, length in (
            (0, 1),
            (BLOCK_BYTES - 3, 9),
            (5, BLOCK_BYTES - 1),
            (len(data) - 80, 80),
            (7, 2 * BLOCK_BYTES),
            (3, 0),
        ):
            assert pread(handle, offset, length, "one") == data[offset : offset + length]
        with pytest.raises(CorruptCheckpoint, match="too soon"):
            pread(handle, len(data) - 3, 4, "one")
