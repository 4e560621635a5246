"""Lets these tests share ``old_ones`` and ``kills``, whatever the import mode."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
