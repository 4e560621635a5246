"""Run slips and print each outcome: ``python -m tests.slips.try_all [--source SRC] [NAME …]``, from the repository's
root."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.slips.harness import Runner, fast
from tests.slips.table import SLIPS


def main() -> None:
    """Run those that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, help="the directory of another version's relight")
    parser.add_argument("--output", action="store_true", help="print what the scripts printed")
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    wrong, seconds = 0, 0.0
    with tempfile.TemporaryDirectory(dir=fast()) as root, Runner(Path(root), given.source) as runner:
        for slip in SLIPS:
            if given.names and slip.name not in given.names:
                continue
            outcome = runner.run(slip)
            wrong += bool(outcome.faults)
            seconds += outcome.seconds
            print(
                f"{slip.name} (item {slip.item}): {'right' if not outcome.faults else '; '.join(outcome.faults)}  [{outcome.seconds:.2f} s]",
                flush=True,
            )
            if given.output or (given.names and outcome.faults):
                print("    " + outcome.output.replace("\n", "\n    "))
    print(f"{len(SLIPS)} slips, {wrong} not right, {seconds:.1f} s in scripts")


if __name__ == "__main__":
    main()
