"""What these tests share: small histories, and where ``made`` lies."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
