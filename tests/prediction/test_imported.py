"""Histories from a Prometheus and from files of DCGM: as they would have been recorded, in bounded pieces, with failures from incidents."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from exported import BEGIN, CORES, END, FAILS, GB, NODES, exposition, prometheus_stub

from relight.comm.ports import free_port
from relight.errors import ConfigError, CorruptCheckpoint, RelightError, StoreUnavailable
from relight.prediction import dcgm, prometheus
from relight.prediction.dcgm import DcgmFiles
from relight.prediction.history import RecordedRun
from relight.prediction.imported import (
    PIECE_S,
    PIECES_MAX,
    NodeHistory,
    Piece,
    PieceTable,
    chosen_pieces,
    imported,
    pieces_of,
    short_name,
)
from relight.prediction.prometheus import HistoryRange, PrometheusHistory
from relight.prediction.trace import Happened, SampleTrace

RANGE = HistoryRange(BEGIN, END, 15.0)
FAILURE = Happened(FAILS, "memory")
WHOLE = Piece(BEGIN, FAILS, FAILURE, BEGIN)
ACCELERATORS = {
    "temperature_c": 60.0, "utilisation": 0.9, "clock_mhz": 1755.0, "power_w": 400.5, "memory_bytes": float(1 << 30), "ecc_uncorrected": 0.0,
}  # fmt: skip


def runs(source: NodeHistory, failures: dict[str, list[Happened]] | None = None) -> dict[str, RecordedRun]:
    """Return the runs of a source, by name."""
    return {run.name: run for _, run in imported(source, failures or {}, lambda text: None)}


def column(trace: SampleTrace, name: str) -> np.ndarray:
    """Return a column."""
    return trace.values[:, trace.columns.index(name)]


def same_history(trace: SampleTrace) -> None:
    """Compare a node's recording with what was exported."""
    for name, value in ACCELERATORS.items():
        assert column(trace, f"accelerator0.{name}") == pytest.approx(value), name
    assert column(trace, "accelerator1.temperature_c") == pytest.approx(61.0)
    assert list(column(trace, "accelerator0.ecc_corrected")) == pytest.approx(
        list(np.floor((trace.at - BEGIN) / 600 + 1e-6)), abs=1.0
    )


def same_host(trace: SampleTrace) -> None:
    """Compare a node's own values with what was exported. Rates have no value at the first time."""
    assert column(trace, "host.memory_size_bytes") == pytest.approx(100 * GB)
    assert column(trace, "host.load")[-10:] == pytest.approx(2.0 / CORES)
    assert column(trace, "room0.free_bytes") == pytest.approx(40 * GB)
    for name, value in {
        "major_faults": 3.0,
        "psi_memory_some": 2.0,
        "psi_memory_full": 1.0,
        "psi_io_some": 0.0,
    }.items():
        assert column(trace, f"host.{name}")[8:] == pytest.approx(value, rel=0.01), name
    assert column(trace, "host.cpu")[8:] == pytest.approx(0.3, rel=0.01)


# -- Prometheus


def test_a_node_is_read_from_prometheus() -> None:
    """Metrics of both exporters become the columns of a recording, in its units. Both name the same node differently."""
    with prometheus_stub() as stub:
        history = PrometheusHistory(stub.url, RANGE)
        assert dict(history.nodes()) == dict.fromkeys(NODES, (BEGIN, END))
        trace = history.read("gpu-1", WHOLE).trace(FAILURE)
        same_history(trace)
        same_host(trace)
        free = column(trace, "host.memory_available_bytes")
        assert free[0] == pytest.approx(50 * GB) and free[-1] == pytest.approx(0.0, abs=GB)
        assert trace.at[-1] == FAILS and trace.happened == (FAILURE,) and set(np.diff(trace.at)) == {15.0}


def test_runs_end_at_failures_and_show_signs() -> None:
    """A failure ends a run of its node, and the windows before it are marked. The other node has one run without a failure."""
    with prometheus_stub() as stub:
        by_name = runs(PrometheusHistory(stub.url, RANGE), {"gpu-1": [FAILURE]})
    by_node = {node: [run for name, run in by_name.items() if name.startswith(f"{node}@")] for node in NODES}
    assert [run.failed for run in by_node["gpu-0"]] == [None]
    failed, after = sorted(by_node["gpu-1"], key=lambda run: run.failed is None)
    assert failed.failed == FAILURE and after.failed is None
    assert failed.before_failure.sum() == 240 and failed.at[-1] <= FAILS and after.at[0] > FAILS
    from relight.prediction.features import column as feature

    slope = failed.features[:, feature("memory_free", "slope300")]
    assert slope[-20:].mean() < -1e-4 < slope[:20].mean() + 1e-5


