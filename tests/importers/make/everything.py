"""Writes every golden checkpoint again, each with its own framework, into the folder that is its argument."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MAKERS = {
    "hugging": "hugging", "light": "light", "accel": "accel", "deep": "deep", "mega": "mega", "mega_ranks": "mega_legacy", "snap": "snap",
    "orb": "orb",
}  # fmt: skip


def main(out: Path) -> None:
    """Run one process for each framework, because they conflict with each other."""
    for folder, maker in MAKERS.items():
        target = out.resolve() / folder
        target.mkdir(parents=True)
        subprocess.run([sys.executable, str(Path(__file__).parent / f"{maker}.py"), str(target)], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
