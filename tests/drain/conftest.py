"""The same server as the stores' tests."""

from __future__ import annotations

from tests.store.conftest import s3, s3_server

__all__ = ["s3", "s3_server"]
