"""What is written down of a run beside its log, incidents and where the time went: its files' names, and bringing them to all tiers."""

from __future__ import annotations

from relight.errors import CheckpointNotFound
from relight.store import ByteStore

DIRECTORY = "incidents"
ACCOUNT = ".account.json"
"""Ends the name of an account, ``NUMBER.COUNT.account.json``: of each number only the one with the highest count tells anything."""
FILE_BYTES_MAX = 8 << 20


def level_diaries(near: ByteStore, far: ByteStore, run: str) -> int:
    """Give both stores what only one of them has of the run's diary; how many files were written.

    Outwards, so that it outlives the near disk; back, so that a run which goes on behind an empty disk has a past again. Files are
    written once and never change, so whoever is disturbed here, or does it a second time, does no harm. Costs two listings, and each
    new file once. What the stores raise comes through.
    """
    ours, theirs = _names(near, run), _names(far, run)
    return _bring(near, ours, far, theirs, run) + _bring(far, theirs, near, ours, run)


def _names(store: ByteStore, run: str) -> set[str]:
    try:
        return {entry.name for entry in store.list(f"{run}/{DIRECTORY}") if not entry.is_dir and entry.name.endswith(".json")}
    except CheckpointNotFound:
        return set()


def _bring(source: ByteStore, has: set[str], destination: ByteStore, there: set[str], run: str) -> int:
    written, newest, stale = 0, _newest(has), _newest(there)
    for name in sorted(has - there):
        number = _number(name)
        if number and (name != newest[number] or stale.get(number, "") > name):
            continue  # an account that a newer one has replaced
        try:
            data = source.get(f"{run}/{DIRECTORY}/{name}", FILE_BYTES_MAX)
        except CheckpointNotFound:  # replaced since
            continue
        written += destination.put_once(f"{run}/{DIRECTORY}/{name}", data)
        if number in stale:
            destination.delete(f"{run}/{DIRECTORY}/{stale[number]}")
    return written


def _number(name: str) -> str:
    """Of an account; empty for anything else."""
    return name.partition(".")[0] if name.endswith(ACCOUNT) else ""


def _newest(names: set[str]) -> dict[str, str]:
    return {number: name for name in sorted(names) if (number := _number(name))}
