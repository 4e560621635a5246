"""Real faults are created and found; a healthy set-up has no finding."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import at_hand
import pytest
from tests.doctor.conftest import supervised
from tests.store.proxy import Request, proxied
from tests.store.servers import Server

from relight.catalog.tiers import announce
from relight.commit import Attempt
from relight.doctor import DoctorFacts, collect, judge
from relight.doctor.bounded import BoundedProbe
from relight.doctor.facts_run import measure_restore
from relight.doctor.facts_store import mount_of
from relight.errors import ConfigError, StoreUnavailable
from relight.format.names import STORE_FILE
from relight.heartbeat import Heartbeat, HeartbeatPage
from relight.heartbeat.heartbeat_page import make_page
from relight.keys import write_key_file
from relight.log import Log, fold
from relight.policy.tiers import Tier
from relight.store import LocalStore, Reader, open_bytes
from relight.store.disk import Disk


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Create a store with two runs on a disk."""
    at_hand.fill(tmp_path / "runs")
    return tmp_path / "runs"


def names(path: object, **more: Any) -> set[str]:
    """Return the names of the findings."""
    return {finding.name for finding in judge(collect(str(path), **more))}


def named(facts: DoctorFacts, name: str) -> Any:
    """Return the only finding with this name."""
    (finding,) = [finding for finding in judge(facts) if finding.name == name]
    return finding


@contextlib.contextmanager
def mounted(where: Path, *options: str) -> Iterator[Path]:
    """Mount, and unmount afterwards. Skip the test if mounting is not permitted."""
    where.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *options, str(where)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


# -- healthy ---------------------------------------------------------------------------------------------------------------------------


def test_nothing_is_found_on_a_healthy_set_up(runs: Path) -> None:
    """A healthy store, and one of its runs, have no finding and no failed probe."""
    for path in (runs, runs / "demo", f"{runs}/demo@latest"):
        facts = collect(str(path))
        assert judge(facts) == []
        assert facts.unseen == {}
        assert facts.store.probed and facts.store.exclusive and facts.store.write_bps
    assert len(facts.runs) == 1


def test_ranks_that_commit_the_same_are_no_two_jobs(runs: Path) -> None:
    """A repeated COMMIT, as of two ranks at once, is void, and no problem."""
    attempt = Attempt.begin(open_bytes(runs), "twice")
    attempt.save(at_hand.request(9))
    log = attempt._place.log
    log.append(lambda view: (view.records[-1].body, 1))
    assert fold(log.read()).void
    assert names(runs) == set()


def test_doctor_changes_no_file(runs: Path) -> None:
    """Doctor leaves all files unchanged, and does not create a missing store."""
    before = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    directories = {path for path in runs.rglob("*") if path.is_dir()}
    collect(str(runs))
    assert {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()} == before
    assert {path for path in runs.rglob("*") if path.is_dir()} == directories
    assert names(runs.parent / "to" / "come") == {"nothing-there"}
    assert not (runs.parent / "to").exists()
    (runs.parent / "empty").mkdir()
    assert names(runs.parent / "empty") == {"nothing-there"}
    (runs.parent / "other").mkdir()
    assert names(f"stripe:{runs.parent}/empty,{runs.parent}/other,") == {"nothing-there"}
    assert not any([*(runs.parent / "empty").iterdir(), *(runs.parent / "other").iterdir()])


def test_a_typo_is_reported_with_a_suggestion(runs: Path) -> None:
    """The nearest run name is suggested; an invalid URL is a usage error."""
    assert "did you mean demo?" in named(collect(f"{runs}/dmo"), "nothing-there").evidence
    for wrong in ("xyz://a", "", "s3://", "runs\0"):
        with pytest.raises(ConfigError):
            collect(wrong)


def test_a_healthy_bucket_has_nothing(s3: str) -> None:
    """An object store that honours conditions, with a run: no finding."""
    Attempt.begin(open_bytes(f"{s3}/runs"), "demo").save(at_hand.request(99))
    facts = collect(f"{s3}/runs/demo")
    assert judge(facts) == []
    assert facts.store.exclusive and facts.store.kind == "object" and len(facts.runs) == 1


# -- stores ----------------------------------------------------------------------------------------------------------------------------


