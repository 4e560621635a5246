"""What a process has to be for schedules to be played in it: no clock, no names of this machine, nothing that differs from run to run."""

from __future__ import annotations

import contextlib
import functools
import gc
import socket
from collections.abc import Iterator
from typing import Any

import relight.catalog.read as read_module
import relight.commit.pack_writer as pack_writer_module
import relight.commit.save as save_module
import relight.commit.together as together_module
import relight.format.strict as strict_module
import relight.log.chain as chain_module
import relight.log.identity as identity_module
from relight.testing.baton import Crew
from relight.testing.scenario import Names, prepared

THEN = "2026-01-01T00:00:00Z"


def _then() -> str:
    return THEN


def _buffer(size: int) -> memoryview:
    return memoryview(bytearray(size))


@contextlib.contextmanager
def staged() -> Iterator[tuple[Crew, Names]]:
    """Names from seeds, and one moment for all time stamps. For speed: pure decoding is remembered, JSON is not looked at for what only a
    hostile writer would put there, buffers are plain memory, and the collector rests.
    """
    defaults: dict[str, Any] = chain_module.Log.__init__.__kwdefaults__
    now = defaults["now"]
    patched: list[tuple[Any, str, Any]] = [
        (save_module, "now_text", _then),
        (identity_module, "now_text", _then),
        (socket, "gethostname", lambda: "simulated"),
        (chain_module.os, "getpid", lambda: 1),
        (strict_module, "_check", lambda value, where, depth: None),
        (pack_writer_module, "page_buffer", _buffer),
        (read_module, "page_buffer", _buffer),
        (chain_module, "decode_record", _remembered(chain_module.decode_record)),
        (together_module, "decode_root", functools.lru_cache(maxsize=256)(together_module.decode_root)),
        (save_module, "decode_root", functools.lru_cache(maxsize=256)(save_module.decode_root)),
    ]
    with prepared() as names:
        kept = [(where, name, getattr(where, name)) for where, name, _ in patched]
        crew = Crew()
        collects = gc.isenabled()
        try:
            for where, name, value in patched:
                setattr(where, name, value)
            defaults["now"] = _then
            gc.disable()
            yield crew, names
        finally:
            for where, name, value in kept:
                setattr(where, name, value)
            defaults["now"] = now
            crew.dismiss()
            if collects:
                gc.enable()


def _remembered(decode: Any) -> Any:
    """``decode_record``, told a record's bytes again: it has the same to say, wherever they lie."""
    known: dict[tuple[bytes, int], Any] = {}

    def decoded(data: bytes, seq: int, where: str) -> Any:
        found = known.get((data, seq))
        if found is None:
            if len(known) > 4096:
                known.clear()
            found = known[data, seq] = decode(data, seq, where)
        return found

    return decoded
