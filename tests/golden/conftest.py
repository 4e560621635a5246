"""Where the forge, the independent reader and the renderer are."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "format")]
