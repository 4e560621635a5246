"""Object stores: what the shipped suite does not ask of every store."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.log.test_log_stale_listings import save
from tests.store.proxy import Request, proxied
from tests.store.servers import Server

from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.commit.save import Participant
from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, NoSpace, RelightError, StoreUnavailable
from relight.format.names import CheckpointDir
from relight.log import Log
from relight.observe import counters
from relight.reclaim import execute_sweep, plan_sweep
from relight.store import object_writer as writing
from relight.store import open_bytes, probe, put
from relight.store.base import Uncertain
from relight.store.object_client import Bucket, RetryTimes, shortened, translate
from relight.store.object_uploads import boto3_client
from relight.store.objects import ObjectStore
from relight.store.urls import split_run
from relight.testing.store_suite import read_all, refuses, write_all

QUICK = RetryTimes(request_s=0.8, deadline_s=3.0, tries=3, pause_s=0.01, pause_max_s=0.1)


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("s3://bucket/some/prefix", ("s3", "bucket", "some/prefix")), ("s3a://bucket/", ("s3", "bucket", "")),
        ("gs://bucket/a", ("gs", "bucket", "a")), ("gcs://bucket", ("gs", "bucket", "")), ("AZ://box/a/b/", ("az", "box", "a/b")),
    ],
)  # fmt: skip
def test_where_a_url_leads(url: str, found: tuple[str, str, str]) -> None:
    """A URL has a scheme, a bucket and a prefix."""
    assert Bucket.from_url(url) == found
    assert isinstance(open_bytes(url), ObjectStore)


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3:///run",
        "s3://key:secret@bucket/run",
        "s3://bucket/run?x=1",
        "s3://bucket/a//b",
        "s3://b/../x",
        "s3://b/a#f",
    ],
)
def test_invalid_urls_are_refused_without_any_request(url: str) -> None:
    """A URL must have no secret, query or parent directory. The error does not repeat a secret."""
    assert "secret" not in str(refuses(ConfigError, lambda: open_bytes(url))).replace("'secret'", "")


def test_runs_of_a_bucket() -> None:
    """The last component is the run."""
    assert split_run("s3://bucket/team/demo") == ("s3://bucket/team", "demo")
    assert split_run("s3://bucket/demo/") == ("s3://bucket", "demo")


class PermissionDeniedError(Exception):
    """The library's error of that name."""


def test_errors_state_what_happened_and_no_secret() -> None:
    """The error has the request, the status and the server's message, and neither query, user nor signature."""
    text = (
        "Generic S3 error: Error performing PUT https://me:hunter2@host/bucket/key?X-Amz-Signature=abc123&sig=zzz in 10.2ms - "
        "Server returned non-2xx status code: 403 Forbidden: <Error><Code>SignatureDoesNotMatch</Code><Message>no match</Message>"
        "<AWSAccessKeyId>AKIAXYZ</AWSAccessKeyId><StringToSign>AWS4 topsecret</StringToSign></Error>\n\nDebug source:\nwhatever secret"
    )
    message = shortened(Exception(text))
    assert message == "PUT https://host/bucket/key: 403 Forbidden, SignatureDoesNotMatch, no match"
    assert "sig=" not in shortened(Exception("cannot reach https://account.blob.core.windows.net/c/k?sv=1&sig=abc now"))
    assert len(shortened(Exception("x" * 10_000))) < 500
    denied = translate(PermissionDeniedError(text), "writing", "key")
    assert isinstance(denied, StoreUnavailable) and not denied.retryable and "credentials" in denied.hint
    assert isinstance(translate(FileNotFoundError("404"), "reading", "key"), CheckpointNotFound)
    assert isinstance(translate(Exception("status code: 507 Insufficient Storage"), "writing", "key"), NoSpace)
    without_credentials = translate(
        Exception("Error performing PUT http://169.254.169.254/latest/api/token in 1s - connection refused"),
        "opening",
        "key",
    )
    assert "no credentials were found" in without_credentials.hint
    passing = "Error performing GET http://h/b in 1ms - Server returned non-2xx status code: {}: x"
    assert translate(Exception(passing.format("503 Slow Down")), "reading", "key").retryable
    assert not translate(Exception(passing.format("400 Bad Request")), "reading", "key").retryable


def test_without_the_library_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the extra's name."""
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    error = refuses(ConfigError, lambda: ObjectStore("s3://some-bucket-of-its-own/x").get("a", 1))
    assert "relight[s3]" in error.hint


