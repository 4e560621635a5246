"""Histories of nodes from a Prometheus, or a server with its API: metrics of dcgm-exporter and of node_exporter.

Each piece is read by some range queries of at most 5,000 points, and each response has a size limit. So memory is
bounded, however long the history is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlencode

import msgspec
import numpy as np

from relight.decode import from_json_bytes
from relight.errors import ConfigError, CorruptCheckpoint
from relight.http_request import basic_auth, request, url_shown, without_user
from relight.prediction.dcgm import BY_METRIC, FIELDS, NODE_LABELS, accelerator_of, node_of
from relight.prediction.imported import ACCELERATORS_MAX, ROOM, Piece, PieceTable, finite, short_name
from relight.settings.secret_text import secret_text

Array = np.ndarray[Any, Any]
POINTS_MAX = 5000
"""Most points of a series in one query. Prometheus allows 11,000."""
RESPONSE_BYTES_MAX = 32 << 20
TIMEOUT_S = 60.0
SERIES_MAX = 100_000
_GAUGES = {
    "node_memory_MemAvailable_bytes": "host.memory_available_bytes",
    "node_memory_MemTotal_bytes": "host.memory_size_bytes",
    "node_load1": "host.load",
    "node_filesystem_avail_bytes": f"{ROOM}.free_bytes",
    "node_filesystem_size_bytes": f"{ROOM}.size_bytes",
}
_TOTALS = {
    "node_vmstat_pgmajfault": ("host.major_faults", 1.0),
    "node_pressure_memory_waiting_seconds_total": ("host.psi_memory_some", 100.0),
    "node_pressure_memory_stalled_seconds_total": ("host.psi_memory_full", 100.0),
    "node_pressure_io_waiting_seconds_total": ("host.psi_io_some", 100.0),
    "node_pressure_io_stalled_seconds_total": ("host.psi_io_full", 100.0),
    "node_pressure_cpu_waiting_seconds_total": ("host.psi_cpu_some", 100.0),
}
"""Counters, and the factor from their growth in a second to the column's unit."""
_CORES = "host.cores"
_FOUND_BY = (FIELDS[0].metric, "node_load1")
"""Metrics: the labels of their series name the nodes."""


class _Series(msgspec.Struct):
    """A series of a matrix."""

    metric: dict[str, str]
    values: list[tuple[float, str]]


class _Matrix(msgspec.Struct):
    """The data of a range query."""

    result: list[_Series]


class _RangeAnswer(msgspec.Struct):
    """The response to a range query."""

    status: str
    data: _Matrix


class _SeriesAnswer(msgspec.Struct):
    """The response with the labels of series."""

    status: str
    data: list[dict[str, str]]


class HistoryRange(NamedTuple):
    """Seconds since 1970, and the seconds between samples."""

    begin: float
    end: float
    step_s: float