def test_a_full_file_system(tmp_path: Path) -> None:
    """A full tmpfs: no space, and a store in memory."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=1m", "none") as root:
        at_hand.fill(root / "runs")
        with open(root / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        assert {"full", "in-memory"} <= names(root / "runs")


def test_a_file_system_without_inodes(tmp_path: Path) -> None:
    """The file system has free space and no free inodes."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=8m,nr_inodes=80", "none") as root:
        at_hand.fill(root / "runs")
        finding = named(collect(str(root / "runs")), "inodes")
        assert "are free" in finding.evidence
        number = 0
        with contextlib.suppress(OSError):
            for number in range(80):
                (root / f"file-{number}").touch()
        assert number < 79
        assert {"full", "inodes"} <= names(root / "runs")


def test_a_read_only_file_system(tmp_path: Path) -> None:
    """A read-only file system."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=8m", "none") as root:
        at_hand.fill(root / "runs")
        subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
        finding = named(collect(str(root / "runs")), "unwritable")
        assert "read-only" in finding.what and "findmnt" in finding.command


WITHOUT_RIGHTS = """
import json, os, sys
from relight.doctor import collect, judge
judge(collect(sys.argv[2]))  # import everything while it can still be read
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
print(json.dumps([one.name for one in judge(collect(sys.argv[1], quick=True))]))
"""


def test_a_directory_without_permission(tmp_path: Path) -> None:
    """A store of another user that is readable and not writable."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        os.chmod(name, 0o755)
        runs = Path(name) / "runs"
        at_hand.fill(runs)
        at_hand.fill(tmp_path / "other")
        for path in (runs, *runs.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        command = [sys.executable, "-c", WITHOUT_RIGHTS, str(runs), str(tmp_path / "other")]
        done = subprocess.run(command, capture_output=True, text=True, env=at_hand.environment(), check=False, cwd="/")
        for path in (runs, *runs.rglob("*")):
            path.chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["unwritable"]


def test_a_file_where_the_store_should_be(tmp_path: Path) -> None:
    """A file instead of a store gives a finding, not a traceback."""
    (tmp_path / "file").write_text("hello")
    assert names(tmp_path / "file") == {"not-a-directory"}


def test_an_fsync_that_does_nothing(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An fsync that returns at once has not reached the disk."""
    mount = mount_of(str(runs))
    if mount is None or not mount.source.startswith("/dev/"):
        pytest.skip("these tests do not run on a disk")
    monkeypatch.setattr(Disk, "fsync", lambda self, fd: None)
    assert names(runs) == {"fsync"}


def test_a_preloaded_liar(runs: Path) -> None:
    """eatmydata is found by its name in the process that preloads it."""
    done = at_hand.in_child("doctor", runs, "--quick", "--json", LD_PRELOAD="libeatmydata.so")
    assert "preload" in [finding["name"] for finding in done.json["findings"]]


def test_a_world_writable_store(runs: Path) -> None:
    """A world-writable store is a finding, unless it has the sticky bit."""
    runs.chmod(0o777)
    assert names(runs) == {"shared-write"}
    runs.chmod(0o777 | stat.S_ISVTX)
    assert names(runs) == set()


def test_leftovers_of_a_killed_bench(runs: Path) -> None:
    """The finding names the directory, so that the user can remove it."""
    (runs / ".relight-bench-12345678").mkdir()
    assert named(collect(str(runs)), "bench-leftovers").command.endswith("/.relight-bench-12345678")


def conditions_ignored(request: Request) -> str:
    return "unconditional" if request.conditional else ""


def test_a_server_that_ignores_conditions(s3_server: Server, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is tested again each time. RELIGHT_SINGLE_WRITER removes the command, not the finding."""
    Attempt.begin(open_bytes(f"{s3}/runs"), "demo").save(at_hand.request(99))
    with proxied(s3_server.address, conditions_ignored) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        finding = named(collect(f"{s3}/runs"), "conditional-writes")
        assert (
            finding.section == "This server ignores 'create if absent'"
            and finding.command == "export RELIGHT_SINGLE_WRITER=1"
        )
        monkeypatch.setenv("RELIGHT_SINGLE_WRITER", "1")
        assert named(collect(f"{s3}/runs"), "conditional-writes").command == ""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.address)
    assert names(f"{s3}/runs") == {"single-writer"}


def test_a_bucket_that_is_not_there(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unreachable server is a finding, within a command's patience."""
    monkeypatch.setenv("RELIGHT_STORE_PATIENCE_S", "3")
    assert "store-away" in names("s3://no-such-bucket-7f3a/runs")


# -- keys and settings -----------------------------------------------------------------------------------------------------------------


def test_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys: only one, none, a wrong one, one that other users can read, one inside the store."""
    write_key_file(str(tmp_path / "a.key"))
    write_key_file(str(tmp_path / "b.key"))
    monkeypatch.setenv("RELIGHT_KEY", f"file:{tmp_path / 'a.key'}")
    at_hand.fill(tmp_path / "runs")
    assert names(tmp_path / "runs") == {"keys-one"}
    (tmp_path / "a.key").chmod(0o644)
    assert names(tmp_path / "runs") == {"setting-bad", "key-file"}
    (tmp_path / "a.key").chmod(0o600)
    shutil.copy(tmp_path / "a.key", tmp_path / "runs" / "a.key")
    monkeypatch.setenv("RELIGHT_KEY", f"file:{tmp_path / 'runs' / 'a.key'}")
    assert names(tmp_path / "runs") == {"keys-one", "key-inside"}
    monkeypatch.setenv("RELIGHT_KEY", f"file:{tmp_path / 'b.key'}")
    assert "wrong-key" in names(tmp_path / "runs")
    monkeypatch.delenv("RELIGHT_KEY")
    findings = judge(collect(str(tmp_path / "runs")))
    assert [finding.name for finding in findings] == ["wrong-key"]


def test_settings(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown setting, invalid values, and a file with an unknown key or table."""
    monkeypatch.setenv("RELIGHT_CASHE", "/x")
    monkeypatch.setenv("RELIGHT_GRACE_S", "soon")
    facts = collect(str(runs))
    assert "RELIGHT_CACHE" in named(facts, "setting-unknown").evidence
    assert "soon" in named(facts, "setting-bad").evidence
    monkeypatch.delenv("RELIGHT_CASHE")
    monkeypatch.setenv("RELIGHT_GRACE_S", "30")
    Path("relight.toml").write_text("[supervise]\nsparse = true\n")
    assert "sparse" in named(collect(str(runs)), "toml").evidence
    Path("relight.toml").write_text("[supervice]\nspares = true\n")
    assert names(runs) == {"toml"}
    Path("relight.toml").write_text("[supervise\n")
    assert names(runs) == {"toml"}


def test_a_cache_that_is_a_file(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unusable cache is a finding; a directory that does not exist yet is none."""
    monkeypatch.setenv("RELIGHT_CACHE", str(tmp_path / "cache" / "new"))
    assert names(runs) == set()
    (tmp_path / "cache").write_text("")
    assert names(runs) == {"cache"}


# -- the machine -----------------------------------------------------------------------------------------------------------------------


def test_limits_of_a_process(runs: Path) -> None:
    """Limits are lowered in a child process: open files, file size, address space, locked memory."""
    script = """
import resource, sys, json
import relight.doctor.facts_machine as machine
from relight.doctor import collect, judge
machine._accelerators = lambda: {"NVIDIA": 8}
for which, value in (("NOFILE", 200), ("FSIZE", 1 << 20), ("AS", 3 << 30), ("MEMLOCK", 16 << 10)):
    resource.setrlimit(getattr(resource, f"RLIMIT_{which}"), (value, value))
print(json.dumps([one.name for one in judge(collect(sys.argv[1], quick=True))]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(runs)], capture_output=True, text=True, env=at_hand.environment(), check=True
    )
    assert {"open-files", "file-size", "address-space", "memlock"} <= set(json.loads(done.stdout))
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 200


def test_pages_of_a_supervisor_that_was_killed(runs: Path, memory: Path) -> None:
    """Memory files of a dead supervisor are found, and those of a live one are not."""
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    supervised(memory, gone.pid)
    supervised(memory, os.getpid())
    finding = named(collect(str(runs)), "dead-supervisors")
    assert str(gone.pid) in finding.evidence and str(os.getpid()) not in finding.evidence


def test_an_old_package(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older version that comes first on the path is found."""
    folder = tmp_path / "site" / "msgspec-0.11.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: msgspec\nVersion: 0.11.0\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    finding = named(collect(str(runs)), "package-old")
    assert "0.11.0" in finding.evidence and finding.command.startswith("pip install 'msgspec>=")


def test_a_package_that_a_store_needs(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket without its library: the finding names the package to install."""
    import relight.doctor.facts_machine as machine

    installed_version = machine._version
    monkeypatch.setattr(machine, "_version", lambda name: "" if name == "obstore" else installed_version(name))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("RELIGHT_STORE_PATIENCE_S", "1")
    assert {"package-missing", "store-away"} <= names("s3://bucket/runs")
    assert "package-missing" not in names(runs)


def test_names_that_do_not_resolve(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MASTER_ADDR does not resolve, and the address for peers is another machine's."""
    monkeypatch.setenv("MASTER_ADDR", "node-0.invalid")
    monkeypatch.setenv("RELIGHT_PEERS_HOST", "192.0.2.1")
    problems = [finding.what for finding in judge(collect(str(runs))) if finding.name == "names"]
    assert len(problems) == 2
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("RELIGHT_PEERS_HOST", "127.0.0.1")
    assert names(runs) == set()


def test_a_probe_that_hangs_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hanging probe is recorded as unseen at its time limit; a failing one with its error text."""
    probes = BoundedProbe(0.2)
    began = time.monotonic()
    assert probes.at("a mount", lambda: time.sleep(30) or "late", "otherwise") == "otherwise"
    assert time.monotonic() - began < 5
    assert probes.at("a file", lambda: Path("/no/such/file").read_text(), "") == ""
    assert "no answer within" in probes.unseen["a mount"] and "/no/such/file" in probes.unseen["a file"]


def test_a_store_that_hangs_is_reported_at_the_time_limit(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount without its server is reported at the time limit, and other probes continue."""
    monkeypatch.setattr(sys.modules["relight.doctor.collect"], "PLACE_S", 0.5)
    ended = threading.Event()

    def hang(self: LocalStore, key: str) -> Reader:
        ended.wait(60)
        raise StoreUnavailable("the server is gone")

    monkeypatch.setattr(LocalStore, "open", hang)
    monkeypatch.setenv("RELIGHT_CASHE", "/x")
    began = time.monotonic()
    facts = collect(str(runs), quick=True)
    ended.set()
    assert time.monotonic() - began < 20
    assert "no answer within" in named(facts, "store-away").evidence
    assert named(facts, "setting-unknown")


# -- runs ------------------------------------------------------------------------------------------------------------------------------


def test_a_pack_that_was_cut(runs: Path) -> None:
    """A truncated pack is named with its sizes and the section of the page."""
    (pack,) = at_hand.directory(runs, 3).glob("pack-*")
    os.truncate(pack, 100)
    finding = named(collect(str(runs / "demo")), "checkpoint-damaged")
    assert (
        pack.name in finding.evidence
        and "100 bytes" in finding.evidence
        and finding.section == "A checkpoint is skipped"
    )


def test_all_checkpoints_gone(runs: Path) -> None:
    """If no checkpoint can be restored, that is reported in addition to the damage."""
    for number in range(4):
        shutil.rmtree(at_hand.directory(runs, number))
    assert {"checkpoint-damaged", "none-left"} <= names(runs / "demo")


def test_a_record_with_a_flipped_bit(runs: Path) -> None:
    """The damaged file of the log is named."""
    record = sorted((runs / "demo" / "log").iterdir())[2]
    at_hand.flip(record, 40)
    assert record.name in named(collect(str(runs / "demo")), "log-damaged").where


def test_relight_json_is_gone_or_damaged(runs: Path) -> None:
    """Both problems are reported, and the runs are still examined."""
    at_hand.flip(runs / STORE_FILE, 20)
    assert "relight-json" in names(runs)
    (runs / STORE_FILE).unlink()
    assert "relight-json" in names(runs)
    assert collect(str(runs)).runs


def test_leftovers_of_a_dead_attempt(runs: Path) -> None:
    """Leftovers: a directory of a superseded attempt, and a temporary file of an existing record."""
    (runs / "demo" / "0000000111-aaaaaaaaaa-e1").mkdir()
    record = sorted((runs / "demo" / "log").iterdir())[1]
    (record.parent / f".tmp-{record.name}-0123456789abcdef").write_bytes(b"half")
    assert names(runs / "demo") == {"leftovers", "temporaries"}


def test_a_superseded_attempt_that_continued(tmp_path: Path) -> None:
    """Its commits are void, and two writing jobs are reported."""
    at_hand.fenced(tmp_path / "runs")
    assert "superseded" in names(tmp_path / "runs")


def saved_at(attempt: Attempt, then: float, step: int) -> None:
    """Save a checkpoint as a machine does that has the time ``then``."""
    attempt._place.log._now = lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(then))
    attempt.save(at_hand.request(step))


def test_clocks(tmp_path: Path) -> None:
    """A record with a time in the future, and a later record with an earlier time."""
    attempt = Attempt.begin(open_bytes(tmp_path / "runs"), "demo")
    saved_at(attempt, time.time() + 86400, 99)
    assert names(tmp_path / "runs") == {"clock-records"}
    saved_at(attempt, time.time(), 199)
    assert names(tmp_path / "runs") == {"clock-order"}


def test_a_run_under_way_that_does_not_save(tmp_path: Path, memory: Path) -> None:
    """A live run with an old newest checkpoint is stale; without its live process there is no finding."""
    attempt = Attempt.begin(open_bytes(tmp_path / "runs"), "demo")
    for number in range(5):
        saved_at(attempt, time.time() - 7200 + 60 * number, 100 * number + 99)
    assert "stale" not in names(tmp_path / "runs")
    folder = supervised(memory, os.getpid())
    make_page(folder / "heartbeat-0")
    HeartbeatPage(folder / "heartbeat-0").write(
        Heartbeat(pid=os.getpid(), phase="training", url=str(tmp_path / "runs"), run="demo")
    )
    assert "stale" in names(tmp_path / "runs" / "demo")


def test_restarts_without_progress(tmp_path: Path) -> None:
    """Five attempts without a checkpoint are reported."""
    store = open_bytes(tmp_path / "runs")
    Attempt.begin(store, "demo").save(at_hand.request(99))
    for _ in range(5):
        Attempt.begin(store, "demo", reason="restart")
    assert names(tmp_path / "runs") == {"no-progress"}


def test_a_loss_that_is_nan(tmp_path: Path) -> None:
    """The finding names the checkpoint to branch from."""
    attempt = Attempt.begin(open_bytes(tmp_path / "runs"), "demo")
    attempt.save(at_hand.request(99))
    attempt.save(at_hand.request(199, metrics={"loss": float("nan")}))
    assert f"@{at_hand.ids(tmp_path / 'runs')[0]} " in named(collect(str(tmp_path / "runs")), "loss").command


def test_tiers(runs: Path, tmp_path: Path) -> None:
    """A tier that lacks checkpoints lags only after an hour; a tier with a file as its log is unreadable."""
    log = Log(open_bytes(runs), "demo")
    announce(log, [Tier(f"{runs}/demo", name="hot"), Tier(f"{tmp_path}/far/demo", name="cold")], 2)
    facts = collect(str(runs / "demo"))
    assert [(tier.name, tier.lacks > 0) for tier in facts.runs[0].tiers] == [("cold", True)]
    assert judge(facts) == []
    (tmp_path / "far" / "demo").mkdir(parents=True)
    (tmp_path / "far" / "demo" / "log").write_text("no directory")
    assert names(runs / "demo") == {"tier-away"}


def test_a_restore_is_measured_and_bounded(runs: Path) -> None:
    """Every byte of the newest checkpoint is read, within the bound, and damage is reported."""
    store = open_bytes(runs)
    whole = measure_restore(store, "demo", bytes_max=1 << 30, seconds_max=60)
    assert whole is not None and whole.whole and not whole.damage and whole.bytes == 4384
    part = measure_restore(store, "demo", bytes_max=1, seconds_max=60)
    assert part is not None and part.bytes >= 1
    (pack,) = at_hand.directory(runs, 3).glob("pack-*")
    at_hand.flip(pack)
    damaged = measure_restore(store, "demo", bytes_max=1 << 30, seconds_max=60)
    assert damaged is not None and damaged.damage
