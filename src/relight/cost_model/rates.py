"""Failure rates: published ones, and the belief about this cluster after some hours of observation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from relight.cost_model.gamma import quantile
from relight.errors import ConfigError

HOUR_S = 3600.0
_MILLION = 1e6


@dataclass(frozen=True, slots=True)
class Belief:
    """Belief about a failure rate: a Gamma distribution, equivalent to ``shape`` failures observed in ``exposure_s``
    seconds."""

    shape: float
    exposure_s: float

    def __post_init__(self) -> None:
        if not (0 < self.shape < math.inf and 0 < self.exposure_s < math.inf):
            raise ConfigError(
                f"a belief needs a shape and an exposure above 0, not {self.shape!r} and {self.exposure_s!r}"
            )

    @property
    def rate_per_s(self) -> float:
        """Return the expected rate."""
        return self.shape / self.exposure_s

    @property
    def mtbf_s(self) -> float:
        """Return the mean time between failures, 1 / rate."""
        return self.exposure_s / self.shape

    def after(self, failures: int, seconds: float) -> Belief:
        """Return the belief after ``failures`` in ``seconds`` of running (the Gamma's conjugate update)."""
        if failures < 0 or not 0 <= seconds < math.inf:
            raise ConfigError(f"{failures!r} failures in {seconds!r} s are impossible")
        return Belief(self.shape + failures, self.exposure_s + seconds)

    def interval(self, mass: float = 0.9) -> tuple[float, float]:
        """Return the central interval of rates with probability ``mass``."""
        if not 0 < mass < 1:
            raise ConfigError(f"a probability must be between 0 and 1, not {mass!r}")
        return self.at((1 - mass) / 2), self.at((1 + mass) / 2)

    def at(self, share: float) -> float:
        """Return the quantile of the rate for probability ``share``."""
        return quantile(self.shape, share) / self.exposure_s

    def times(self, factor: float) -> Belief:
        """Return the belief for a rate that is ``factor`` times as high."""
        return Belief(self.shape, self.exposure_s / factor)


@dataclass(frozen=True, slots=True)
class PublishedRate:
    """One published rate: failures that interrupted jobs, per million device-hours."""

    name: str
    devices: int
    """Devices of the fleet, or of its largest part that was counted."""
    per_million_h: float
    numbers: str
    """The published numbers that it is computed from."""


PUBLISHED = {
    "llama3": PublishedRate(
        "Llama 3 (Meta, 2024)", 16384, 19.7, "419 unexpected interruptions of 16,384 H100 in 54 days"
    ),
    "rsc-1": PublishedRate(
        "RSC-1 (Kokolis et al., HPCA 2025)", 16384, 33.9, "6.50 failures in 1,000 node-days of 8 A100"
    ),
    "rsc-2": PublishedRate(
        "RSC-2 (Kokolis et al., HPCA 2025)", 8192, 12.2, "2.34 failures in 1,000 node-days of 8 A100"
    ),
    "ft-hsdp-32k": PublishedRate("FT-HSDP (Meta), 32K", 32768, 12.0, "2.3 failures in 1,000 servers of 8 H100 a day"),
    "ft-hsdp-98k": PublishedRate(
        "FT-HSDP (Meta), 98K", 98304, 33.9, "18 minutes between failures of 98 to 100 thousand GPUs"
    ),
    "dgx-b200": PublishedRate("DGX B200", 504, 31.6, "21 failures of 504 GPUs in 55 days"),
}
"""Rates of failures of hardware, or attributed to it.

Failures of the jobs' own software are added: see ``SOFTWARE``.
"""

SOFTWARE = ((8, 1 / (47.7 * 24) - 8 * 33.9e-6), (1024, 1 / 7.9 - 1024 * 33.9e-6), (16384, 54 / (54 * 24)))
"""Failures of a job's own software per hour, by devices: RSC's measured job failures less its hardware's (8 and 1,024
GPUs), and Llama 3's 54 software bugs in 54 days. Values in between are interpolated linearly in logarithms."""


def software_per_h(devices: int) -> float:
    """Return the failures of a job's own software per hour.

    Above the measured range: the largest value. Below: proportional to devices.
    """
    if devices <= SOFTWARE[0][0]:
        return SOFTWARE[0][1] * devices / SOFTWARE[0][0]
    for (few, rare), (many, often) in pairwise(SOFTWARE):
        if devices <= many:
            share = math.log(devices / few) / math.log(many / few)
            return math.exp(math.log(rare) + share * math.log(often / rare))
    return SOFTWARE[-1][1]


def prior(devices: int, *, source: str = "published") -> Belief:
    """Return the prior belief about a job on that many devices.

    ``source``: ``published``: hardware and software. ``hardware``: the table's mean, without the jobs' software.
    ``software``: only that. A name of the table (``llama3``): that fleet's rate. The certainty (shape) follows from the
    scatter of the table's rates.
    """
    if not isinstance(devices, int) or isinstance(devices, bool) or not 1 <= devices <= 10**8:
        raise ConfigError(f"devices must be a whole number from 1 to 100,000,000, not {devices!r}")
    rates = [published.per_million_h for published in PUBLISHED.values()]
    mean = sum(rates) / len(rates)
    shape = mean**2 / (sum((rate - mean) ** 2 for rate in rates) / (len(rates) - 1))
    hardware, software = mean * devices / _MILLION, software_per_h(devices)
    per_h = {"published": hardware + software, "hardware": hardware, "software": software}
    per_h |= {name: published.per_million_h * devices / _MILLION for name, published in PUBLISHED.items()}
    if source not in per_h:
        raise ConfigError(f"there are no rates called {str(source)[:40]!r}", hint=f"one of {', '.join(per_h)}")
    return Belief(shape, shape * HOUR_S / per_h[source])


_OFF = [2.0**k for k in range(-14, 15)]
"""Factors by which a cluster's rate may differ from the published one."""
_DOUBT = 1.5


def learn(before: Belief, failures: int, seconds: float) -> Belief:
    """Return the belief after ``failures`` in ``seconds``, if the prior may be of a very different kind of cluster.

    Published rates are those of large fleets. This cluster may fail a thousand times as often, and a plain update would
    adapt too slowly. So the prior's scale is unknown as well: a factor from 2^-14 to 2^14 with weight
    ``2^(-1.5·octaves)``. That falls slowly enough that few failures outweigh it, and fast enough that the mean stays
    near the published rates. Each factor is weighted by the likelihood of the observation (negative binomial). The
    result is the Gamma with the mixture's mean and variance.
    """
    if not failures and not seconds:
        return before
    weights, means, squares = [], [], []
    for factor in _OFF:
        scaled = before.times(factor)
        after = scaled.after(failures, seconds)
        logs = scaled.shape * math.log(scaled.exposure_s) - after.shape * math.log(after.exposure_s)
        weights.append(logs - _DOUBT * abs(math.log(factor)))
        means.append(after.rate_per_s)
        squares.append(after.rate_per_s**2 + after.shape / after.exposure_s**2)
    most = max(weights)
    shares = [math.exp(weight - most) for weight in weights]
    total = sum(shares)
    mean = sum(share * rate for share, rate in zip(shares, means)) / total
    variance = sum(share * square for share, square in zip(shares, squares)) / total - mean**2
    return Belief(mean**2 / variance, mean / variance)
