"""Simulated runs of a training node, with failures of known time and cause, to train and evaluate detectors.

A run has one to four hours, a row a second. Every sign in it also occurs without a failure. For example, memory fills
with caches and levels off, other jobs run on the node, hours are hot, and slow links recover. **Most failures give no
sign** (``SUDDEN``): most causes of interruptions in published tables could not give one (software, hosts taken for
maintenance, cables). No source states how many do, so recall is also reported by cause, and a reader can weigh the
causes differently.
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
"""Causes of failures that give signs: the kind, and the share of these failures."""
_SUDDEN_KINDS = ("hardware", "crash", "hang", "killed", "network")
_GIB = float(1 << 30)


def simulate(seed: int, number: int, failing: float = FAILING, sudden: float = SUDDEN) -> SampleTrace:
    """Return run ``number`` of the history ``seed``. Deterministic."""
    return _SyntheticRun(np.random.default_rng((seed, number)), failing, sudden).trace(f"sim-{seed}-{number}")


class _SyntheticRun:
    """A run while it is generated: arrays with one value for each second."""

    def __init__(self, rng: np.random.Generator, failing: float, sudden: float) -> None:
        self.rng, self.failing, self.sudden = rng, failing, sudden
        self.n = n = int(rng.uniform(3600, 4 * 3600))
        self.ranks = int(rng.choice([1, 2, 4, 8], p=[0.15, 0.2, 0.35, 0.3]))
        self.t = np.arange(n, dtype=float)
        self.happened: tuple[Happened, ...] = ()
        size = float(rng.choice([128, 256, 512, 1024])) * _GIB
        self.size, self.disk_size = size, float(rng.choice([250, 1000, 4000])) * _GIB
        self.free = np.full(n, rng.uniform(0.3, 0.85)) + self.correlated_noise(0.004, 60)
        self.disk = np.full(n, rng.uniform(0.15, 0.9)) - self.t * rng.uniform(0, 4e-7)
        self.cpu = rng.uniform(0.1, 0.6) + self.correlated_noise(0.03, 20)
        self.psi = {
            name: np.abs(self.correlated_noise(scale, 15))
            for name, scale in (("memory", 0.02), ("io", 0.8), ("cpu", 1.5))
        }
        self.full = {
            name: 0.4 * np.abs(self.correlated_noise(scale, 15))
            for name, scale in (("memory", 0.02), ("io", 0.4), ("cpu", 0.0))
        }
        self.faults = rng.poisson(0.05, n).astype(float)
        self.rss = np.full(n, rng.uniform(0.05, 0.15))
        self.step_s = float(np.exp(rng.uniform(np.log(0.2), np.log(8))))
        self.slow = np.exp(self.correlated_noise(rng.uniform(0.005, 0.03), 10))
        self.straggle = np.abs(self.correlated_noise(0.01, 30))
        self.training = np.ones(n, bool)
        self.use = np.clip(rng.uniform(0.75, 0.98) + self.correlated_noise(0.02, 10), 0, 1)
        self.celsius = rng.uniform(50, 70) + self.correlated_noise(0.6, 120)
        self.mhz = np.full(n, float(rng.choice([1410, 1755, 1980])))
        self.ecc, self.ecc_bad = rng.poisson(2e-5, n), np.zeros(n, int)
        self.save_every, self.save_s = rng.uniform(300, 1800), float(np.exp(rng.uniform(np.log(1), np.log(60))))
        self.slow_store = np.ones(n)

    def correlated_noise(self, scale: float, tau_s: float) -> Array:
        """Return noise of standard deviation ``scale`` that is correlated over about ``tau_s`` seconds."""
        knots = int(self.n / tau_s) + 4
        smooth = np.interp(self.t / tau_s, np.arange(knots), self.rng.normal(0, scale, knots))
        return np.asarray(smooth + self.rng.normal(0, 0.3 * scale, self.n))

    def some(self, a_day: float) -> list[int]:
        """Return random seconds of an event that happens ``a_day`` times a day."""
        return sorted(self.rng.integers(300, self.n, self.rng.poisson(a_day * self.n / 86400)).tolist())

    def ramp(self, begin: float, length: float, power: float = 1.0) -> Array:
        """Return a ramp: 0 before ``begin``, 1 after ``begin + length``."""
        return np.asarray(np.clip((self.t - begin) / length, 0, 1) ** power)

    def pulse(self, begin: float, rise: float, stay: float, fall: float) -> Array:
        """Return a curve that rises to 1, stays there, and falls to 0."""
        return self.ramp(begin, rise) - self.ramp(begin + rise + stay, fall)

    # -- what happens without a failure ------------------------------------------------------------------------------------------

    def add_routine_events(self) -> None:
        """Add all events that happen without a failure."""
        rng = self.rng
        if rng.random() < 0.7:  # caches that grow and level off
            self.free -= rng.uniform(0.05, 0.8) * self.free[0] * (1 - np.exp(-self.t / rng.uniform(200, 3000)))
        for second in self.some(12):  # other jobs on the node
            length, strength = rng.uniform(60, 1200), rng.uniform(0.2, 1)
            active = self.pulse(second, rng.uniform(5, 60), length, rng.uniform(5, 60))
            self.cpu += 0.4 * strength * active
            self.psi["cpu"] += 40 * strength * active
            self.slow *= 1 + 0.5 * strength * active * rng.random()
            if rng.random() < 0.4:
                self.psi["io"] += 50 * strength * active
                self.full["io"] += 20 * strength * active
        for second in self.some(4):  # memory that is allocated and freed
            amount = rng.uniform(0.05, 0.7) * self.free[second]
            self.free -= amount * self.pulse(second, rng.uniform(30, 1500), rng.uniform(60, 900), rng.uniform(1, 60))
        for second in self.some(3):  # data sets that are unpacked on the disk, and logs that are cleaned up
            self.disk -= rng.uniform(0.02, 0.5) * self.disk[second] * self.ramp(second, rng.uniform(120, 1800))
        for second in self.some(3):
            self.disk += rng.uniform(0.05, 0.3) * self.ramp(second, rng.uniform(5, 60))
        if rng.random() < 0.6:  # evaluations
            every, length = rng.uniform(600, 3600), rng.uniform(20, 240)
            inside = (self.t > every) & (self.t % every < length)
            self.training &= ~inside
            self.use = np.where(inside, self.use * rng.uniform(0.4, 0.9), self.use)
            self.free -= np.where(inside, rng.uniform(0, 0.05), 0)
        for second in [0, *self.some(3)]:  # compilations
            inside = (self.t >= second) & (self.t < second + rng.uniform(30, 400))
            self.training &= ~inside
            self.use, self.cpu = np.where(inside, 0.05, self.use), self.cpu + np.where(inside, 0.3, 0)
        for second in self.some(1.5):  # longer sequences, another data mixture: the step time changes from here on
            self.slow *= 1 + rng.uniform(-0.2, 0.5) * self.ramp(second, rng.uniform(1, 300))
        for second in self.some(3):  # a hot hour; sometimes the clock is throttled and recovers
            hot = self.pulse(second, rng.uniform(120, 1200), rng.uniform(60, 1800), rng.uniform(120, 900))
            self.celsius += hot * rng.uniform(3, 18)
        for second in self.some(1.5):  # corrected errors without a failure after them
            self.ecc = self.ecc + rng.poisson(rng.uniform(0.005, 0.3) * self.pulse(second, 10, rng.uniform(5, 900), 10))
        for second in self.some(4):  # a slow link or rank that recovers
            self.lag(
                self.pulse(second, rng.uniform(10, 600), rng.uniform(10, 900), rng.uniform(5, 200))
                * rng.uniform(0.1, 1.2)
            )
        for second in self.some(3):  # a slow hour of the store
            self.slow_store *= 1 + rng.uniform(0.3, 5) * self.pulse(second, 60, rng.uniform(60, 2400), 60)
        self.free, self.disk = np.clip(self.free, 0.04, 1), np.clip(self.disk, 0.03, 1)

    def throttle(self) -> None:
        """Lower the clock from 84 °C on, which makes steps slower."""
        over = np.clip((self.celsius - 84) / 12, 0, 1)
        self.mhz *= 1 - 0.5 * over
        self.slow *= 1 + 0.8 * over

    def lag(self, much: Array) -> None:
        """Make one rank, or its link, slower by the factor ``1 + much``."""
        self.slow *= 1 + much
        self.straggle += much * self.rng.uniform(0, 0.5)
        self.use = self.use / (1 + 0.5 * much)

    # -- failures ----------------------------------------------------------------------------------------------------------------

    def fail(self) -> None:
        """End the run with a failure, and add its signs."""
        rng, end = self.rng, self.n - 1
        if rng.random() < self.sudden:
            self.happened = (Happened(end, str(rng.choice(_SUDDEN_KINDS)), "sudden"),)
            return
        causes = list(CAUSES)
        cause = str(rng.choice(causes, p=[CAUSES[name][1] for name in causes]))
        self.happened = (Happened(end, CAUSES[cause][0], cause),)
        warning = float(np.exp(rng.uniform(np.log(60), np.log(min(7200, end - 600)))))  # a minute to two hours
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

    # -- the recording
    # -----------------------------------------------------------------------------------------------------------

    def saves(self) -> Array:
        """Return the duration of the last save, by second. Each save uses disk space, and frees it afterwards."""
        rng, last, time = self.rng, np.full(self.n, np.nan), self.save_every
        space = rng.uniform(0.001, 0.01)
        while time < self.n:
            begin = int(time)
            seconds = self.save_s * float(self.slow_store[begin]) * float(np.exp(rng.normal(0, 0.15)))
            self.disk[begin:] -= space
            self.disk[min(self.n - 1, begin + int(seconds) + 5) :] += space
            self.psi["io"][begin : begin + int(seconds)] += 15
            last[min(self.n - 1, begin + int(seconds)) :] = seconds
            time += max(self.save_every, seconds)
        return last

    def trace(self, name: str) -> SampleTrace:
        """Return the generated recording."""
        rng = self.rng
        self.add_routine_events()
        if rng.random() < self.failing:
            self.fail()
        self.throttle()
        saved = self.saves()
        shape = SampleShape(1, self.ranks, self.ranks)
        values = np.full((self.n, len(shape.columns)), np.nan, np.float32)
        column_index = {column: index for index, column in enumerate(shape.columns)}

        def put(source: str, **columns: Array | float) -> None:
            for field, column in columns.items():
                values[:, column_index[f"{source}.{field}"]] = column

        cpu = np.clip(self.cpu, 0, 1)
        psi = {
            f"psi_{resource}_{how}": np.clip(kind[resource], 0, 100)
            for how, kind in (("some", self.psi), ("full", self.full))
            for resource in kind
        }
        free = np.clip(self.free, 0.002, 1) * self.size
        put(
            "host",
            cpu=cpu,
            load=1.2 * cpu,
            memory_available_bytes=free,
            memory_size_bytes=self.size,
            major_faults=self.faults,
            **psi,
        )
        put("room0", free_bytes=np.clip(self.disk, 0, 1) * self.disk_size, size_bytes=self.disk_size)
        late, gauged = int(rng.integers(self.ranks)), rng.random() < 0.85
        total, total_bad = np.cumsum(self.ecc), np.cumsum(self.ecc_bad)
        for rank in range(self.ranks):
            step = (
                self.step_s
                * self.slow
                * (1 + 0.01 * rng.normal(size=self.n))
                * (1 + (self.straggle if rank == late else 0))
            )
            step = np.where(self.training, step, np.nan)
            put(f"rank{rank}", step_s=step, save_s=saved, rss_bytes=self.rss * self.size / self.ranks)
            if not gauged:
                continue
            fails = rank == late  # the device that fails, if one does
            put(
                f"accelerator{rank}", temperature_c=self.celsius if fails else 0.97 * self.celsius, utilisation=self.use,
                clock_mhz=self.mhz if fails else self.mhz[0], power_w=120 + 500 * self.use * self.mhz / self.mhz[0], memory_bytes=64 * _GIB,
                ecc_corrected=total * fails, ecc_uncorrected=total_bad * fails,
            )  # fmt: skip
        return SampleTrace(
            shape.columns,
            self.t + 1.0,
            values,
            tuple(failure._replace(at=failure.at + 1.0) for failure in self.happened),
            {"name": name},
        )
