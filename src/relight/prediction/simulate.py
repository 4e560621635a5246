"""Made-up runs of a training node, with failures whose time and cause are known: what detectors are tried on, and learn from.

A run is one to four hours, a row a second. Everything in it also happens without a failure behind it: memory that fills with caches and
levels off, neighbours who come and go, evaluations, compilations, checkpoints on the disk, hot afternoons, a few corrected errors, slow
links that get well. **Most failures give no sign** (``SUDDEN``), as most causes of interruptions in published tables could not: software,
hosts taken for maintenance, cables. No source says how many do; recall is therefore told by cause, too, so that a reader can weigh it
otherwise.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from relight.prediction.sample import SampleShape
from relight.prediction.trace import Happened, SampleTrace

Array = np.ndarray[Any, Any]
FAILING = 0.4
"""The share of runs that end in a failure."""
SUDDEN = 0.55
"""The share of failures without any sign."""
CAUSES: dict[str, tuple[str, float]] = {
    "leak": ("memory", 0.22), "disk": ("storage", 0.12), "heat": ("hardware", 0.14), "ecc": ("hardware", 0.24), "link": ("hang", 0.18),
    "store": ("storage", 0.10),
}  # fmt: skip
"""Of failures that give signs: which kind they are, and their share."""
_SUDDEN_KINDS = ("hardware", "crash", "hang", "killed", "network")
_GIB = float(1 << 30)


def simulate(seed: int, number: int, failing: float = FAILING, sudden: float = SUDDEN) -> SampleTrace:
    """Run ``number`` of the history ``seed``: the same each time."""
    return _SyntheticRun(np.random.default_rng((seed, number)), failing, sudden).trace(f"sim-{seed}-{number}")


class _SyntheticRun:
    """One, being made: arrays of a value a second."""

    def __init__(self, rng: np.random.Generator, failing: float, sudden: float) -> None:
        self.rng, self.failing, self.sudden = rng, failing, sudden
        self.n = n = int(rng.uniform(3600, 4 * 3600))
        self.ranks = int(rng.choice([1, 2, 4, 8], p=[0.15, 0.2, 0.35, 0.3]))
        self.t = np.arange(n, dtype=float)
        self.happened: tuple[Happened, ...] = ()
        size = float(rng.choice([128, 256, 512, 1024])) * _GIB
        self.size, self.disk_size = size, float(rng.choice([250, 1000, 4000])) * _GIB
        self.free = np.full(n, rng.uniform(0.3, 0.85)) + self.wander(0.004, 60)
        self.disk = np.full(n, rng.uniform(0.15, 0.9)) - self.t * rng.uniform(0, 4e-7)
        self.cpu = rng.uniform(0.1, 0.6) + self.wander(0.03, 20)
        self.psi = {name: np.abs(self.wander(scale, 15)) for name, scale in (("memory", 0.02), ("io", 0.8), ("cpu", 1.5))}
        self.full = {name: 0.4 * np.abs(self.wander(scale, 15)) for name, scale in (("memory", 0.02), ("io", 0.4), ("cpu", 0.0))}
        self.faults = rng.poisson(0.05, n).astype(float)
        self.rss = np.full(n, rng.uniform(0.05, 0.15))
        self.step_s = float(np.exp(rng.uniform(np.log(0.2), np.log(8))))
        self.slow = np.exp(self.wander(rng.uniform(0.005, 0.03), 10))
        self.straggle = np.abs(self.wander(0.01, 30))
        self.training = np.ones(n, bool)
        self.use = np.clip(rng.uniform(0.75, 0.98) + self.wander(0.02, 10), 0, 1)
        self.celsius = rng.uniform(50, 70) + self.wander(0.6, 120)
        self.mhz = np.full(n, float(rng.choice([1410, 1755, 1980])))
        self.ecc, self.ecc_bad = rng.poisson(2e-5, n), np.zeros(n, int)
        self.save_every, self.save_s = rng.uniform(300, 1800), float(np.exp(rng.uniform(np.log(1), np.log(60))))
        self.slow_store = np.ones(n)

    def wander(self, scale: float, tau_s: float) -> Array:
        """Noise that remembers for about ``tau_s``, of that standard deviation."""
        knots = int(self.n / tau_s) + 4
        smooth = np.interp(self.t / tau_s, np.arange(knots), self.rng.normal(0, scale, knots))
        return np.asarray(smooth + self.rng.normal(0, 0.3 * scale, self.n))

    def some(self, a_day: float) -> list[int]:
        """Seconds at which something that happens so often does."""
        return sorted(self.rng.integers(300, self.n, self.rng.poisson(a_day * self.n / 86400)).tolist())

    def ramp(self, begin: float, length: float, power: float = 1.0) -> Array:
        """0 before it, 1 behind it."""
        return np.asarray(np.clip((self.t - begin) / length, 0, 1) ** power)

    def bump(self, begin: float, rise: float, stay: float, fall: float) -> Array:
        """Up, some time there, and down again."""
        return self.ramp(begin, rise) - self.ramp(begin + rise + stay, fall)

    # -- what happens without a failure ------------------------------------------------------------------------------------------

    def everyday(self) -> None:
        """All of it."""
        rng = self.rng
        if rng.random() < 0.7:  # caches that grow and level off
            self.free -= rng.uniform(0.05, 0.8) * self.free[0] * (1 - np.exp(-self.t / rng.uniform(200, 3000)))
        for at in self.some(12):  # neighbours
            length, strength = rng.uniform(60, 1200), rng.uniform(0.2, 1)
            there = self.bump(at, rng.uniform(5, 60), length, rng.uniform(5, 60))
            self.cpu += 0.4 * strength * there
            self.psi["cpu"] += 40 * strength * there
            self.slow *= 1 + 0.5 * strength * there * rng.random()
            if rng.random() < 0.4:
                self.psi["io"] += 50 * strength * there
                self.full["io"] += 20 * strength * there
        for at in self.some(4):  # memory that is taken, and given back
            taken = rng.uniform(0.05, 0.7) * self.free[at]
            self.free -= taken * self.bump(at, rng.uniform(30, 1500), rng.uniform(60, 900), rng.uniform(1, 60))
        for at in self.some(3):  # data sets that are unpacked on the disk, and logs that are cleaned up
            self.disk -= rng.uniform(0.02, 0.5) * self.disk[at] * self.ramp(at, rng.uniform(120, 1800))
        for at in self.some(3):
            self.disk += rng.uniform(0.05, 0.3) * self.ramp(at, rng.uniform(5, 60))
        if rng.random() < 0.6:  # evaluations
            every, length = rng.uniform(600, 3600), rng.uniform(20, 240)
            inside = (self.t > every) & (self.t % every < length)
            self.training &= ~inside
            self.use = np.where(inside, self.use * rng.uniform(0.4, 0.9), self.use)
            self.free -= np.where(inside, rng.uniform(0, 0.05), 0)
        for at in [0, *self.some(3)]:  # compilations
            inside = (self.t >= at) & (self.t < at + rng.uniform(30, 400))
            self.training &= ~inside
            self.use, self.cpu = np.where(inside, 0.05, self.use), self.cpu + np.where(inside, 0.3, 0)
        for at in self.some(1.5):  # longer sequences, another mixture: steps take longer from here on
            self.slow *= 1 + rng.uniform(-0.2, 0.5) * self.ramp(at, rng.uniform(1, 300))
        for at in self.some(3):  # a hot hour; now and then the clock goes down for it, and comes back
            hot = self.bump(at, rng.uniform(120, 1200), rng.uniform(60, 1800), rng.uniform(120, 900))
            self.celsius += hot * rng.uniform(3, 18)
        for at in self.some(1.5):  # errors that were corrected, and that was it
            self.ecc = self.ecc + rng.poisson(rng.uniform(0.005, 0.3) * self.bump(at, 10, rng.uniform(5, 900), 10))
        for at in self.some(4):  # a slow link or rank that gets well
            self.lag(self.bump(at, rng.uniform(10, 600), rng.uniform(10, 900), rng.uniform(5, 200)) * rng.uniform(0.1, 1.2))
        for at in self.some(3):  # a slow hour of the store
            self.slow_store *= 1 + rng.uniform(0.3, 5) * self.bump(at, 60, rng.uniform(60, 2400), 60)
        self.free, self.disk = np.clip(self.free, 0.04, 1), np.clip(self.disk, 0.03, 1)

    def throttle(self) -> None:
        """From 84 °C on the clock goes down, and steps take longer."""
        over = np.clip((self.celsius - 84) / 12, 0, 1)
        self.mhz *= 1 - 0.5 * over
        self.slow *= 1 + 0.8 * over

    def lag(self, much: Array) -> None:
        """One rank, or its link, is slower by that."""
        self.slow *= 1 + much
        self.straggle += much * self.rng.uniform(0, 0.5)
        self.use = self.use / (1 + 0.5 * much)

    # -- failures ----------------------------------------------------------------------------------------------------------------

    def fail(self) -> None:
        """The run ends in one."""
        rng, end = self.rng, self.n - 1
        if rng.random() < self.sudden:
            self.happened = (Happened(end, str(rng.choice(_SUDDEN_KINDS)), "sudden"),)
            return
        causes = list(CAUSES)
        cause = str(rng.choice(causes, p=[CAUSES[one][1] for one in causes]))
        self.happened = (Happened(end, CAUSES[cause][0], cause),)
        warning = float(np.exp(rng.uniform(np.log(60), np.log(min(7200, end - 600)))))  # of a minute to two hours
        begin = end - warning
        if cause == "leak":
            grown = self.ramp(begin, warning, rng.uniform(0.8, 2.0))
            self.free = self.free * (1 - grown) + 0.003 * grown
            self.rss += grown * (self.free[0] + 0.1)
            near = np.clip((0.06 - self.free) / 0.06, 0, 1) * (self.t > begin)
            self.psi["memory"] += 50 * near
            self.full["memory"] += 25 * near
            self.faults += rng.poisson(200 * near)
        elif cause == "disk":
            grown = self.ramp(begin, warning, rng.uniform(0.9, 1.3))
            self.disk = np.maximum(self.disk, 0.02) * (1 - grown)
        elif cause == "heat":
            up = float(rng.uniform(0.2, 0.9)) * warning
            self.celsius += (97 - self.celsius[int(begin)]) * self.ramp(begin, up) * rng.uniform(0.8, 1.1)
        elif cause == "ecc":
            rate = np.exp(rng.uniform(np.log(0.003), np.log(1)))
            self.ecc = self.ecc + rng.poisson(rate * (1 + 20 * self.ramp(begin, warning, 3)) * (self.t > begin))
            if rng.random() < 0.4:
                self.ecc_bad[max(0, end - int(rng.uniform(1, 300))) :] += rng.poisson(0.02)
        elif cause == "link":
            self.lag(rng.uniform(0.3, 4) * self.ramp(begin, warning, rng.uniform(0.5, 2)))
        elif cause == "store":
            self.slow_store *= 1 + rng.uniform(2, 20) * self.ramp(begin, warning)
            self.psi["io"] += 30 * self.ramp(begin, warning)

    # -- and as it is recorded -----------------------------------------------------------------------------------------------------

    def saves(self) -> Array:
        """How long the last one took; each takes room on the disk, and makes it again."""
        rng, last, at = self.rng, np.full(self.n, np.nan), self.save_every
        room = rng.uniform(0.001, 0.01)
        while at < self.n:
            begin = int(at)
            took = self.save_s * float(self.slow_store[begin]) * float(np.exp(rng.normal(0, 0.15)))
            self.disk[begin:] -= room
            self.disk[min(self.n - 1, begin + int(took) + 5) :] += room
            self.psi["io"][begin : begin + int(took)] += 15
            last[min(self.n - 1, begin + int(took)) :] = took
            at += max(self.save_every, took)
        return last

    def trace(self, name: str) -> SampleTrace:
        """The whole of it."""
        rng = self.rng
        self.everyday()
        if rng.random() < self.failing:
            self.fail()
        self.throttle()
        saved = self.saves()
        shape = SampleShape(1, self.ranks, self.ranks)
        values = np.full((self.n, len(shape.columns)), np.nan, np.float32)
        place = {column: at for at, column in enumerate(shape.columns)}

        def put(whose: str, **columns: Array | float) -> None:
            for field, column in columns.items():
                values[:, place[f"{whose}.{field}"]] = column

        cpu = np.clip(self.cpu, 0, 1)
        psi = {f"psi_{what}_{how}": np.clip(kind[what], 0, 100) for how, kind in (("some", self.psi), ("full", self.full)) for what in kind}
        free = np.clip(self.free, 0.002, 1) * self.size
        put("host", cpu=cpu, load=1.2 * cpu, memory_available_bytes=free, memory_size_bytes=self.size, major_faults=self.faults, **psi)
        put("room0", free_bytes=np.clip(self.disk, 0, 1) * self.disk_size, size_bytes=self.disk_size)
        late, gauged = int(rng.integers(self.ranks)), rng.random() < 0.85
        total, total_bad = np.cumsum(self.ecc), np.cumsum(self.ecc_bad)
        for one in range(self.ranks):
            step = self.step_s * self.slow * (1 + 0.01 * rng.normal(size=self.n)) * (1 + (self.straggle if one == late else 0))
            step = np.where(self.training, step, np.nan)
            put(f"rank{one}", step_s=step, save_s=saved, rss_bytes=self.rss * self.size / self.ranks)
            if not gauged:
                continue
            mine = one == late  # the device that is the matter, if any is
            put(
                f"accelerator{one}", temperature_c=self.celsius if mine else 0.97 * self.celsius, utilisation=self.use,
                clock_mhz=self.mhz if mine else self.mhz[0], power_w=120 + 500 * self.use * self.mhz / self.mhz[0], memory_bytes=64 * _GIB,
                ecc_corrected=total * mine, ecc_uncorrected=total_bad * mine,
            )  # fmt: skip
        return SampleTrace(
            shape.columns, self.t + 1.0, values, tuple(one._replace(at=one.at + 1.0) for one in self.happened), {"name": name}
        )