def test_a_forked_process_gets_an_error_and_does_not_hang(s3: str) -> None:
    """The library's threads do not survive a fork."""
    script = (
        "import os, sys\nfrom relight.store import open_bytes\nfrom relight.errors import StoreUnavailable\n"
        "store = open_bytes(sys.argv[1]); store.put_once('a', b'1')\n"
        "if os.fork() == 0:\n    try:\n        store.get('a', 9)\n    except StoreUnavailable as error:\n"
        "        os._exit(7 if not error.retryable and 'spawn' in error.hint else 8)\n    os._exit(9)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))"
    )
    assert subprocess.run([sys.executable, "-c", script, s3], timeout=60).returncode == 7


def test_a_process_that_ends_after_a_listing_ends_well(s3: str) -> None:
    """The end waits for the library's thread, which is still reporting the result to the event loop.

    Otherwise that thread ends in foreign code and aborts: a command with complete output, or a finished rank, ends by a
    signal (seen under load, 1 in 50).
    """
    script = (
        "import sys, time, asyncio\nfrom relight.store import open_bytes\n"
        "plain = asyncio.SelectorEventLoop._write_to_self\n"
        "def slowly(self):\n    plain(self)\n    time.sleep(0.3)\n"
        "asyncio.SelectorEventLoop._write_to_self = slowly\n"
        "class Late:\n    def __del__(self, sleep=time.sleep):\n        sleep(1)\n"  # the end takes its time
        "sys.modules['late'] = late = type(sys)('late'); late.late = Late()\n"
        "store = open_bytes(sys.argv[1]); store.put_once('a', b'1'); print(len(list(store.list(''))))"
    )
    done = subprocess.run([sys.executable, "-c", script, s3], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_a_missing_bucket_is_reported_at_once(s3: str) -> None:
    """A missing bucket is neither retried for two minutes nor taken for an empty store."""
    store = ObjectStore(f"s3://no-such-{random.randrange(10**9)}/x")
    started = time.monotonic()
    for call in (lambda: store.get("a", 1), lambda: list(store.list("")), lambda: store.put_once("a", b"")):
        assert "bucket" in refuses(StoreUnavailable, call).hint
    assert time.monotonic() - started < 10


def test_a_server_that_is_not_there_is_given_up_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes within about twice the deadline: the library's own retries, then ours."""
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
    }.items():
        monkeypatch.setenv(name, value)
    store = ObjectStore("s3://bucket/x", patience=QUICK._replace(deadline_s=1.0))
    for call in (
        lambda: store.get("a", 1),
        lambda: list(store.list("")),
        lambda: store.put_once("a", b""),
        lambda: put(store, "b", b"1"),
    ):
        started = time.monotonic()
        refuses(StoreUnavailable, call)
        assert time.monotonic() - started < 4 * QUICK.deadline_s


