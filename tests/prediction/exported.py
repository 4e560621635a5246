"""Metrics of two nodes as dcgm-exporter and node_exporter export them, and a server that answers queries as Prometheus does."""

from __future__ import annotations

import contextlib
import json
import math
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

BEGIN, END = 1_700_000_000.0, 1_700_000_000.0 + 3 * 3600
FAILS = BEGIN + 2 * 3600
"""When the node ``gpu-1`` runs out of memory. Its free memory has fallen for 20 minutes."""
LEAK_S = 1200.0
GB = 1e9
CORES = 4
NODES = ("gpu-0", "gpu-1")
Labels = dict[str, str]


def series(node: str, time_s: float) -> Iterator[tuple[str, Labels, float]]:
    """Yield the metrics of a node at a time."""
    dcgm = {"Hostname": node, "instance": f"10.0.0.{node[-1]}:9400", "job": "dcgm"}
    for gpu in ("0", "1"):
        labels = {**dcgm, "gpu": gpu, "UUID": f"GPU-{node}-{gpu}", "modelName": "NVIDIA H100"}
        yield "DCGM_FI_DEV_GPU_TEMP", labels, 60.0 + int(gpu)
        yield "DCGM_FI_DEV_GPU_UTIL", labels, 90.0
        yield "DCGM_FI_DEV_SM_CLOCK", labels, 1755.0
        yield "DCGM_FI_DEV_POWER_USAGE", labels, 400.5
        yield "DCGM_FI_DEV_FB_USED", labels, 1024.0
        yield "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", labels, math.floor((time_s - BEGIN) / 600)
        yield "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", labels, 0.0
    host = {"instance": f"{node}.cluster.local:9100", "job": "node"}
    leaked = max(0.0, min(1.0, 1 - (FAILS - time_s) / LEAK_S)) if node == "gpu-1" and time_s <= FAILS else 0.0
    yield "node_memory_MemAvailable_bytes", host, (1 - leaked) * 50 * GB
    yield "node_memory_MemTotal_bytes", host, 100 * GB
    yield "node_load1", host, 2.0
    for mount, free in (("/", 40.0), ("/boot", 0.1)):
        for name, value in (("avail", free * GB), ("size", 100 * GB)):
            yield f"node_filesystem_{name}_bytes", {**host, "mountpoint": mount, "fstype": "ext4"}, value
    yield "node_vmstat_pgmajfault", host, 3 * (time_s - BEGIN)
    yield "node_pressure_memory_waiting_seconds_total", host, 0.02 * (time_s - BEGIN)
    yield "node_pressure_memory_stalled_seconds_total", host, 0.01 * (time_s - BEGIN)
    yield "node_pressure_io_waiting_seconds_total", host, 0.0
    yield "node_pressure_io_stalled_seconds_total", host, 0.0
    yield "node_pressure_cpu_waiting_seconds_total", host, 0.0
    for cpu in range(CORES):
        for mode, share in (("idle", 0.7), ("user", 0.3)):
            yield "node_cpu_seconds_total", {**host, "cpu": str(cpu), "mode": mode}, share * (time_s - BEGIN)


def exposition(step_s: float, *, names: str = ".*", stamp: str = "ms", nodes: tuple[str, ...] = NODES) -> Iterator[str]:
    """Yield lines of the text exposition format, scrape after scrape. ``stamp``: unit of the times, empty for none."""
    for index in range(int((END - BEGIN) / step_s) + 1):
        time_s = BEGIN + index * step_s
        time = {"ms": f" {int(time_s * 1000)}", "s": f" {time_s:.3f}", "": ""}[stamp]
        for node in nodes:
            for name, labels, value in series(node, time_s):
                if re.fullmatch(names, name):
                    pairs = ",".join(f'{label}="{text}"' for label, text in labels.items())
                    yield (
                        f"{name}{{{pairs}}} {value:g}{time}\n" if stamp != "s" else f"{name}{{{pairs}}} {value}{time}\n"
                    )


class PrometheusStub:
    """What the server was asked. ``answers``: a status and a body to send instead of data."""

    def __init__(self) -> None:
        self.port = 0
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.auth: set[str] = set()
        self.instead: tuple[int, bytes] | None = None
        self.points = 0
        """Most points of a series in one response."""

    @property
    def url(self) -> str:
        """Return its address."""
        return f"http://127.0.0.1:{self.port}/prom"

    def answer(self, path: str, asked: dict[str, str]) -> tuple[int, Any]:
        """Return status and body, as Prometheus' API documents them."""
        self.asked.append((path, asked))
        begin, end = float(asked["start"]), float(asked["end"])
        if path == "/prom/api/v1/series":
            rows = [
                {"__name__": name, **labels}
                for node in NODES for name, labels, _ in series(node, BEGIN) if name == asked["match[]"]
            ]  # fmt: skip
            return 200, {"status": "success", "data": rows if begin < END and end > BEGIN else []}
        step = float(asked["step"])
        count = int((end - begin) / step + 1e-6) + 1
        if path != "/prom/api/v1/query_range" or count > 11_000:
            error = "exceeded maximum resolution of 11,000 points per timeseries"
            return 400, {"status": "error", "errorType": "bad_data", "error": error}
        self.points = max(self.points, count)
        times = [begin + index * step for index in range(count)]
        return 200, {
            "status": "success",
            "data": {"resultType": "matrix", "result": self.matrix(asked["query"], times)},
        }

    def matrix(self, query: str, times: list[float]) -> list[dict[str, Any]]:
        """Return the result of one of the queries that are asked."""
        (label, wanted) = re.search(r',(\w+)="([^"]*)"', query).groups()  # type: ignore[union-attr]
        names = re.search(r'__name__=~"([^"]*)"', query)
        values: dict[str, tuple[Labels, list[Any]]] = {}
        for time_s in times:
            for node in NODES if BEGIN <= time_s <= END else ():
                for name, labels, value in series(node, time_s):
                    if labels.get(label) != wanted or (names and name not in names[1].split("|")):
                        continue
                    if not names:  # the processors: what the expression gives
                        if name != "node_cpu_seconds_total":
                            continue
                        name, labels = "", {key: labels[key] for key in ("instance", "job")}
                        value = 0.3 if query.startswith("1 - avg") else CORES
                    key = name + json.dumps(labels)
                    own = labels if not name else {"__name__": name, **labels}
                    points = values.setdefault(key, (own, []))[1]
                    if not points or points[-1][0] < time_s:
                        points.append([time_s, f"{value:g}"])
        return [{"metric": labels, "values": points} for labels, points in values.values()]


@contextlib.contextmanager
def prometheus_stub() -> Iterator[PrometheusStub]:
    """Start the server."""
    stub = PrometheusStub()

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            stub.auth.add(self.headers.get("Authorization", ""))
            status, body = stub.instead or stub.answer(
                parts.path, {name: texts[0] for name, texts in parse_qs(parts.query).items()}
            )
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", "http://127.0.0.1:1/")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stub.port = server.server_address[1]
        yield stub
        server.shutdown()
