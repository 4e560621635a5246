"""Import paths of ``forge`` and ``examine``."""

import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / "format"), str(TESTS / "hostile")]
