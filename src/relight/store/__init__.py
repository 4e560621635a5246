"""Where bytes live: the store's interface, and the stores behind it.

Always holds: a name is written once and never again; `put_once` has exactly one winner; after `settle` what was written survives a power
cut; what is read is a regular file inside the store. May import: ``errors``, ``observe``, ``settings``, names and small records of
``format``, units of ``policy``, ``keys``. Torch-free.
"""

from relight.store.base import PAGE, ByteStore, Entry, Properties, Reader, Writer, put
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
    "Version",
    "Writer",
    "open_bytes",
    "page_buffer",
    "put",
]
