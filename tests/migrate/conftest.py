"""Make ``old_ones`` and ``kills`` importable by these tests in every import mode, and provide a bucket."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.store.conftest import s3, s3_server

__all__ = ["s3", "s3_server"]
sys.path.insert(0, str(Path(__file__).parent))
