"""Runs the tests that failed in the last run once more, alone, one after another: for tests that the load of others disturbed.

A test that fails alone, too, or more than ``MOST`` failures, is a failure of the run. A test that passes alone is named in the
output, so that its cause can be removed.
"""

import json
import subprocess
import sys
from pathlib import Path

MOST = 3
"""Failed tests that may be run again. More of them have a cause of their own."""


def failed_before(root: Path) -> list[str]:
    """Return the tests that failed in the last run below ``root``, by pytest's own record."""
    record = root / ".pytest_cache/v/cache/lastfailed"
    return sorted(json.loads(record.read_text(encoding="utf-8"))) if record.exists() else []


def main(root: Path) -> int:
    """Run them again. Return the exit code of the whole run."""
    failed = failed_before(root)
    if not 0 < len(failed) <= MOST or not all("::" in test for test in failed):
        return 1
    print(f"\nfailed, and run again alone: {' '.join(failed)}\n", flush=True)
    code = subprocess.run([sys.executable, "-m", "pytest", "-n0", *failed], cwd=root, check=False).returncode
    if code == 0:
        print("\npassed alone, so the run passes. Each of these tests needs a repair:", *failed, sep="\n  ", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[1]))
