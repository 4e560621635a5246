"""Adds this directory to the path, so that the tests can import ``roundtrip`` in each import mode."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
