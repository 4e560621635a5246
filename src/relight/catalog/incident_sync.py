"""What is written down of a run beside its log, incidents and where the time went: its files' names, and bringing them to all tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from relight.errors import CheckpointNotFound
from relight.store import ByteStore

DIRECTORY = "incidents"
ACCOUNT = ".account.json"
"""Ends the name of an account, ``NUMBER.COUNT.account.json``: of each number only the one with the highest count tells anything."""
FILE_BYTES_MAX = 8 << 20


def level_diaries(near: ByteStore, run: str, far: ByteStore, far_run: str, stop: Callable[[], bool] = lambda: False) -> int:
    """Give both tiers what only one of them has of the run's diary, which may have another name there; how many files were written.

    Outwards, so that it outlives the near disk; back, so that a run which goes on behind an empty disk has a past again. Files are
    written once and never change, so whoever is disturbed here, or does it a second time, does no harm. Costs two listings, and each
    new file once. What the stores raise comes through. Once ``stop()`` is true nothing more is written: whoever works for a job that is
    gone may hold keys of a store that is, and what it wrote where another one is by now could not be read.
    """
    here, there = f"{run}/{DIRECTORY}", f"{far_run}/{DIRECTORY}"
    ours, theirs = _names(near, here), _names(far, there)
    return _bring(near, here, ours, far, there, theirs, stop) + _bring(far, there, theirs, near, here, ours, stop)


def newest_accounts(names: Iterable[str]) -> dict[str, str]:
    """Of each number, oldest first, the name that tells something, out of all files' names."""
    return {number: name for name in sorted(names) if (number := _number(name))}


def _names(store: ByteStore, where: str) -> set[str]:
    try:
        return {entry.name for entry in store.list(where) if not entry.is_dir and entry.name.endswith(".json")}
    except CheckpointNotFound:
        return set()


def _bring(
    source: ByteStore, out_of: str, has: set[str], destination: ByteStore, into: str, there: set[str], stop: Callable[[], bool]
) -> int:
    written, newest, stale = 0, newest_accounts(has), newest_accounts(there)
    for name in sorted(has - there):
        number = _number(name)
        if number and (name != newest[number] or stale.get(number, "") > name):
            continue  # an account that a newer one has replaced
        try:
            data = source.get(f"{out_of}/{name}", FILE_BYTES_MAX)
        except CheckpointNotFound:  # replaced since
            continue
        if stop():
            break
        written += destination.put_once(f"{into}/{name}", data)
        if number in stale:
            destination.delete(f"{into}/{stale[number]}")
    return written


def _number(name: str) -> str:
    """Of an account; empty for anything else."""
    return name.partition(".")[0] if name.endswith(ACCOUNT) else ""
