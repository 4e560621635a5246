"""Refuse to create a store in a run's directory, or a run in a store's directory: the new one would hide what is there."""

from __future__ import annotations

from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, RelightError, UnsafeContent
from relight.format.names import LOG_DIR, STORE_FILE, is_run_name, parse_record_file
from relight.store import ByteStore

_NAMED = 3
"""Most runs that the hint lists."""
STORE_NOT_RUN = "this path is a store, and names no run of it"


def refuse_run_as_store(store: ByteStore) -> None:
    """Raise ``ConfigError`` if the directory that would become a store is a run: its path would then name the store, not the run."""
    if any(parse_record_file(entry.name) is not None for entry in store.list(LOG_DIR)):
        hint = f"name the run itself, {store.url}, to continue it; put a new run next to it"
        raise ConfigError("a run cannot be made inside another run", where=store.url, hint=hint)


def refuse_store_as_run(store: ByteStore, run: str) -> None:
    """Raise ``ConfigError`` if the directory that would become a run is a store."""
    if (hint := hint_for_store(store, run)) is not None:
        raise ConfigError(STORE_NOT_RUN, where=f"{store.url.rstrip('/')}/{run}", hint=hint)


def hint_for_store(store: ByteStore, run: str) -> str | None:
    """Return a hint that names runs of the store at the path of ``run``. Return None if there is no store at this path."""
    try:
        store.open(f"{run}/{STORE_FILE}").close()
    except (CheckpointNotFound, CorruptCheckpoint, UnsafeContent):
        return None
    place = f"{store.url.rstrip('/')}/{run}"
    try:
        names = sorted(entry.name for entry in store.list(run) if entry.is_dir and is_run_name(entry.name))
    except RelightError:
        names = []
    shown = ", ".join(f"{place}/{name}" for name in names[:_NAMED]) + (" …" if len(names) > _NAMED else "")
    return f"name a run of it: {shown or f'{place}/NAME'}"
