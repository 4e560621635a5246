"""Rules about files and directories: links, replies that were lost, durable names, packs. ``proofs.invariants`` lists them."""

from __future__ import annotations

import errno as codes
import mmap
import os
import random
import tempfile
from dataclasses import replace
from pathlib import Path

from proofs.disk_scenario import ROOT, fresh_disk
from proofs.invariants import rule, saves, simulated
from proofs.racing_disks import AfterLinks, MadeByTheDead
from relight.commit import Attempt, plan_save, write_pack
from relight.errors import CheckpointNotFound, StoreUnavailable, UnsafeContent
from relight.format.digest import digest
from relight.format.names import LOG_DIR
from relight.layout import Bytes, Item
from relight.log import Log
from relight.store import LocalStore, MemoryStore, put
from relight.store.durable import create_once
from relight.testing.disks import CUTS, FailNth, HookedDisk
from relight.testing.scenario import LARGE_BYTES, RUN, examine, state_of


@rule
def links_are_not_followed() -> list[str]:
    """A symbolic link is never followed, neither as the last part of a path nor within it. A pipe is not waited for."""
    problems = []
    with tempfile.TemporaryDirectory() as directory:
        outside, root = Path(directory, "outside"), Path(directory, "store")
        outside.mkdir()
        (outside / "file").write_bytes(b"secret")
        store = LocalStore(root)
        put(store, "dir/real", b"x")
        (root / "link").symlink_to(outside / "file")
        (root / "dirlink").symlink_to(outside)
        os.mkfifo(root / "pipe")
        for key in ("link", "dirlink/file", "pipe", "dir"):
            try:
                store.get(key, 99)
                problems.append(f"{key} was read")
            except UnsafeContent:
                pass
        try:
            store.put_once("dirlink/new", b"x")
            problems.append("something was written through a link")
        except UnsafeContent:
            pass
        try:
            list(store.list("dirlink"))
            problems.append("a link was listed as a directory")
        except UnsafeContent:
            pass
    return problems


@rule
def lost_reply_is_detected_by_the_link_count() -> list[str]:
    """A ``link`` that worked, but reported an error, as on NFS, is a success. One that did not work is a failure."""
    problems = []
    for error in (codes.EIO, codes.EEXIST, codes.ENOENT):
        disk = fresh_disk()
        if create_once(FailNth(1, error, "link", inner=disk, lost_reply=True), "/disk/name", b"x") is not True:
            problems.append(f"a creation answered by {codes.errorcode[error]} was taken for a failure")
    try:
        create_once(FailNth(1, codes.EIO, "link", inner=disk), "/disk/other", b"x")
        problems.append("a failed creation was taken for a success")
    except StoreUnavailable:
        pass
    return problems


@rule
def swept_temporary_loses_the_race() -> list[str]:
    """The loser of a race for a name gets False, even if the winner swept its temporary."""
    disk = fresh_disk()

    class Raced(HookedDisk):
        def link(self, source: str, target: str) -> None:
            if target not in done:
                done.add(target)
                create_once(disk, target, b"winner")
                disk.unlink(source)
            super().link(source, target)

    done: set[str] = set()
    return [] if create_once(Raced(disk), "/disk/name", b"loser") is False else ["both creators got True"]


@rule
def record_of_the_dead_is_durable_before_the_next() -> list[str]:
    """A record is durable before the next one is chained to it.

    Its process may have died before the fsync of the directory.
    """
    problems = set()
    disk, store = simulated()
    saves(store, 1)
    dying = AfterLinks(disk)
    saves(LocalStore(ROOT, disk=dying), 2)
    for left in dying.linked:
        next_one = AfterLinks(left, cuts=8)
        Attempt.begin(LocalStore(ROOT, disk=next_one), RUN)
        for after in next_one.cut:
            view = Log(LocalStore(ROOT, disk=after), RUN).read()
            problems |= {f"record {fault.seq} of {view.head}: {fault.reason}" for fault in view.faults}
    return sorted(problems)


