"""Stores of bytes: the interface ``ByteStore`` and its implementations.

Always holds: a name is written once and never again; `put_once` has exactly one winner; after `sync` the written files survive a power
cut; only regular files inside the store are read. May import: ``errors``, ``observe``, ``settings``, names and small records of
``format``, units of ``policy``, ``keys``. Torch-free.
"""

from relight.store.base import PAGE, ByteStore, Entry, Properties, Reader, StoreBase, Writer, put
from relight.store.buffers import page_buffer
from relight.store.disk import Disk
from relight.store.local import LocalStore
from relight.store.memory import MemoryStore
from relight.store.objects import ObjectStore, Version
from relight.store.urls import open_bytes

__all__ = [
    "PAGE",
    "ByteStore",
    "Disk",
    "Entry",
    "LocalStore",
    "MemoryStore",
    "ObjectStore",
    "Properties",
    "Reader",
    "StoreBase",
    "Version",
    "Writer",
    "open_bytes",
    "page_buffer",
    "put",
]