def test_queries_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long piece of small steps is read by several queries, each below Prometheus' limit of points."""
    monkeypatch.setattr(prometheus, "POINTS_MAX", 500)
    with prometheus_stub() as stub:
        history = PrometheusHistory(stub.url, RANGE._replace(step_s=5.0))
        history.nodes()
        trace = history.read("gpu-1", WHOLE).trace(FAILURE)
        same_history(trace)
        assert stub.points == 500 and len(trace.at) == 7200 / 5 + 1
        spans = [
            float(asked["end"]) - float(asked["start"]) for path, asked in stub.asked if path.endswith("query_range")
        ]
        assert len(spans) == 4 * 3 and max(spans) <= 2500


@pytest.mark.parametrize(
    ("secret", "header"),
    [("me:hunter2", "Basic bWU6aHVudGVyMg=="), ("hunter2\n", "Bearer hunter2")],
    ids=["basic", "token"],
)
def test_a_password_or_token_is_sent(tmp_path: Path, secret: str, header: str) -> None:
    """``USER:PASSWORD`` is basic authentication, and another text is a token."""
    (tmp_path / "secret").write_text(secret)
    with prometheus_stub() as stub:
        PrometheusHistory(stub.url, RANGE, f"file:{tmp_path}/secret").nodes()
        assert stub.auth == {header}
        PrometheusHistory(stub.url.replace("//", "//you:pass@"), RANGE).nodes()
        assert stub.auth == {header, "Basic eW91OnBhc3M="}


@pytest.mark.parametrize(
    ("instead", "error", "text"),
    [
        ((401, b""), StoreUnavailable, "HTTP status 401: it requires a token or a login"),
        (
            (422, b'{"status":"error","errorType":"execution","error":"query timed out"}'),
            StoreUnavailable,
            "query timed out",
        ),
        ((302, b""), StoreUnavailable, "a redirect to http://127.0.0.1:1/, which is not followed"),
        ((200, b"<html>a login page</html>"), CorruptCheckpoint, "that is not a response of Prometheus"),
        ((200, b'{"status":"success","data":{"resultType":"matrix"}}'), CorruptCheckpoint, "that is not a response"),
        ((200, b'{"status":"success","data":[]}'), ConfigError, "no series of DCGM_FI_DEV_GPU_TEMP or node_load1"),
        ((200, b" " * (1 << 20)), StoreUnavailable, "sends more than"),
    ],
    ids=["401", "422", "redirect", "html", "no list", "no series", "large"],
)
def test_what_is_wrong_with_a_server_is_reported(
    monkeypatch: pytest.MonkeyPatch, instead: tuple[int, bytes], error: type[RelightError], text: str
) -> None:
    """A refusal, a redirect, another server's page, and a response that is too large are errors in words, without the password."""
    monkeypatch.setattr(prometheus, "RESPONSE_BYTES_MAX", 1 << 19)
    with prometheus_stub() as stub:
        stub.instead = instead
        with pytest.raises(error) as caught:
            PrometheusHistory(stub.url.replace("//", "//me:hunter2@"), RANGE).nodes()
        assert text in str(caught.value) and f"127.0.0.1:{stub.port}/prom" in str(caught.value)
        assert "hunter2" not in str(caught.value)


def test_a_closed_port_and_an_invalid_address_are_reported() -> None:
    """No server, and an invalid address."""
    with pytest.raises(StoreUnavailable, match="Connection refused"):
        PrometheusHistory(f"http://127.0.0.1:{free_port()}", RANGE).nodes()
    for wrong in ("prom:9090", "ftp://prom", "http://", "http://prom:x"):
        with pytest.raises(ConfigError, match="not the address of a server"):
            PrometheusHistory(wrong, RANGE)
    with pytest.raises(ConfigError, match="there is no password or token"):
        PrometheusHistory("http://prom", RANGE, "env:NOT_THERE_AT_ALL")
    with pytest.raises(ConfigError, match="env:NAME or file:PATH") as caught:
        PrometheusHistory("http://prom", RANGE, "hunter2")
    assert "hunter2" not in str(caught.value)


