"""Two drives with each file on both: nothing is lost with one of them, and nothing that differs stays unseen."""

from __future__ import annotations

from pathlib import Path

from relight.store import ByteStore
from relight.store.mirrored import MirroredStore
from relight.testing.store_suite import StoreSuite


class TestMirrored(StoreSuite):
    def make(self, tmp_path: Path) -> ByteStore:
        return MirroredStore([tmp_path / name for name in ("n0", "n1")])


class TestMirroredOnThree(StoreSuite):
    def make(self, tmp_path: Path) -> ByteStore:
        return MirroredStore([tmp_path / name for name in ("n0", "n1", "n2")])