def test_a_listing_without_end_is_aborted(s3_server: Server, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that always has one more page: bounded time, and an error of ours."""
    with proxied(s3_server.address, lambda request: "endless" if request.is_listing else "") as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        store = ObjectStore(s3, patience=QUICK._replace(deadline_s=1.0))
        put(store, "a/b", b"1")
        started = time.monotonic()
        refuses(StoreUnavailable, lambda: list(store.list("a")))
        assert time.monotonic() - started < 10
        assert len(proxy.seen) > 2


signatures_are_not_checked = pytest.mark.skipif(
    os.environ.get("RELIGHT_TEST_S3", "moto") != "moto",
    reason="taking the condition out of a request breaks its signature",
)


def conditions_ignored(request: Request) -> str:
    return "unconditional" if request.conditional else ""


@signatures_are_not_checked
def test_a_server_that_ignores_conditions_is_found_out_and_refused(
    s3_server: Server, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No run begins there, and the probe leaves no file. The server is probed once a process."""
    probe.forget()
    with proxied(s3_server.address, conditions_ignored) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        store = ObjectStore(f"{s3}/place")
        assert not store.verify_exclusive_create()
        error = refuses(ConfigError, lambda: Attempt.begin(store, "run"))
        assert "RELIGHT_SINGLE_WRITER" in error.hint
        asked = sum(request.conditional for request in proxy.seen)
        refuses(ConfigError, lambda: store.put_once("x", b""))
        assert sum(request.conditional for request in proxy.seen) == asked
        assert list(store.list("")) == []


@signatures_are_not_checked
def test_one_writer_may_use_it_and_is_warned_every_time(
    s3_server: Server, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``RELIGHT_SINGLE_WRITER`` a run works there, and the writer makes each name once. Several ranks are
    refused."""
    probe.forget()
    with proxied(s3_server.address, conditions_ignored) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        monkeypatch.setenv("RELIGHT_SINGLE_WRITER", "1")
        store = ObjectStore(f"{s3}/place")
        before = counters["store.no_conditional_put"]
        attempt = Attempt.begin(store, "run")
        assert counters["store.no_conditional_put"] > before
        assert store.put_once("x", b"1") and not store.put_once("x", b"1")
        save(attempt, 0)
        request = SaveRequest(
            SaveInfo(step=1), tree=b"", items=[], id="0123456789", seat=Participant(0, 2, "0" * 16, 1.0)
        )
        assert "rank 0" in refuses(ConfigError, lambda: attempt.save(request)).hint


def test_the_probe_believes_a_server_that_honours_them(s3: str) -> None:
    """The probe leaves no files."""
    probe.forget()
    store = ObjectStore(f"{s3}/place")
    assert store.verify_exclusive_create()
    assert list(store.list("")) == []


def test_a_creation_with_lost_answers_knows_its_own_work(
    s3_server: Server, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the answer is lost, or a wrong refusal, the creation still returns True once, and False for a second one."""
    fault = ""
    armed = threading.Event()

    def decide(request: Request) -> str:
        if request.conditional and armed.is_set():
            armed.clear()
            return fault
        return ""

    with proxied(s3_server.address, decide) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        store = ObjectStore(s3, patience=QUICK)
        store.verify_exclusive_create()
        for number, fault in enumerate(
            ("500", "500 after", "503", "409", "412 after", "reset", "reset after", "hang", "hang after")
        ):
            armed.set()
            assert store.put_once(f"log/{number}", b"mine"), fault
            assert not armed.is_set()
            armed.set()
            assert not store.put_once(f"log/{number}", b"mine"), f"{fault}: the same bytes, from another call"


def test_large_objects_arrive_in_parts_in_any_near_order(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts may arrive out of order within the window. Reads at any offset are right, and memory stays within the
    window."""
    monkeypatch.setattr(writing, "WINDOW_BYTES", 6 << 20)
    store = ObjectStore(s3)
    data = random.Random(3).randbytes((20 << 20) + 777)
    writer = store.write("dir/large", len(data))
    waiting = []
    starts = list(range(0, len(data), 1 << 20))
    for index in range(0, len(starts), 4):
        for start in reversed(starts[index : index + 4]):
            writer.write_at(start, memoryview(data)[start : start + (1 << 20)])
            waiting.append(writer._held)  # type: ignore[attr-defined]
    writer.finish()
    assert max(waiting) <= 6 << 20
    reader = store.open("dir/large")
    assert reader.size == len(data)
    for start, length in ((0, len(data)), (65_000, 9 << 20), (len(data) - 5, 5), (10 << 20, 1)):
        room = bytearray(length)
        reader.read_into(start, memoryview(room))
        assert room == data[start : start + length]


def test_a_gap_that_stays_is_an_error(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread that writes backwards gets an error instead of waiting without end. No file is left."""
    monkeypatch.setattr(writing, "WINDOW_BYTES", 2 << 20)
    monkeypatch.setattr(writing, "STALL_S", 0.3)
    store = ObjectStore(s3)
    writer = store.write("dir/large", 20 << 20)
    piece = memoryview(bytes(1 << 20))
    with pytest.raises(StoreUnavailable, match="nothing was written at byte 0"):
        for start in reversed(range(1, 20)):
            writer.write_at(start << 20, piece)
    writer.abort()
    assert list(store.list("dir")) == []


@pytest.mark.parametrize("size", [100, 20 << 20])
def test_what_was_not_all_written_is_no_object(s3: str, size: int) -> None:
    """``finish`` of a file with a hole fails, and an aborted one leaves neither an object nor an upload."""
    store = ObjectStore(s3)
    writer = store.write("dir/file", size)
    writer.write_at(0, memoryview(bytes(50)))
    refuses(StoreUnavailable, writer.finish)
    writer.abort()
    assert list(store.list("dir")) == []
    assert store.uploads("") == []


def test_a_reader_is_bound_to_the_version_it_found(s3: str) -> None:
    """An object that is replaced, or deleted, while it is read, is never read as another."""
    store = ObjectStore(s3)
    first, second = (random.Random(n).randbytes(1 << 20) for n in (1, 2))
    write_all(store, "dir/file", first)
    reader = store.open("dir/file")
    store.overwrite("dir/file", second)
    room = bytearray(1 << 20)
    refuses(CorruptCheckpoint, lambda: reader.read_into(0, memoryview(room)))
    store.delete("dir/file")
    refuses(CorruptCheckpoint, lambda: reader.read_into(0, memoryview(room)))


UPLOAD = """
import os, sys, time
from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.commit.save import Participant
from relight.store import open_bytes
attempt = Attempt.begin(open_bytes(sys.argv[1]), "run")
writer = attempt.store.write(f"run/00000007-abcdefghij-e{attempt.epoch}/pack-00000-0.safetensors" if len(sys.argv) < 3 else sys.argv[2], 40 << 20)
for start in range(0, 30 << 20, 1 << 20):
    writer.write_at(start, memoryview(bytes(1 << 20)))
print("ready", attempt.epoch, flush=True)
time.sleep(600)
"""


def test_what_a_killed_process_was_uploading_is_swept_once_it_is_fenced(s3: str, tmp_path: Path) -> None:
    """An upload is in no listing.

    It stays while its attempt may live, and is deleted by the sweep after the next FENCE.
    """
    store = ObjectStore(f"{s3}/place")
    directory = CheckpointDir(7, "abcdefghij", 1)
    key = f"run/{directory}/pack-00000-0.safetensors"
    child = subprocess.Popen([sys.executable, "-c", UPLOAD, store.url, key], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline().split() == ["ready", "1"]
    ends = time.monotonic() + 20
    while not store.uploads("") and time.monotonic() < ends:
        time.sleep(0.1)
    assert [upload.key for upload in store.uploads("run")] == [key]
    assert str(directory) in [name for name, _ in plan_sweep(store, "run").held]
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    Attempt.begin(store, "run")
    assert [upload.key for upload in store.uploads("")] == [key]
    report = execute_sweep(plan_sweep(store, "run"), store)
    assert str(directory) in report.deleted
    assert store.uploads("") == []


def test_secrets_are_in_no_file_record_or_error(
    s3: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither key nor secret reaches the store, a log line or an error's text."""
    secret = os.environ["AWS_SECRET_ACCESS_KEY"]
    store = ObjectStore(f"{s3}/place")
    save(Attempt.begin(store, "run"), 0)
    seen = capfd.readouterr()
    texts = [seen.out, seen.err, repr(store), store.url]
    client = boto3_client()
    for listed in client.list_objects_v2(Bucket=Bucket.from_url(s3).name)["Contents"]:
        texts.append(
            client.get_object(Bucket=Bucket.from_url(s3).name, Key=listed["Key"])["Body"].read().decode("latin1")
        )
    try:
        ObjectStore("s3://no-such-bucket-at-all/x").get("a", 1)
    except RelightError as error:
        texts.append(str(error))
    assert len(texts) > 6
    assert not any(secret in text for text in texts)


def test_names_are_returned_unchanged(s3: str) -> None:
    """Names have characters with a meaning in URLs."""
    store = ObjectStore(s3)
    names = ["a+b", "a b", "a%41b", "ü", "a=b&c", "a;b", "a'b"]
    for name in names:
        put(store, f"dir/{name}", name.encode())
    assert sorted(entry.name for entry in store.list("dir")) == sorted(names)
    assert all(store.get(f"dir/{name}", 99) == name.encode() for name in names)


def test_one_reader_many_threads(s3: str) -> None:
    """Reads from many threads at once do not mix."""
    store = ObjectStore(s3)
    data = random.Random(5).randbytes(3 << 20)
    write_all(store, "file", data)
    reader = store.open("file")
    wrong: list[int] = []

    def read(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(10):
            start = rng.randrange(len(data) - 1)
            room = bytearray(rng.randrange(1, min(len(data) - start, 500_000)))
            reader.read_into(start, memoryview(room))
            if room != data[start : start + len(room)]:
                wrong.append(start)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_log_in_a_bucket_is_read_by_other_stores(s3: str) -> None:
    """Two stores of one URL see one run. Its records are JSON, as on a disk."""
    store, other = ObjectStore(f"{s3}/place"), ObjectStore(f"{s3}/place/")
    attempt = Attempt.begin(store, "run")
    assert Log(other, "run").read().head == attempt.view().head
    assert json.loads(read_all(other, "run/log/000000000000.json"))


@pytest.mark.parametrize("alone", [False, True], ids=["conditional", "single writer"])
def test_a_creation_that_cannot_be_read_back_is_uncertain(
    s3: str, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """It may have been done. A caller that took it for refused would delete what a record names."""
    store = ObjectStore(s3, patience=QUICK)
    create = store._put_alone if alone else store.create
    assert create("log/0", b"mine")
    answers = [None] if alone else []

    def answer(path: str, limit: int) -> Any:
        if not answers:
            raise StoreUnavailable("no answer", where=path)
        return answers.pop()

    monkeypatch.setattr(store, "_read_head", answer)
    with pytest.raises(Uncertain):
        create("log/1" if alone else "log/0", b"mine")
    if alone:
        answers.append(None)
        monkeypatch.setattr(store, "overwrite", answer)
        with pytest.raises(Uncertain):
            create("log/2", b"mine")


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_unfinished_uploads_are_listed_at_the_stores_server(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """The client of unfinished uploads uses the endpoint and region of the store's requests, and none sends unsigned ones."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    client = boto3_client()
    assert (client.meta.endpoint_url, client.meta.region_name) == ("http://127.0.0.1:9", "eu-west-1")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    assert boto3_client() is None and ObjectStore("s3://bucket/prefix").uploads("run") == []
