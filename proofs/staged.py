"""Prepare a process to run schedules: no clock, no host name, nothing that differs from run to run."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import proofs.durability_oracle as truth_module
import proofs.promises as promises_module
import relight.commit.multi_rank as together_module
import relight.commit.pack_writer as pack_writer_module
import relight.commit.save as save_module
import relight.format.strict as strict_module
import relight.log.history as history_module
import relight.log.identity as identity_module
import relight.log.listing as listing_module
import relight.log.log as chain_module
import relight.log.truncated as truncated_module
import relight.reader.chunk_reader as read_module
import relight.reader.opened as opened_module
import relight.reclaim.sweep as sweep_module
from proofs.schedule_explorer import Crew
from relight.commit import Attempt
from relight.format import PartRef, Root, decode_part, decode_record
from relight.testing.scenario import Names, patched, prepared

PAUSES_S = truncated_module.PAUSES_S
"""Unchanged from the product, because listings may be stale here, and a second listing may show more."""
THEN = "2026-01-01T00:00:00Z"


_PURE = (
    (together_module, "decode_root"),
    (save_module, "decode_root"),
    (identity_module, "decode_store"),
    (listing_module, "parse_record_file"),
    (listing_module, "record_file"),
    (together_module, "parse_ready"),
    (together_module, "parse_failed"),
    (together_module, "ready_rank"),
    (together_module, "part_file"),
    (save_module, "part_file"),
    (save_module, "is_written_file"),
    (save_module, "temporary_of"),
    (sweep_module, "temporary_of"),
    (sweep_module, "parse_dir"),
    (history_module, "parse_dir"),
    (truth_module, "parse_dir"),
    (truth_module, "parse_record_file"),
    (promises_module, "parse_record_file"),
    (promises_module, "is_written_file"),
    (promises_module, "temporary_of"),
)
"""Pure functions to cache: all processes call them again and again."""


class _AtOnce:
    """Replacement of the reading threads: does the work in ``submit``."""

    def __init__(self, *args: object, **options: object) -> None:
        pass

    def __enter__(self) -> _AtOnce:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args))
        except BaseException as error:
            future.set_exception(error)
        return future

    def shutdown(self, **options: object) -> None:
        pass


def _then() -> str:
    return THEN


def _no_rest(pause_s: float) -> None:
    """Return at once, because time is simulated."""


def _buffer(size: int) -> memoryview:
    return memoryview(bytearray(size))


@contextlib.contextmanager
def staged() -> Iterator[tuple[Crew, Names]]:
    """Within the block: seeded names, and one time for all time stamps.

    For speed: decoding is cached, JSON is not checked for hostile contents, buffers are plain memory, and garbage
    collection is off.
    """
    clocks: list[dict[str, Any]] = [
        function.__kwdefaults__
        for function in (chain_module.Log.__init__, Attempt.begin.__func__)  # type: ignore[attr-defined]
    ]
    now = clocks[0]["now"]
    changes: list[tuple[Any, str, Any]] = [
        (save_module, "now_text", _then),
        (identity_module, "now_text", _then),
        (socket, "gethostname", lambda: "simulated"),
        (os, "getpid", lambda: 1),
        (chain_module, "sleep", _no_rest),
        (truncated_module, "sleep", _no_rest),
        (truncated_module, "PAUSES_S", PAUSES_S),
        (strict_module, "_check", lambda value, where, depth: None),
        (pack_writer_module, "page_buffer", _buffer),
        (read_module, "page_buffer", _buffer),
        (read_module, "ThreadPool", _AtOnce),
        (chain_module, "decode_record", _remembered(decode_record)),
        (chain_module.Log, "_shared", staticmethod(_same)),
        (opened_module, "decode_part", _remembered_part(decode_part)),
        (save_module, "decode_part", _remembered_part(decode_part)),
        *((module, name, functools.lru_cache(maxsize=1 << 12)(getattr(module, name))) for module, name in _PURE),
    ]
    with prepared() as names, patched(*changes):
        crew = Crew()
        collects = gc.isenabled()
        try:
            for defaults in clocks:
                defaults["now"] = _then
            gc.disable()
            yield crew, names
        finally:
            for defaults in clocks:
                defaults["now"] = now
            crew.dismiss()
            if collects:
                gc.enable()


def _same(record: Any) -> Any:
    """Return the record: replaces ``_shared``, as all logs share their records here."""
    return record


def _remembered(decode: Any) -> Any:
    """Return ``decode_record`` with a cache: equal bytes give the same record, whatever their path."""
    cache: dict[tuple[bytes, int], Any] = {}

    def decoded(data: bytes, seq: int, where: str) -> Any:
        record = cache.get((data, seq))
        if record is None:
            if len(cache) > 4096:
                cache.clear()
            record = cache[data, seq] = decode(data, seq, where)
        return record

    return decoded


def _remembered_part(decode: Any) -> Any:
    """Return ``decode_part`` with a cache for equal bytes and an equal reference in the root."""
    cache: dict[tuple[object, ...], Any] = {}

    def decoded(data: bytes, root: Root, ref: PartRef, where: str) -> Any:
        key = (data, root.store, root.run, root.id, root.step, root.epoch, root.world, ref.rank, ref.hash, ref.size)
        part = cache.get(key)
        if part is None:
            if len(cache) > 1024:
                cache.clear()
            part = cache[key] = decode(data, root, ref, where)
        return part

    return decoded
