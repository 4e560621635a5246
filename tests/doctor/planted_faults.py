"""A healthy set-up as a value, and faults to plant into it, each with the only checks that must find it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from relight.doctor.facts import (
    AttemptFacts,
    CheckpointFacts,
    ConfigFacts,
    DoctorFacts,
    DriveFacts,
    IncidentFacts,
    KeyFile,
    LiveProcess,
    Machine,
    Mount,
    NodeFacts,
    Package,
    PeersPlane,
    RunFacts,
    StoreFacts,
    StoreKey,
    TierFacts,
    Trouble,
)

NOW = 1_790_000_000.0
GB = 10**9
DISK = Mount("ext4", "/dev/nvme0n1", "/data", frozenset({"rw", "relatime"}))
NFS = Mount("nfs4", "server:/data", "/data", frozenset({"rw", "hard", "vers=4.2"}))


def stored(number: int, **more: Any) -> CheckpointFacts:
    """Return checkpoint ``number``: one was saved every ten minutes, and the newest is a minute old."""
    made = CheckpointFacts(
        f"id{number:08d}",
        100 * number + 99,
        NOW - 60 - 600 * (5 - number),
        2 * GB,
        2 * GB,
        damage=(),
        metrics={"loss": 1.0},
    )
    return made._replace(**more)


RUN = RunFacts(
    name="demo",
    path="/data/runs/demo",
    records=12,
    attempts=(AttemptFacts(1, NOW - 4000, "node-1", 6),),
    checkpoints=tuple(stored(number) for number in range(6)),
    newest_record_s=NOW - 60,
    retired=40,
    environment={
        "relight": "0.1.0",
        "torch": "2.13.0+cpu",
        "threads": 8,
        "argv": ["/code/train.py", "--lr", "1"],
        "background": True,
    },
    tiers=(TierFacts("cold", "s3://bucket/runs/demo"),),
    supervised=True,
)
HEALTHY = DoctorFacts(
    machine=Machine(
        host="node-1",
        now=NOW,
        memory_bytes=64 * GB,
        shm_bytes=32 * GB,
        shm_free_bytes=31 * GB,
        limits={"open files": 65536, "processes": 90000, "memlock": 8 << 20},
        packages=(Package("blake3", "1.0.4", "1.0.11"), Package("torch", "2.6", "2.13.0")),
    ),
    store=StoreFacts(
        url="/data/runs",
        mount=DISK,
        free_bytes=900 * GB,
        size_bytes=1000 * GB,
        free_inodes=10_000_000,
        mode=0o755,
        probed=True,
        exclusive=True,
        direct=True,
        fsync_s=0.0004,
        write_bps=1e9,
        answer_s=0.0001,
        skew_s=0.0,
        encrypted=False,
        runs=("demo",),
    ),
    runs=(RUN,),
    config=ConfigFacts(settings=frozenset({"RELIGHT_CACHE"})),
)


def machine(**more: Any) -> DoctorFacts:
    """Return the healthy facts with changes to the machine."""
    return replace(HEALTHY, machine=replace(HEALTHY.machine, **more))


def store(**more: Any) -> DoctorFacts:
    """Return the healthy facts with changes to the store."""
    return replace(HEALTHY, store=replace(HEALTHY.store, **more))


def run(**more: Any) -> DoctorFacts:
    """Return the healthy facts with changes to the run."""
    return replace(HEALTHY, runs=(replace(RUN, **more),))


def config(**more: Any) -> DoctorFacts:
    """Return the healthy facts with changes to the settings."""
    return replace(HEALTHY, config=replace(HEALTHY.config, **more))


def limit(name: str, value: int, **more: Any) -> DoctorFacts:
    """Return the healthy facts with another limit."""
    return machine(limits={**HEALTHY.machine.limits, name: value}, **more)


def probe(kind: str, what: str = "EIO, Input/output error") -> DoctorFacts:
    """Return facts of a store in which a small file cannot be written."""
    return store(probe=Trouble(kind, what, "/data/runs/demo/.probe-1"))


def newest(**more: Any) -> DoctorFacts:
    """Return the healthy facts with changes to the newest checkpoint."""
    return run(checkpoints=(*RUN.checkpoints[:-1], stored(5, **more)))


def under_way(facts: DoctorFacts) -> DoctorFacts:
    """Return facts of a run that trains on this machine."""
    return replace(facts, machine=replace(facts.machine, live=(LiveProcess(4711, "/data/runs", "demo"),)))


def on_object_store(**more: Any) -> DoctorFacts:
    """Return facts of a bucket instead of a disk."""
    return store(
        url="s3://bucket/runs",
        kind="object",
        mount=None,
        free_bytes=None,
        size_bytes=None,
        free_inodes=None,
        mode=None,
        fsync_s=None,
        **more,
    )


_OLD = tuple(stored(number, time_s=NOW - 50_000 - 600 * (5 - number)) for number in range(6))
_INCIDENT = IncidentFacts(NOW - 30, "device memory", "resume", "rank 3: CUDA out of memory")
_BARREN = tuple(AttemptFacts(epoch, NOW - 100 * (9 - epoch), "node-7", 0) for epoch in range(2, 8))
_NOTHING_RETIRED = {
    "retired": 0,
    "checkpoints": tuple(stored(number, new_bytes=110 * GB, bytes=2 * GB) for number in range(6)),
}


def nodes(**second: Any) -> DoctorFacts:
    """Return facts of two equal nodes, with changes to the second."""
    first = NodeFacts(
        0,
        True,
        "a",
        {"torch": "2.5"},
        {"RELIGHT_KEY": "1f"},
        DISK,
        True,
        0.0,
        64 * GB,
        {"NVIDIA": 8},
        {"open files": 4096},
    )
    return replace(HEALTHY, nodes=(first, first._replace(rank=1, host="b", **second)))


FAULTS: dict[str, tuple[Callable[[], DoctorFacts], set[str]]] = {
    # between nodes
    "a node stays away": (lambda: replace(HEALTHY, nodes=(*nodes().nodes, NodeFacts(2, False))), {"node-missing"}),
    "nodes with two torches": (lambda: nodes(versions={"torch": "2.4"}), {"node-versions"}),
    "a package on one only": (lambda: nodes(versions={"torch": "2.5", "obstore": "0.9"}), {"node-versions"}),
    "a key on one only": (lambda: nodes(settings={}), {"node-settings"}),
    "two keys": (lambda: nodes(settings={"RELIGHT_KEY": "2f"}), {"node-settings"}),
    "another relight.toml": (lambda: nodes(settings={"RELIGHT_KEY": "1f", "relight.toml": "3f"}), {"node-settings"}),
    "a disk of its own": (lambda: nodes(sees=False), {"node-store"}),
    "mounted in another way": (lambda: nodes(mount=DISK._replace(options=frozenset({"ro"}))), {"node-mounts"}),
    "not mounted": (lambda: nodes(mount=None), {"node-mounts"}),
    "a clock that is late": (lambda: nodes(ahead_s=-60.0), {"node-clocks"}),
    "fewer devices": (lambda: nodes(accelerators={"NVIDIA": 7}), {"node-machines"}),
    "half the memory": (lambda: nodes(memory_bytes=32 * GB), {"node-machines"}),
    "fewer open files there": (lambda: nodes(limits={"open files": 1024}), {"node-machines"}),
    # the machine
    "no memory for a copy": (lambda: machine(memory_bytes=1 * GB), {"memory"}),
    "memory for one copy": (lambda: machine(memory_bytes=3 * GB), {"memory"}),
    "memory is not promised": (lambda: machine(commit_bytes=1 * GB), {"overcommit"}),
    "shared memory of a container": (lambda: machine(shm_bytes=64 << 20, shm_free_bytes=60 << 20), {"shm"}),
    "shared memory is full": (lambda: machine(shm_free_bytes=4096), {"shm-full"}),
    "memlock with a fabric": (lambda: limit("memlock", 8 << 20, fabric=True), {"memlock"}),
    "memlock with a device": (lambda: limit("memlock", 0, accelerators={"NVIDIA": 8}), {"memlock"}),
    "NIXL is not installed": (lambda: limit("memlock", 1 << 40, fabric=True, peers_plane=PeersPlane("auto", "tcp", "NIXL is not installed")), {"peers-plane"}),
    "no plug-in for RDMA": (lambda: machine(peers_plane=PeersPlane("rdma", "tcp", "NIXL has no UCX plugin")), {"peers-plane"}),
    "few open files": (lambda: limit("open files", 256), {"open-files"}),
    "few processes": (lambda: limit("processes", 64), {"processes"}),
    "small files only": (lambda: limit("file size", 1 << 20), {"file-size"}),
    "little address space": (lambda: limit("address space", 1 << 30), {"address-space"}),
    "eatmydata": (lambda: machine(preload="/usr/lib/libeatmydata.so"), {"preload"}),
    "a clock of 1970": (lambda: machine(now=3600.0), {"clock-wrong", "clock-records"}),
    "a record of tomorrow": (lambda: run(newest_record_s=NOW + 86400), {"clock-records"}),
    "records that go back": (lambda: run(back_s=3000.0), {"clock-order"}),
    "a device that fell off": (lambda: machine(kernel=(("hardware", "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus"),)), {"kernel-log"}),
    "pages of a dead supervisor": (lambda: machine(dead_supervisors=("/dev/shm/relight-run-123-x",)), {"dead-supervisors"}),
    "a package is gone": (lambda: machine(packages=(Package("obstore", "0.9", "", "s3://"),)), {"package-missing"}),
    "a package is old": (lambda: machine(packages=(Package("msgspec", "0.19", "0.18.6"),)), {"package-old"}),
    "a host without an address": (lambda: machine(names=(("MASTER_ADDR", "node-0.cluster", "Name or service not known"),)), {"names"}),
    # the store
    "the store is away": (lambda: store(error=Trouble("store", "listing a directory failed: Input/output error (EIO)", "/data/runs")), {"store-away"}),
    "a typo": (lambda: replace(store(there=False, absent="no run 'dmo' in this store; did you mean demo?"), runs=()), {"nothing-there"}),
    "no key for it": (lambda: store(error=Trouble("wrong_key", "this store is encrypted", "/data/runs")), {"wrong-key"}),
    "another's key": (lambda: replace(HEALTHY, runs=(RunFacts(name="demo", path="p", error=Trouble("wrong_key", "none opens it")),)), {"wrong-key"}),
    "a file in its place": (lambda: store(is_directory=False), {"not-a-directory"}),
    "relight.json is damaged": (lambda: store(record=Trouble("corrupt", "its seal does not fit", "relight.json")), {"relight-json"}),
    "relight.json is gone": (lambda: store(record=Trouble("not_found", "no Relight store here")), {"relight-json"}),
    "no permission": (lambda: probe("store", "making a directory failed: EACCES"), {"unwritable"}),
    "read-only": (lambda: probe("store", "making a directory failed: EROFS"), {"unwritable"}),
    "no room at all": (lambda: probe("no_space", "ENOSPC"), {"full"}),
    "bytes come back otherwise": (lambda: probe("corrupt", "the store gives back other bytes"), {"bytes-differ"}),
    "the next does not fit": (lambda: store(free_bytes=1 * GB), {"space"}),
    "one more fits": (lambda: store(free_bytes=3 * GB), {"space-low"}),
    "little room, nothing saved": (lambda: replace(store(free_bytes=10**8), runs=()), {"space-low"}),
    "full by tonight": (lambda: replace(run(**_NOTHING_RETIRED), store=replace(HEALTHY.store, size_bytes=2000 * GB)), {"space-soon"}),
    "nothing ever goes": (lambda: replace(run(**_NOTHING_RETIRED), store=replace(HEALTHY.store, free_bytes=None)), {"retention"}),
    "few inodes": (lambda: store(free_inodes=300), {"inodes"}),
    "a store in memory": (lambda: store(mount=Mount("tmpfs", "tmpfs", "/data", frozenset({"rw"}))), {"in-memory"}),
    "no barriers": (lambda: store(mount=DISK._replace(options=frozenset({"rw", "nobarrier"}))), {"barriers"}),
    "a volatile overlay": (lambda: store(mount=Mount("overlay", "overlay", "/", frozenset({"rw", "volatile"}))), {"barriers"}),
    "fsync returns at once": (lambda: store(fsync_s=2e-6), {"fsync"}),
    "two winners of a name": (lambda: store(exclusive=False), {"hard-links"}),
    "a server without conditions": (lambda: on_object_store(exclusive=False), {"conditional-writes"}),
    "a bucket as files": (lambda: store(mount=Mount("fuse.s3fs", "s3fs", "/data", frozenset({"rw"}))), {"bucket-mount"}),
    "NFS soft": (lambda: store(mount=NFS._replace(options=frozenset({"rw", "soft", "vers=4.1"}))), {"nfs-soft"}),
    "NFS 3": (lambda: store(mount=NFS._replace(options=frozenset({"rw", "hard", "vers=3"}))), {"nfs-old"}),
    "NFS nocto": (lambda: store(mount=NFS._replace(options=frozenset({"rw", "hard", "nocto", "vers=4.2"}))), {"nfs-nocto"}),
    "the server's clock": (lambda: store(skew_s=-4000.0), {"clock-store"}),
    "a store far away": (lambda: store(answer_s=3.5), {"far"}),
    "a disk too slow": (lambda: store(write_bps=1e6), {"slow-writes"}),
    "no direct I/O": (lambda: store(direct=False), {"direct"}),
    "everybody may write": (lambda: store(mode=0o777), {"shared-write"}),
    "a key of years": (lambda: store(encrypted=True, keys=(StoreKey("a", 700.0, True), StoreKey("b", 3.0, True))), {"keys-old"}),
    "one key": (lambda: store(encrypted=True, keys=(StoreKey("a", 7.0, True),)), {"keys-one"}),
    "a drive of a mirrored store failed": (
        lambda: store(drives=(DriveFacts("/a", "good", "", ""), DriveFacts("/b", "away", "2026-11-28", "no answer"))),
        {"mirror-degraded"},
    ),
    "a drive is not whole": (lambda: store(drives=(DriveFacts("/b", "doubted", "", "wrong bytes"),)), {"mirror-degraded"}),
    "a bench was killed": (lambda: store(leftovers=(".relight-bench-1234",)), {"bench-leftovers"}),
    # the run
    "a log that cannot be read": (lambda: replace(HEALTHY, runs=(RunFacts(name="demo", path="p", error=Trouble("corrupt", "no record")),)), {"run-unreadable"}),
    "a record is damaged": (lambda: run(faults=(("demo/log/00000003.json", "its seal does not fit"),)), {"log-damaged"}),
    "the newest is damaged": (lambda: newest(damage=("pack: 100 bytes long, 4384 were committed",)), {"checkpoint-damaged"}),
    "all are damaged": (lambda: run(checkpoints=tuple(stored(n, damage=("gone",)) for n in range(6))), {"checkpoint-damaged", "none-left"}),
    "nothing was saved": (lambda: run(checkpoints=(), retired=0, attempts=(AttemptFacts(1, NOW - 5000, "node-1", 0),)), {"empty"}),
    "saves have stopped": (lambda: under_way(run(checkpoints=_OLD)), {"stale"}),
    "restarts without progress": (lambda: run(attempts=(*RUN.attempts, *_BARREN)), {"no-progress"}),
    "two jobs": (lambda: run(void=("record 9: its epoch 1 was fenced by 2",)), {"superseded"}),
    "ranks differed": (lambda: newest(suspect=True), {"suspect"}),
    "the loss is none": (lambda: newest(metrics={"loss": math.nan}), {"loss"}),
    "leftovers": (lambda: run(leftovers=(("0000000099-aaaaaaaaaa-e1", "left by attempt 1"),)), {"leftovers"}),
    "temporaries": (lambda: run(temporaries=("demo/log/.tmp-00000003.json-0123",)), {"temporaries"}),
    "a tier is away": (lambda: run(tiers=(TierFacts("cold", "s3://b/runs/demo", Trouble("store", "403")),)), {"tier-away"}),
    "a tier lacks checkpoints": (lambda: run(tiers=(TierFacts("cold", "s3://b/runs/demo", None, 3, 9000.0),)), {"tier-behind"}),
    "given up": (lambda: run(incidents=(_INCIDENT._replace(action="stop"),)), {"stopped"}),
    "fails again and again": (lambda: run(incidents=(_INCIDENT,) * 3), {"again"}),
    "not to the bit": (lambda: run(exact=("the loader has no state",)), {"inexact"}),
    "another torch": (lambda: run(environment={"torch": "2.11.0"}), {"software"}),
    "other threads": (lambda: replace(HEALTHY, config=ConfigFacts(threads="2")), {"software"}),
    "a newer Relight": (lambda: run(environment={"relight": "99.1.0"}), {"newer-relight"}),
    "a long chain": (lambda: newest(requires=80), {"chain"}),
    # settings
    "an unknown variable": (lambda: config(unknown=(("RELIGHT_KEYS", "RELIGHT_KEY"),)), {"setting-unknown"}),
    "an invalid value": (lambda: config(bad=(("RELIGHT_GRACE_S", Trouble("config", "not a number")),)), {"setting-bad"}),
    "an unknown key": (lambda: config(file="relight.toml", file_error=Trouble("config", "[supervise] has no 'sparse'")), {"toml"}),
    "a key for all": (lambda: config(key_files=(KeyFile("/keys/a", 0o644, False),)), {"key-file"}),
    "a key in its store": (lambda: config(key_files=(KeyFile("/data/runs/a", 0o600, True),)), {"key-inside"}),
    "dumps of keys": (lambda: config(settings=frozenset({"RELIGHT_CORE_DUMPS", "RELIGHT_KEY"})), {"core-dumps"}),
    "in the clear": (lambda: replace(on_object_store(), config=ConfigFacts(endpoint="http://minio.cluster:9000")), {"endpoint-clear"}),
    "a needless promise": (lambda: config(single_writer=True), {"single-writer"}),
    "a cache that cannot be": (lambda: config(cache=Trouble("store", "it may not be written to", "/cache")), {"cache"}),
    "a cache on NFS": (lambda: config(cache_mount=NFS), {"cache-far"}),
}  # fmt: skip
"""For each fault, the facts with it, and the names of the checks that must find it."""
