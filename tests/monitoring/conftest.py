"""Make the helper modules next to the tests importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