@rule
def directories_of_the_dead_are_made_durable() -> list[str]:
    """A directory is durable before anything in it is acknowledged, even if its maker died before its fsync."""
    problems = []
    run, log = f"{ROOT}/{RUN}", f"{ROOT}/{RUN}/{LOG_DIR}"
    lstats = [("lstat", path, n) for path in (run, log) for n in range(1, 12)]
    for call, path, nth in (("mkdir", run, 1), ("mkdir", log, 1), ("mkdir", ROOT, 1), *lstats):
        disk = fresh_disk()

        raced = MadeByTheDead(disk, call, path, nth)
        _, _, facts = saves(LocalStore(ROOT, disk=raced), 1)
        after = LocalStore(ROOT, disk=disk.power_cut(0, "lost"))
        problems += [f"{call} {nth} of {path}: {text}" for text in examine(after, Log(after, RUN), facts)]
        if not raced.seen:
            problems.append(f"there is no {call} of {path}")
    return problems


@rule
def what_put_once_created_is_durable() -> list[str]:
    """After ``put_once`` returned True, the name, its bytes and every directory above it survive a power cut.

    This holds even if another process made the directories.
    """
    problems = []
    for nth in range(3):
        disk = fresh_disk()
        raced = MadeByTheDead(disk, "mkdir", f"{ROOT}/a/b", nth)
        LocalStore(ROOT, disk=raced).put_once("a/b/c", b"x")
        for mode in CUTS:
            try:
                LocalStore(ROOT, disk=disk.power_cut(0, mode)).get("a/b/c", 9)
            except CheckpointNotFound:
                problems.append(f"lost in a power cut ({mode}, {nth})")
    return problems


@rule
def packs_are_the_sources_back_to_back() -> list[str]:
    """For any slab size, a pack is its sources back to back, and each hash is the hash of its chunk's written bytes."""
    problems = []
    big = random.Random("packs").randbytes(20_011)
    items = [*state_of("rules/packs").items, Item("big", "uint8", (len(big),), "buffer", Bytes(big))]
    for pack in plan_save(items, id="p" * 10).packs:
        expected = b"".join(bytes(source.view() or b"") for source in pack.sources)
        for slab_bytes in (4096, 8192, 1 << 20):
            store = MemoryStore()
            writer = store.write("pack", pack.size)
            hashes = write_pack(writer, pack, slab_bytes=slab_bytes)
            data, offset = store.get("pack", 1 << 30), 0
            for length, value in zip(pack.chunks, hashes, strict=True):
                if digest(data[offset : offset + length]) != value:
                    problems.append(f"slabs of {slab_bytes}: a chunk does not have its hash")
                offset += length
            if data != expected:
                problems.append(f"slabs of {slab_bytes}: the pack is not its sources back to back")
    return problems


@rule
def packs_in_memory_are_written_unchanged() -> list[str]:
    """A pack that is in memory in its file's layout is written unchanged, without extra bytes.

    Each hash is its chunk's.
    """
    problems = []
    big = random.Random("images").randbytes(LARGE_BYTES)
    items = [*state_of("rules/images").items, Item("big", "uint8", (len(big),), "buffer", Bytes(big))]
    for pack in plan_save(items, id="p" * 10).packs:
        expected = b"".join(bytes(source.view() or b"") for source in pack.sources)
        image = mmap.mmap(-1, -(-pack.size // mmap.PAGESIZE) * mmap.PAGESIZE)
        image[:] = expected + b"\xff" * (len(image) - pack.size)
        for slab_bytes in (4096, 8192, 1 << 20):
            for store in (MemoryStore(), simulated()[1]):
                writer = store.write(f"{slab_bytes}/pack", pack.size)
                hashes = write_pack(writer, replace(pack, sources=[], image=memoryview(image)), slab_bytes=slab_bytes)
                writer.finish()
                data, offset = store.get(f"{slab_bytes}/pack", 1 << 30), 0
                for length, value in zip(pack.chunks, hashes, strict=True):
                    if digest(data[offset : offset + length]) != value:
                        problems.append(f"{slab_bytes} at a time: a chunk does not have its hash")
                    offset += length
                if data != expected:
                    problems.append(f"{slab_bytes} at a time: the file differs from the memory")
    return problems
