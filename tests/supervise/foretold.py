"""``relight`` with a sensor that reports wrong values: ``foretold.py SECONDS ARGUMENTS…``.

After that many seconds of samples, the store's disk has no room left. All else is real. Predictions are reported from
the first poll, not only after the usual five minutes.
"""

from __future__ import annotations

import sys

from relight.cli import main
from relight.prediction import predictor
from relight.prediction.host import HostGauges
from relight.prediction.sample import DiskSpace

GB = 1e9


def plant(seconds: int) -> None:
    """Make the disk of the store full after ``seconds`` samples. Each sample is a second."""
    samples = iter(range(10**9))

    def rooms(self: HostGauges) -> tuple[DiskSpace, ...]:
        return (DiskSpace(0.0 if next(samples) >= seconds else 500 * GB, 1000 * GB),)

    predictor.FIRST_WINDOW = 1  # type: ignore[attr-defined]
    HostGauges.rooms = rooms  # type: ignore[method-assign]


if __name__ == "__main__":
    plant(int(sys.argv.pop(1)))
    main()
