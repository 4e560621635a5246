"""Import path of ``soak``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
