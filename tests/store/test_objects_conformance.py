"""The shipped conformance suite on object stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from relight.store import ByteStore
from relight.store.objects import ObjectStore
from relight.testing.store_suite import StoreSuite


class TestS3(StoreSuite):
    @pytest.fixture(autouse=True)
    def _bucket(self, s3: str) -> None:
        self.url = s3

    def make(self, tmp_path: Path) -> ByteStore:
        return ObjectStore(f"{self.url}/some/prefix")
