"""NVIDIA's DCGM: its metrics as columns of a recording, and files of them: text exposition of dcgm-exporter, output of ``dcgmi dmon``.

A file without times has a sample each ``--step``, the last one when the file was changed last.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from relight.errors import ConfigError, extra_hint
from relight.prediction.imported import ACCELERATORS_MAX, Piece, PieceTable, finite

VALUES_MAX = 8_000_000
"""Most values of all files together. Each takes 16 bytes."""
LINE_BYTES_MAX = 64 << 10
NODE_LABELS = ("Hostname", "node", "nodename", "instance")
"""Labels that can name the node, the first of them that is there."""
_SECONDS_FROM = 1e8
_SINCE_1973 = re.compile(r"\d{9,10}(\.\d*)?")


class DcgmField(NamedTuple):
    """One of DCGM's fields. ``tag``: its heading in ``dcgmi dmon``. ``factor``: to the unit of ``Accelerator``."""

    metric: str
    tag: str
    column: str
    factor: float = 1.0


FIELDS = (
    DcgmField("DCGM_FI_DEV_GPU_TEMP", "TMPTR", "temperature_c"),
    DcgmField("DCGM_FI_DEV_GPU_UTIL", "GPUTL", "utilisation", 0.01),
    DcgmField("DCGM_FI_DEV_SM_CLOCK", "SMCLK", "clock_mhz"),
    DcgmField("DCGM_FI_DEV_POWER_USAGE", "POWER", "power_w"),
    DcgmField("DCGM_FI_DEV_FB_USED", "FBUSD", "memory_bytes", float(1 << 20)),
    DcgmField("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", "ESVTL", "ecc_corrected"),
    DcgmField("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "EDVTL", "ecc_uncorrected"),
)
BY_METRIC = {field.metric: field for field in FIELDS}
BY_TAG = {field.tag: field for field in FIELDS}


class DcgmReading(NamedTuple):
    """One value of one accelerator. ``time_s`` is None if the file has no times."""

    time_s: float | None
    node: str
    accelerator: str
    field: DcgmField
    value: float


def node_of(labels: Mapping[str, str], wanted: str = "") -> str:
    """Return the node of a series; empty if no label names it. ``wanted``: the label to use."""
    return next((labels[name] for name in ((wanted,) if wanted else NODE_LABELS) if labels.get(name)), "")


def accelerator_of(labels: Mapping[str, str]) -> str:
    """Return the accelerator of a series, by its number or else by its UUID; empty if no label names it."""
    return labels.get("gpu") or labels.get("UUID") or labels.get("device") or ""


Series = dict[tuple[str, str, str], tuple["array[float]", "array[float]"]]
"""Times and values by node, accelerator and metric."""


class DcgmFiles:
    """The histories in files."""

    def __init__(self, paths: Sequence[Path], step_s: float, node_label: str = "") -> None:
        """Read the files. Raise ``ConfigError`` for one that cannot be read, or has none of the metrics."""
        self._step_s = step_s
        self._nodes: dict[str, Series] = {}
        self._count = 0
        for path in paths:
            series = self._series_in(path, node_label)
            if not series:
                hint = f"such as {FIELDS[0].metric} of dcgm-exporter, or {FIELDS[0].tag} of dcgmi dmon -e 150,203,100,155,252,310,311"
                raise ConfigError("the file has no metric of DCGM that is used", where=str(path), hint=hint)
            for key, (times, values) in series.items():
                known = self._nodes.setdefault(key[0], {}).setdefault(key, (array("d"), array("d")))
                known[0].extend(times)
                known[1].extend(values)

    def _series_in(self, path: Path, node_label: str) -> Series:
        """Return the series of a file. Without times, a round begins when a value of the round before comes again."""
        series: Series = {}
        rounds, seen, untimed = 0, set[tuple[str, str, str]](), set[tuple[str, str, str]]()
        for reading in readings_in(path, node_label):
            key = reading.node, reading.accelerator, reading.field.metric
            time_s = reading.time_s
            if time_s is None:
                if key in seen:
                    rounds, seen = rounds + 1, set()
                seen.add(key)
                untimed.add(key)
                time_s = rounds * self._step_s
            self._count += 1
            if self._count > VALUES_MAX:
                raise ConfigError(f"more than {VALUES_MAX} values", where=str(path), hint="give fewer or shorter files")
            times, values = series.setdefault(key, (array("d"), array("d")))
            times.append(time_s)
            values.append(reading.value * reading.field.factor)
        if untimed:
            begin = _changed_at(path) - rounds * self._step_s
            series = {
                key: (array("d", (begin + np.frombuffer(times)).tolist()) if key in untimed else times, values)
                for key, (times, values) in series.items()
            }
        return series

    def nodes(self) -> Mapping[str, tuple[float, float]]:
        """Return begin and end of each node's history."""
        return {
            node: (min(min(times) for times, _ in series.values()), max(max(times) for times, _ in series.values()))
            for node, series in self._nodes.items()
        }

    def read(self, node: str, piece: Piece) -> PieceTable:
        """Return the values of a piece."""
        table = PieceTable(piece, self._step_s)
        numbers: dict[str, int] = {}
        for (_, accelerator, metric), (times, values) in self._nodes[node].items():
            number = numbers.setdefault(accelerator, len(numbers))
            if number < ACCELERATORS_MAX:
                column = f"accelerator{number}.{BY_METRIC[metric].column}"
                table.put(column, np.frombuffer(times), np.frombuffer(values))
        return table


def readings_in(path: Path, node_label: str = "") -> Iterator[DcgmReading]:
    """Yield the readings in a file of either form. Rows of other entities and metrics are skipped."""
    tags: list[str] = []
    for number, line in _lines(path):
        words = line.replace(",", " ").split()
        if not words:
            continue
        if words[0].lstrip("#") == "Entity" or words[:2] == ["#", "Entity"]:
            tags = words[2:] if words[0] == "#" else words[1:]
        elif tags:
            yield from _of_row(words, tags, path.stem)
        elif not line.startswith("#"):
            yield from _of_sample(line, f"{path}:{number}", path.stem, node_label)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(LINE_BYTES_MAX):
                number += 1
                if len(line) == LINE_BYTES_MAX and not line.endswith(b"\n"):
                    raise ConfigError(f"a line of more than {LINE_BYTES_MAX} bytes", where=f"{path}:{number}")
                yield number, line.decode("utf-8", "replace").strip()
    except OSError as error:
        raise ConfigError(f"it cannot be read: {error.strerror}", where=str(path)) from None


def _of_row(words: list[str], tags: list[str], node: str) -> Iterator[DcgmReading]:
    """Yield the readings of a row of ``dcgmi dmon``, which may begin with a time in seconds since 1970."""
    time_s = float(words.pop(0)) if _SINCE_1973.fullmatch(words[0]) else None
    if len(words) != 2 + len(tags) or words[0] != "GPU":
        return  # the row of units, a part of a GPU, or a row that was cut off
    for tag, text in zip(tags, words[2:], strict=True):
        value = finite(text)
        if tag in BY_TAG and value == value:
            yield DcgmReading(time_s, node, words[1], BY_TAG[tag], value)


def _of_sample(line: str, where: str, node: str, node_label: str) -> Iterator[DcgmReading]:
    """Yield the reading of a line of the text exposition format."""
    if not any(name in line for name in BY_METRIC):
        return
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ModuleNotFoundError:
        raise ConfigError("metrics in text need prometheus-client", hint=extra_hint("metrics")) from None
    if line.startswith("{"):  # promtool tsdb dump
        line = re.sub(r'^\{__name__="([A-Z_a-z]+)",?\s*', r"\1{", line)
    try:
        samples = [sample for family in text_string_to_metric_families(line) for sample in family.samples]
    except (ValueError, IndexError, KeyError) as error:
        raise ConfigError(f"that is not a line of metrics: {error}"[:200], where=where) from None
    for sample in samples:
        accelerator = accelerator_of(sample.labels)
        if sample.name in BY_METRIC and accelerator and float(sample.value) == sample.value:
            time_s = None if sample.timestamp is None else float(sample.timestamp)
            if time_s is not None and time_s < _SECONDS_FROM:  # the parser takes milliseconds; OpenMetrics has seconds
                time_s *= 1000
            yield DcgmReading(
                time_s,
                node_of(sample.labels, node_label) or node,
                accelerator,
                BY_METRIC[sample.name],
                float(sample.value),
            )


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError as error:
        raise ConfigError(f"it cannot be read: {error.strerror}", where=str(path)) from None
