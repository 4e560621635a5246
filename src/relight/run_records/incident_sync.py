"""Copy a run's incidents and time accounts, which are files next to its log, between tiers; the names of these files."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from relight.errors import CheckpointNotFound
from relight.store import ByteStore

DIRECTORY = "incidents"
ACCOUNT = ".account.json"
"""Suffix of a time account, ``NUMBER.COUNT.account.json``. For each number only the file with the highest count is current."""
FILE_BYTES_MAX = 8 << 20


def sync_incidents(
    near: ByteStore, run: str, far: ByteStore, far_run: str, stop: Callable[[], bool] = lambda: False
) -> int:
    """Copy the incident and account files that only one of two tiers has to the other. Return the number of files written.

    ``far_run``: the run's name in the far tier. Copies in the far tier outlive the near disk. Copies back restore the
    past of a run that resumes on an empty disk. Files are written once and never change, so an interrupted or repeated
    call does no harm. Cost: two listings, and each new file once. Raise the stores' errors. Once ``stop()`` returns
    True, nothing more is written: the job is gone. A store with other keys may have replaced its store, and the owner
    of that store could not read what this process wrote.
    """
    near_directory, far_directory = f"{run}/{DIRECTORY}", f"{far_run}/{DIRECTORY}"
    near_names, far_names = _names(near, near_directory), _names(far, far_directory)
    return _bring(near, near_directory, near_names, far, far_directory, far_names, stop) + _bring(
        far, far_directory, far_names, near, near_directory, near_names, stop
    )


def newest_accounts(names: Iterable[str]) -> dict[str, str]:
    """Return the current account's file name for each number, oldest first, out of all file names."""
    return {number: name for name in sorted(names) if (number := _number(name))}


def _names(store: ByteStore, where: str) -> set[str]:
    try:
        return {entry.name for entry in store.list(where) if not entry.is_dir and entry.name.endswith(".json")}
    except CheckpointNotFound:
        return set()


def _bring(
    source: ByteStore,
    out_of: str,
    has: set[str],
    destination: ByteStore,
    into: str,
    present: set[str],
    stop: Callable[[], bool],
) -> int:
    written, newest, stale = 0, newest_accounts(has), newest_accounts(present)
    for name in sorted(has - present):
        number = _number(name)
        if number and (name != newest[number] or stale.get(number, "") > name):
            continue  # a newer account replaced this one
        try:
            data = source.get(f"{out_of}/{name}", FILE_BYTES_MAX)
        except CheckpointNotFound:  # replaced since the listing
            continue
        if stop():
            break
        written += destination.put_once(f"{into}/{name}", data)
        if number in stale:
            destination.delete(f"{into}/{stale[number]}")
    return written


def _number(name: str) -> str:
    """Return the number in an account's file name; empty for other names."""
    return name.partition(".")[0] if name.endswith(ACCOUNT) else ""