class PrometheusHistory:
    """The histories of all nodes in a Prometheus."""

    def __init__(self, url: str, time_range: HistoryRange, auth: str = "", node_label: str = "") -> None:
        """``auth``: ``env:NAME`` or ``file:PATH`` with ``USER:PASSWORD`` or with a token."""
        self._url, user = without_user(url.rstrip("/"))
        self._headers = _auth_header(auth) if auth else user
        self._range, self._label = time_range, node_label
        self._selectors: dict[str, dict[str, str]] = {}
        """For each node, the selector of each metric that names it."""

    def nodes(self) -> Mapping[str, tuple[float, float]]:
        """Return begin and end of the history of each node that has metrics. Raise ``ConfigError`` if none has."""
        asked = {"start": f"{self._range.begin:.3f}", "end": f"{self._range.end:.3f}"}
        for metric in _FOUND_BY:
            for labels in self._get("series", {"match[]": metric, **asked}, _SeriesAnswer).data[:SERIES_MAX]:
                node = node_of(labels, self._label)
                if node:
                    name = self._label or next(name for name in NODE_LABELS if labels.get(name))
                    self._add(node, metric, f"{name}={_quoted(node)}")
        if not self._selectors:
            hint = "dcgm-exporter or node_exporter must be scraped there; --node-label names the label with the node"
            raise ConfigError(
                f"there is no series of {' or '.join(_FOUND_BY)} in that time", where=url_shown(self._url), hint=hint
            )
        return dict.fromkeys(self._selectors, (self._range.begin, self._range.end))

    def _add(self, node: str, metric: str, selector: str) -> None:
        """Record how a node's series are selected. Exporters name one node with and without domain and port."""
        known = self._selectors.get(short_name(node), {})
        name = short_name(node) if known.get(metric, selector) == selector else node
        self._selectors.setdefault(name, {})[metric] = selector

    def read(self, node: str, piece: Piece) -> PieceTable:
        """Return the values of a piece."""
        table, selectors = PieceTable(piece, self._range.step_s), self._selectors[node]
        if selector := selectors.get(_FOUND_BY[0]):
            numbers: dict[str, int] = {}
            for labels, times, values in self._range_of(f'{{__name__=~"{"|".join(BY_METRIC)}",{selector}}}', table):
                field = BY_METRIC.get(labels.get("__name__", ""))
                number = numbers.setdefault(accelerator_of(labels), len(numbers))
                if field is not None and number < ACCELERATORS_MAX:
                    table.put(f"accelerator{number}.{field.column}", times, field.factor * values)
        if selector := selectors.get(_FOUND_BY[1]):
            self._read_host(table, selector)
        return table

    def _read_host(self, table: PieceTable, selector: str) -> None:
        names = "|".join([*_GAUGES, *_TOTALS])
        for labels, times, values in self._range_of(f'{{__name__=~"{names}",{selector}}}', table):
            name = labels.get("__name__", "")
            if name.startswith("node_filesystem_") and labels.get("mountpoint") != "/":
                continue
            if name in _GAUGES:
                table.put(_GAUGES[name], times, values)
            elif name in _TOTALS:
                table.put_rate(_TOTALS[name][0], times, values, _TOTALS[name][1])
        window = f"{max(60, int(4 * self._range.step_s))}s"
        idle = f'rate(node_cpu_seconds_total{{mode=~"idle|iowait",{selector}}}[{window}])'
        cores = f'count without (cpu, mode) (node_cpu_seconds_total{{mode="idle",{selector}}})'
        for query, column in ((f"1 - avg without (cpu) (sum without (mode) ({idle}))", "host.cpu"), (cores, _CORES)):
            for _, times, values in self._range_of(query, table):
                table.put(column, times, np.clip(values, 0.0, 1.0) if column == "host.cpu" else values)
        table.divide("host.load", _CORES)

    def _range_of(self, query: str, table: PieceTable) -> Iterator[tuple[dict[str, str], Array, Array]]:
        """Yield labels, times and values of each series, in parts of at most ``POINTS_MAX`` points."""
        for first in range(0, len(table.times), POINTS_MAX):
            times = table.times[first : first + POINTS_MAX]
            asked = {
                "query": query, "start": f"{times[0]:.3f}", "end": f"{times[-1]:.3f}", "step": f"{self._range.step_s:g}",
            }  # fmt: skip
            for series in self._get("query_range", asked, _RangeAnswer).data.result[:SERIES_MAX]:
                points = np.array([(time_s, finite(text)) for time_s, text in series.values], np.float64).reshape(-1, 2)
                yield series.metric, points[:, 0], points[:, 1]

    def _get(self, path: str, asked: Mapping[str, str], kind: type[Any]) -> Any:
        data = request(
            f"{self._url}/api/v1/{path}?{urlencode(asked)}", headers=self._headers, timeout_s=TIMEOUT_S, bytes_max=RESPONSE_BYTES_MAX,
            what="Prometheus",
        )  # fmt: skip
        try:
            answer = from_json_bytes(data, kind)
        except msgspec.MsgspecError as error:
            raise CorruptCheckpoint(
                f"that is not a response of Prometheus: {error}"[:200], where=f"{url_shown(self._url)}/api/v1/{path}"
            ) from None
        return answer


def _auth_header(spec: str) -> dict[str, str]:
    secret = secret_text(spec, "password or token for Prometheus")
    user, colon, password = secret.partition(":")
    return basic_auth(user, password) if colon else {"Authorization": f"Bearer {secret}"}


def _quoted(text: str) -> str:
    """Return a text as a string of PromQL."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
