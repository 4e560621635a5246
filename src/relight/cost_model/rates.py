"""How often things fail: published rates, and what is believed of this cluster after some hours of watching it."""

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
    """What is believed of a rate of failures: a Gamma distribution, as if ``shape`` failures had been seen in ``exposure_s`` seconds."""

    shape: float
    exposure_s: float

    def __post_init__(self) -> None:
        if not (0 < self.shape < math.inf and 0 < self.exposure_s < math.inf):
            raise ConfigError(f"a belief needs a shape and an exposure above 0, not {self.shape!r} and {self.exposure_s!r}")

    @property
    def rate_per_s(self) -> float:
        """The rate that is expected."""
        return self.shape / self.exposure_s

    @property
    def mtbf_s(self) -> float:
        """One by the rate: the time between failures."""
        return self.exposure_s / self.shape

    def after(self, failures: int, seconds: float) -> Belief:
        """What is believed once ``failures`` were seen in ``seconds`` of running (the Gamma's conjugate update)."""
        if failures < 0 or not 0 <= seconds < math.inf:
            raise ConfigError(f"{failures!r} failures in {seconds!r} s cannot have been seen")
        return Belief(self.shape + failures, self.exposure_s + seconds)

    def interval(self, mass: float = 0.9) -> tuple[float, float]:
        """Between which two rates the truth lies with that probability, as much of the rest below as above."""
        if not 0 < mass < 1:
            raise ConfigError(f"a probability lies between 0 and 1, not {mass!r}")
        return self.at((1 - mass) / 2), self.at((1 + mass) / 2)

    def at(self, share: float) -> float:
        """The rate below which the truth lies with that probability."""
        return quantile(self.shape, share) / self.exposure_s

    def times(self, factor: float) -> Belief:
        """The same, of a thing that fails so many times as often."""
        return Belief(self.shape, self.exposure_s / factor)


@dataclass(frozen=True, slots=True)
class PublishedRate:
    """One published rate: failures that interrupted jobs, per million device-hours."""

    name: str
    devices: int
    """Of the fleet, or of the largest part of it that was counted."""
    per_million_h: float
    said: str
    """What it is worked out from."""


PUBLISHED = {
    "llama3": PublishedRate("Llama 3 (Meta, 2024)", 16384, 19.7, "419 unexpected interruptions of 16,384 H100 in 54 days"),
    "rsc-1": PublishedRate("RSC-1 (Kokolis et al., HPCA 2025)", 16384, 33.9, "6.50 failures in 1,000 node-days of 8 A100"),
    "rsc-2": PublishedRate("RSC-2 (Kokolis et al., HPCA 2025)", 8192, 12.2, "2.34 failures in 1,000 node-days of 8 A100"),
    "ft-hsdp-32k": PublishedRate("FT-HSDP (Meta), 32K", 32768, 12.0, "2.3 failures in 1,000 servers of 8 H100 a day"),
    "ft-hsdp-98k": PublishedRate("FT-HSDP (Meta), 98K", 98304, 33.0, "18 minutes between failures of 98 to 100 thousand GPUs"),
    "dgx-b200": PublishedRate("DGX B200", 504, 32.0, "21 failures of 504 GPUs in 55 days"),
}
"""Rates of hardware, and of what looks like it. Software of jobs comes on top: see ``SOFTWARE``."""

SOFTWARE = ((8, 1 / (47.7 * 24) - 8 * 33.9e-6), (1024, 1 / 7.9 - 1024 * 33.9e-6), (16384, 54 / (54 * 24)))
"""Failures of a job's own software per hour, by devices: RSC's measured job failures less its hardware's (8 and 1,024 GPUs), and Llama 3's
54 software bugs in 54 days. Between them it is read off along straight lines of logarithms."""


def software_per_h(devices: int) -> float:
    """How often a job's own software fails, per hour. Below and above what was measured: as the nearest measured, below it per device."""
    if devices <= SOFTWARE[0][0]:
        return SOFTWARE[0][1] * devices / SOFTWARE[0][0]
    for (few, rare), (many, often) in pairwise(SOFTWARE):
        if devices <= many:
            share = math.log(devices / few) / math.log(many / few)
            return math.exp(math.log(rare) + share * math.log(often / rare))
    return SOFTWARE[-1][1]


def prior(devices: int, *, source: str = "published") -> Belief:
    """What is believed of a job on so many devices before anything was seen.

    ``published``: hardware and software together. ``hardware``: all of the table, without jobs' software. ``software``: that alone. A name
    of the table (``llama3``): that fleet's rate alone. How sure it is (the shape) is how much the table's rates differ among each other.
    """
    if not isinstance(devices, int) or isinstance(devices, bool) or not 1 <= devices <= 10**8:
        raise ConfigError(f"devices is a whole number from 1 to 100,000,000, not {devices!r}")
    rates = [one.per_million_h for one in PUBLISHED.values()]
    mean = sum(rates) / len(rates)
    shape = mean**2 / (sum((one - mean) ** 2 for one in rates) / (len(rates) - 1))
    hardware, software = mean * devices / _MILLION, software_per_h(devices)
    per_h = {"published": hardware + software, "hardware": hardware, "software": software}
    per_h |= {name: one.per_million_h * devices / _MILLION for name, one in PUBLISHED.items()}
    if source not in per_h:
        raise ConfigError(f"there are no rates called {str(source)[:40]!r}", hint=f"one of {', '.join(per_h)}")
    return Belief(shape, shape * HOUR_S / per_h[source])


_OFF = [2.0**k for k in range(-14, 15)]
"""By what factors a cluster may differ from what is published."""
_DOUBT = 1.5


def learn(before: Belief, failures: int, seconds: float) -> Belief:
    """What is believed after ``failures`` in ``seconds``, where the belief before may be of another kind of cluster altogether.

    Published rates say how often big fleets fail. This one may fail a thousand times as often, and a plain update would take as many
    failures to see it as the prior has hours. So the prior's own scale is unknown here, too: a factor from 2^-14 to 2^14, the further from
    one the less likely (``2^(-1.5·octaves)``: so slowly that few failures outweigh it, so fast that the mean stays near what is published).
    Each is weighed by how well it foretells what was seen (negative binomial); what comes out is told as the Gamma with the mixture's mean
    and variance.
    """
    if not failures and not seconds:
        return before
    weights, means, squares = [], [], []
    for factor in _OFF:
        one = before.times(factor)
        after = one.after(failures, seconds)
        logs = one.shape * math.log(one.exposure_s) - after.shape * math.log(after.exposure_s)
        weights.append(logs - _DOUBT * abs(math.log(factor)))
        means.append(after.rate_per_s)
        squares.append(after.rate_per_s**2 + after.shape / after.exposure_s**2)
    most = max(weights)
    shares = [math.exp(one - most) for one in weights]
    total = sum(shares)
    mean = sum(share * one for share, one in zip(shares, means)) / total
    variance = sum(share * one for share, one in zip(shares, squares)) / total - mean**2
    return Belief(mean**2 / variance, mean / variance)
