"""Import paths of ``forge`` and the tables of cases."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "format")]
