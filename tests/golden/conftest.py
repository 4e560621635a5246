"""Import paths of ``forge``, the independent reader and the renderer."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "format")]
