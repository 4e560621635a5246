"""Where the ranks are started, and the layouts that other tests of ranks have."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "ranks")]
