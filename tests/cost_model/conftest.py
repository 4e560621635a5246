"""Import path of the modules that these tests share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
