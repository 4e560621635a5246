"""Signals, computed from recorded rows: shares, rates, and ratios to this job's usual values. Equal for every node.

The *usual* value is the median over the last half hour, recomputed every five minutes; there is none before the first
five minutes. An unknown value repeats the last known one. The same code processes an hour at once and a second at a
time, so that training and prediction use equal signals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

SIGNALS: tuple[str, ...] = (
    "memory_free", "disk_free", "cpu", "load", "psi_memory", "psi_memory_full", "psi_io", "psi_io_full", "psi_cpu", "faults", "rss",
    "step", "straggle", "save", "temperature", "utilisation", "clock", "power", "ecc", "ecc_bad", "silent",
)  # fmt: skip
"""A share of 1 means all, a pressure of 1 all the time.

``temperature`` is in hundreds of °C. ``step``, ``save``, ``clock`` and ``power`` are logarithms of the ratio to the
usual value. ``straggle`` is the logarithm of the slowest rank's step divided by the median one. ``faults``, ``ecc`` and
``ecc_bad`` are logarithms of 1 plus the number in a second. ``silent`` is the share of accelerators that answered
before and do not answer now.
"""
WORDS: dict[str, str] = {
    "memory_free": "free memory", "disk_free": "free disk", "cpu": "processor use", "load": "load", "psi_memory": "waiting for memory",
    "psi_memory_full": "all waiting for memory", "psi_io": "waiting for disks", "psi_io_full": "all waiting for disks",
    "psi_cpu": "waiting for processors", "faults": "major page faults", "rss": "the ranks' memory", "step": "step time",
    "straggle": "the slowest rank", "save": "save time", "temperature": "temperature", "utilisation": "accelerators' use",
    "clock": "accelerators' clock", "power": "power", "ecc": "corrected memory errors", "ecc_bad": "uncorrected memory errors",
    "silent": "accelerators that do not answer",
}  # fmt: skip
AT = {name: index for index, name in enumerate(SIGNALS)}
BLOCK = 300
_USUAL_ROWS = 1800
_RELATIVE = ("step", "save", "clock", "power")
_BEGINS = 60
"""Known values that are needed for a usual value."""


class SignalHistory:
    """Converts the rows of one run to signals, oldest first, one row a second."""

    def __init__(self, columns: Sequence[str]) -> None:
        index_of = {name: index for index, name in enumerate(columns)}
        self._one = {name: index_of.get(f"host.{name}", -1) for name in (
            "cpu", "load", "memory_available_bytes", "memory_size_bytes", "group_used_bytes", "group_limit_bytes", "psi_memory_some",
            "psi_memory_full", "psi_io_some", "psi_io_full", "psi_cpu_some", "major_faults",
        )}  # fmt: skip
        self._many = {
            f"{word}.{field}": [index for name, index in index_of.items() if name.startswith(word) and name.endswith(f".{field}")]
            for word, fields in (
                ("room", ("free_bytes", "size_bytes")), ("rank", ("step_s", "save_s", "rss_bytes")),
                ("accelerator", ("temperature_c", "utilisation", "clock_mhz", "power_w", "ecc_corrected", "ecc_uncorrected")),
            )
            for field in fields
        }  # fmt: skip
        self._count = 0
        self._last = np.full(len(SIGNALS), np.nan)
        self._totals = np.full((2, 1), np.nan)
        self._answered = 0.0
        self._past = np.full((_USUAL_ROWS, len(_RELATIVE)), np.nan)
        self._usual = np.full(len(_RELATIVE), np.nan)

    def signals(self, rows: Array) -> Array:
        """Return the signals of these rows; NaN until a signal is known."""
        rows, parts = np.asarray(rows, np.float64), []
        while len(rows):
            free_rows = BLOCK - self._count % BLOCK
            parts.append(self._part(rows[:free_rows]))
            rows = rows[free_rows:]
        return np.concatenate(parts) if parts else np.empty((0, len(SIGNALS)))

    def _part(self, rows: Array) -> Array:
        if self._count % BLOCK == 0 and self._count:
            is_usual_known = np.isfinite(self._past).sum(axis=0) >= _BEGINS
            if is_usual_known.any():
                self._usual[is_usual_known] = np.nanmedian(self._past[:, is_usual_known], axis=0)
        raw = self._raw(rows)
        places = (self._count + np.arange(len(rows))) % _USUAL_ROWS
        relative = [AT[name] for name in _RELATIVE]
        self._past[places] = raw[:, relative]
        with np.errstate(divide="ignore", invalid="ignore"):
            raw[:, relative] = np.log(raw[:, relative] / self._usual)
        raw[~np.isfinite(raw)] = np.nan
        signals = _carried(raw, self._last)
        self._last = signals[-1].copy()
        self._count += len(rows)
        return signals

    def _raw(self, rows: Array) -> Array:
        """Return the signals before division by the usual values: seconds, megahertz, watts."""
        host = {name: rows[:, index] if index >= 0 else np.full(len(rows), np.nan) for name, index in self._one.items()}
        many = {
            name: rows[:, indexes] if indexes else np.full((len(rows), 1), np.nan)
            for name, indexes in self._many.items()
        }
        raw = np.full((len(rows), len(SIGNALS)), np.nan)
        with np.errstate(divide="ignore", invalid="ignore"):
            of_group = 1 - host["group_used_bytes"] / host["group_limit_bytes"]
            raw[:, 0] = np.fmin(host["memory_available_bytes"] / host["memory_size_bytes"], of_group)
            raw[:, 1] = np.fmin.reduce(many["room.free_bytes"] / many["room.size_bytes"], axis=1)
            raw[:, 2], raw[:, 3] = host["cpu"], host["load"]
            waits = ("psi_memory_some", "psi_memory_full", "psi_io_some", "psi_io_full", "psi_cpu_some")
            for index, name in enumerate(waits, AT["psi_memory"]):
                raw[:, index] = host[name] / 100
            raw[:, 9] = np.log1p(host["major_faults"])
            raw[:, 10] = _mean(many["rank.rss_bytes"], total=True) / host["memory_size_bytes"]
            steps = many["rank.step_s"]
            raw[:, 11] = _mean(steps)
            if steps.shape[1] > 1:
                raw[:, 12] = np.log(np.fmax.reduce(steps, axis=1) / _middle(steps))
            raw[:, 13] = np.fmax.reduce(many["rank.save_s"], axis=1)
            raw[:, 14] = np.fmax.reduce(many["accelerator.temperature_c"], axis=1) / 100
            raw[:, 15] = _mean(many["accelerator.utilisation"])
            raw[:, 16] = np.fmin.reduce(many["accelerator.clock_mhz"], axis=1)
            raw[:, 17] = _mean(many["accelerator.power_w"])
        for index, name in enumerate(("ecc_corrected", "ecc_uncorrected")):
            raw[:, AT["ecc"] + index] = self._increments(index, _mean(many[f"accelerator.{name}"], total=True))
        answers = np.isfinite(many["accelerator.temperature_c"]).sum(axis=1).astype(float)
        answered = np.maximum.accumulate(np.maximum(answers, self._answered))
        self._answered = float(answered[-1])
        raw[:, 20] = np.where(answered > 0, 1 - answers / np.maximum(answered, 1), np.nan)
        return raw

    def _increments(self, which: int, totals: Array) -> Array:
        """Return log(1 + growth) of a total in each second.

        A total that fell has restarted from 0, which counts as no growth.
        """
        carried = _carried(totals[:, None], self._totals[which])[:, 0]
        grown = np.diff(carried, prepend=self._totals[which])
        self._totals[which] = carried[-1]
        return np.log1p(np.maximum(grown, 0.0))


def _mean(values: Array, total: bool = False) -> Array:
    """Return the mean (or total) of the known values of each row; NaN without one."""
    is_known = np.isfinite(values)
    count = is_known.sum(axis=1)
    sums = np.where(is_known, values, 0.0).sum(axis=1)
    return np.where(count > 0, sums if total else sums / np.maximum(count, 1), np.nan)


def _middle(values: Array) -> Array:
    """Return the median of the known values of each row. ``nanmedian`` takes forty times as long for one row."""
    ordered = np.sort(values, axis=1)  # NaN comes last
    count = np.isfinite(values).sum(axis=1)
    rows = np.arange(len(values))
    low, high = np.maximum(count - 1, 0) // 2, count // 2
    return np.asarray((ordered[rows, low] + ordered[rows, np.minimum(high, values.shape[1] - 1)]) / 2)


def _carried(values: Array, last: Array) -> Array:
    """Return the values with each unknown one replaced by the last known one."""
    if len(values) == 1:
        return np.where(np.isnan(values), last, values)
    values = np.concatenate([last[None], values])
    rows = np.where(np.isnan(values), 0, np.arange(len(values))[:, None])
    np.maximum.accumulate(rows, axis=0, out=rows)
    return values[rows, np.arange(values.shape[1])][1:]