def test_a_real_prometheus_is_read(tmp_path: Path) -> None:
    """The same history, imported by promtool into a real Prometheus, gives the same columns."""
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        pytest.skip("there is no prometheus: apt-get install prometheus")
    families: dict[str, list[str]] = {}
    for line in exposition(15.0, stamp="s"):
        families.setdefault(line.partition("{")[0], []).append(line)
    with (tmp_path / "metrics.om").open("w") as file:
        for name, lines in families.items():
            file.write(f"# TYPE {name} unknown\n")
            file.writelines(sorted(lines, key=lambda line: line.rpartition("}")[0]))
        file.write("# EOF\n")
    subprocess.run(
        ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(tmp_path / "metrics.om"), str(tmp_path / "data")],
        check=True, capture_output=True,
    )  # fmt: skip
    (tmp_path / "prometheus.yml").write_text("global: {scrape_interval: 15s}\n")
    port = free_port()
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(
            ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
             "--storage.tsdb.retention.time=20y", f"--web.listen-address=127.0.0.1:{port}"],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        ends = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=5).read()
                break
            except OSError:
                assert time.monotonic() < ends, (tmp_path / "log").read_text()
                time.sleep(0.2)
        history = PrometheusHistory(f"http://127.0.0.1:{port}", RANGE)
        assert set(history.nodes()) == set(NODES)
        trace = history.read("gpu-1", WHOLE).trace(FAILURE)
        same_history(trace)
        same_host(trace)
        failed = [run for run in runs(history, {"gpu-1": [FAILURE]}).values() if run.failed]
        assert len(failed) == 1 and failed[0].before_failure.sum() == 240
    finally:
        process.kill()
        process.wait()


# -- files of DCGM


@pytest.mark.parametrize("form", ["ms", "s", "", "dump"])
def test_text_exposition_is_read(tmp_path: Path, form: str) -> None:
    """Files with milliseconds, with seconds (OpenMetrics), without times, and of ``promtool tsdb dump`` give the same columns."""
    path = tmp_path / "node.prom"
    with path.open("w") as file:
        file.write("# HELP DCGM_FI_DEV_GPU_TEMP GPU temperature (in C).\n# TYPE DCGM_FI_DEV_GPU_TEMP gauge\n")
        for line in exposition(15.0, stamp={"dump": "ms"}.get(form, form)):
            file.write(re.sub(r"^(\w+)\{", r'{__name__="\1",', line) if form == "dump" else line)
        file.write("# EOF\n" if form == "s" else "")
    os.utime(path, (END, END))
    files = DcgmFiles([path], 15.0)
    assert dict(files.nodes()) == dict.fromkeys(NODES, (BEGIN, END))
    same_history(files.read("gpu-1", WHOLE).trace(FAILURE))


@pytest.mark.parametrize("form", ["plain", "timed", "csv"])
def test_output_of_dmon_is_read(tmp_path: Path, form: str) -> None:
    """``dcgmi dmon`` gives the same columns: unchanged, with a time in each row, and with commas. Other rows are skipped."""
    path = tmp_path / "gpu-1.txt"
    header = "#Entity   TMPTR   GPUTL   SMCLK   POWER     FBUSD   ESVTL   EDVTL   XXXXX\nID        C\n"
    lines: list[str] = []
    for index in range(int((END - BEGIN) / 15) + 1):
        time_s = BEGIN + 15 * index
        lines += [header] if index % 7 == 0 else []
        for gpu in (0, 1):
            row = f"GPU {gpu}     {60 + gpu}   90   1755   400.500   1024   {int((time_s - BEGIN) // 600)}   0   N/A\n"
            lines.append(f"{time_s:.3f} {row}" if form == "timed" else row)
        lines.append("GPU-I 0   1   2   3   4   5   6   7   8\n")
    lines.append("GPU 0    60\n")
    text = "".join(lines)
    path.write_text(re.sub(r"(?<=\w) +", ",", text) if form == "csv" else text)
    os.utime(path, (END, END))
    files = DcgmFiles([path], 15.0)
    assert dict(files.nodes()) == {"gpu-1": (BEGIN, END)}
    same_history(files.read("gpu-1", WHOLE).trace(FAILURE))
    (run,) = runs(files).values()
    assert run.failed is None and len(run.at) == (END - BEGIN) / 5 - 59


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "no metric of DCGM"),
        ("up 1\nnode_load1 3\n", "no metric of DCGM"),
        ('DCGM_FI_DEV_GPU_TEMP{gpu="0"', "not a line of metrics"),
        ('DCGM_FI_DEV_GPU_TEMP{gpu="0"} warm\n', "not a line of metrics"),
        ("x" * 70_000, "a line of more than"),
        ("#Entity TMPTR\nGPU 0 N/A\n", "no metric of DCGM"),
    ],
    ids=["empty", "others", "cut off", "no number", "long", "not available"],
)
def test_files_that_cannot_be_used_are_reported(tmp_path: Path, text: str, error: str) -> None:
    """An empty file, other metrics, a damaged line and binary data are errors with the file's name."""
    (tmp_path / "m.prom").write_text(text)
    with pytest.raises(ConfigError, match=error) as caught:
        DcgmFiles([tmp_path / "m.prom"], 15.0)
    assert "m.prom" in str(caught.value)
    with pytest.raises(ConfigError, match="No such file"):
        DcgmFiles([tmp_path / "none.prom"], 15.0)


def test_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More values than fit into memory are an error before they fill it."""
    monkeypatch.setattr(dcgm, "VALUES_MAX", 100)
    (tmp_path / "m.prom").write_text("".join(exposition(600.0)))
    with pytest.raises(ConfigError, match="more than 100 values"):
        DcgmFiles([tmp_path / "m.prom"], 15.0)


# -- pieces


def test_pieces_end_at_failures() -> None:
    """A history is cut at failures. Each run is cut backwards in pieces of six hours, and short rests are left out."""
    first, second = Happened(10_000.0, "hang"), Happened(80_000.0, "memory")
    outside, script = Happened(5.0, "memory"), Happened(90_000.0, "")
    pieces = list(pieces_of(100.0, 90_500.0, [second, outside, first, script]))
    assert [(piece.begin, piece.end, piece.failure) for piece in pieces] == [
        (100.0, 10_000.0, first),
        (80_000.0 - PIECE_S, 80_000.0, second), (80_000.0 - 2 * PIECE_S, 80_000.0 - PIECE_S, None),
        (80_000.0 - 3 * PIECE_S, 80_000.0 - 2 * PIECE_S, None), (10_000.0, 80_000.0 - 3 * PIECE_S, None),
        (80_000.0, 90_000.0, None),
    ]  # fmt: skip
    assert {piece.run_begin for piece in pieces} == {100.0, 10_000.0, 80_000.0}


def test_pieces_with_failures_are_read_first() -> None:
    """Of more pieces than are read, all that end at a failure are chosen, and others of all nodes."""
    pieces = [(f"n{number % 9}", Piece(number, number + 1.0, None, 0.0)) for number in range(3 * PIECES_MAX)]
    failed = [("n1", Piece(number, number + 1.0, FAILURE, 0.0)) for number in range(50)]
    chosen = chosen_pieces([*pieces, *failed])
    assert len(chosen) == PIECES_MAX and chosen[:50] != failed and sorted(chosen[:50]) == sorted(failed)
    assert {node for node, _ in chosen[50:]} == {f"n{number}" for number in range(9)}
    assert chosen == chosen_pieces([*failed, *reversed(pieces)])


def test_the_first_series_of_a_column_counts() -> None:
    """A second series fills gaps alone: the exporter of a device names its pod, so one device has several series."""
    table = PieceTable(Piece(0.0, 50.0, None, 0.0), 10.0)
    table.put("a", np.array([0.0, 11.0, 60.0]), np.array([1.0, 2.0, 9.0]))
    table.put("a", np.array([10.0, 20.0, 30.0]), np.array([7.0, 3.0, np.nan]))
    table.put_rate("b", np.array([0.0, 10.0, 20.0, 30.0, 900.0]), np.array([5.0, 15.0, 2.0, 2.0, 900.0]))
    trace = table.trace(None)
    assert list(trace.at) == [0.0, 10.0, 20.0, 30.0]
    assert list(column(trace, "a")[:3]) == [1.0, 2.0, 3.0] and np.isnan(column(trace, "a")[3])
    assert list(column(trace, "b")[1:]) == pytest.approx([1.0, 0.2, 0.0])
    for step_s in (0.0, 61.0, float("nan")):
        with pytest.raises(ConfigError, match="--step"):
            PieceTable(Piece(0.0, 50.0, None, 0.0), step_s)


def test_hosts_of_incidents_are_nodes() -> None:
    """Ports and domains do not count, addresses stay whole."""
    assert short_name("GPU-1.cluster.local:9100") == short_name("gpu-1") == "gpu-1"
    assert short_name("10.0.0.1:9400") == "10.0.0.1" and short_name("[fd00::1]:9400") == "fd00::1"
