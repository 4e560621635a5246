"""Traces that are sent while a job runs: to a receiver that decodes them, to one that is dead, and by a real job."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from receivers import until
from watched import RUN, id_of, keep_events

from relight.comm.ports import free_port
from relight.monitoring import trace_export
from relight.monitoring.otlp import exporter_for
from relight.monitoring.trace_export import TraceExport, start_traces
from relight.observe import counters, subscribe
from relight.settings.environment import OTEL

pytest.importorskip("opentelemetry.sdk", reason="there is no OpenTelemetry: pip install 'relight[traces]'")
JOB = Path(__file__).parents[1] / "supervise" / "job.py"
HOST = socket.gethostname()[:64]


class SpanSeen:
    """A span as it arrived."""

    def __init__(self, span: Any, resource: dict[str, str]) -> None:
        self.name, self.resource = span.name, resource
        self.trace, self.id, self.parent = span.trace_id, span.span_id, span.parent_span_id
        self.seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        self.good = span.status.code == 1
        self.links = [link.span_id for link in span.links]
        self.about = {
            pair.key.removeprefix("relight."): getattr(pair.value, pair.value.WhichOneof("value"))
            for pair in span.attributes
        }


class Collector:
    """A receiver of OTLP by HTTP. ``hangs``: whether it answers never; ``status``: of its responses."""

    def __init__(self) -> None:
        self.spans: list[SpanSeen] = []
        self.headers: list[dict[str, str]] = []
        self.requests, self.port, self.status, self.hangs = 0, 0, 200, threading.Event()
        self.ends = threading.Event()

    def take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        """Decode a request."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        assert path == "/v1/traces" and headers["content-type"] == "application/x-protobuf"
        request = ExportTraceServiceRequest()
        request.ParseFromString(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
        self.headers.append(headers)
        for resource in request.resource_spans:
            own = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
            self.spans += [SpanSeen(span, own) for scope in resource.scope_spans for span in scope.spans]

    def named(self, name: str) -> list[SpanSeen]:
        """Return the spans of that name."""
        return [span for span in self.spans if span.name == name]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """Start a receiver, and have OpenTelemetry's variables name it."""
    for variable in OTEL.values():
        monkeypatch.delenv(variable, raising=False)
    receiver = Collector()

    class Page(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.requests += 1
            if receiver.hangs.is_set():
                receiver.ends.wait(60)
                return
            if receiver.status == 200:
                receiver.take(self.path, {name.lower(): text for name, text in self.headers.items()}, body)
            with contextlib.suppress(OSError):
                self.send_response(receiver.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        receiver.port = server.server_address[1]
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{receiver.port}")
        yield receiver
        receiver.ends.set()
        server.shutdown()


def stages(number: int, begin: float = 10.0, rank: int = 0) -> list[dict[str, Any]]:
    """Return the events of a save's stages, each two seconds."""
    return [
        {"event": "save.span", "span": part, "id": id_of(number), "step": 100, "rank": rank, "start": begin + 2 * place,
         "end": begin + 2 * place + 2, "time": time.time()}
        for place, part in enumerate(("blocked", "write", "parts", "commit"))
    ]  # fmt: skip


def started(events: Path, **more: Any) -> TraceExport:
    """Start the thread, with short waits."""
    more.setdefault("of_process", None)
    return TraceExport(exporter_for(), events=events, poll_s=0.05, settle_s=0.3, **more)


def test_saves_restores_tiers_and_incidents_arrive(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a span with its ids, times and attributes. A copy that ends later joins the save's trace. Variables are followed."""
    monkeypatch.setenv("OTEL_SERVICE_NAME", "trainer")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test,team=llm%20base,wrong")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=hunter2")
    events, url = tmp_path / "events", str(tmp_path / "runs")
    keep_events(events, url, {"event": "save.durable", "id": "before", "time": time.time() - 60}, *[
        {**event, "id": "before", "time": time.time() - 60} for event in stages(0)
    ])  # fmt: skip
    traces = started(events)
    now = time.time()
    restored = {"event": "restore.done", "step": 100, "id": id_of(0), "bytes": 5, "seconds": 1.5, "source": "memory"}
    keep_events(events, url, {**restored, "time": now + 1})
    keep_events(events, url, *stages(0))
    keep_events(
        events, url, {"event": "run.failure", "kind": "hang", "step": 120, "rank": 1, "incident": "i1", "time": now + 2},
        {"event": "run.decision", "action": "restart", "time": now + 2},
        {"event": "run.recovered", "incident": "i1", "steps_lost": 20, "seconds": 9.0, "time": now + 11},
        {"event": "run.failure", "kind": "memory", "step": 140, "rank": None, "incident": "i2", "time": now + 12},
        {"event": "run.decision", "action": "stop", "time": now + 12},
        name="2", role="supervisor",
    )  # fmt: skip
    until(lambda: collector.named("save"), 20)
    drained = {"event": "drain.done", "id": id_of(0), "step": 100, "tier": "cold", "seconds": 3.0, "bytes": 5}
    keep_events(events, url, {**drained, "time": time.time()})
    until(lambda: collector.named("drain"))
    traces.close()
    (save,) = collector.named("save")
    children = [span for span in collector.spans if span.parent]
    assert {span.name for span in children} == {"blocked", "write", "parts", "commit", "drain"}
    assert all(span.parent == save.id and span.trace == save.trace for span in children)
    assert save.seconds == pytest.approx(8.0) and save.good
    assert save.about == {"run": RUN, "store": url, "checkpoint": id_of(0), "step": 100, "slowest_rank": 0}
    (drain,) = collector.named("drain")
    assert drain.seconds == pytest.approx(3.0) and drain.about["tier"] == "cold" and drain.good
    (restore,) = collector.named("restore")
    assert restore.seconds == pytest.approx(1.5) and restore.links == [save.id] and restore.trace != save.trace
    assert restore.about["source"] == "memory" and restore.about["rank"] == 0
    recovered, stopped = sorted(collector.named("incident"), key=lambda span: -span.seconds)
    assert recovered.good and recovered.seconds == pytest.approx(9.0)
    assert (recovered.about["kind"], recovered.about["action"], recovered.about["steps_lost"]) == (
        "hang",
        "restart",
        20,
    )
    assert not stopped.good and stopped.seconds == 0.0 and stopped.about["action"] == "stop"
    assert len({span.id for span in collector.spans}) == len(collector.spans) == traces.sent and traces.dropped == 0
    assert {span.resource["service.name"] for span in collector.spans} == {"trainer"}
    assert save.resource["team"] == "llm base" and save.resource["deployment.environment"] == "test"
    assert {headers["x-token"] for headers in collector.headers} == {"hunter2"}


def test_each_node_sends_its_own_spans_of_one_trace(tmp_path: Path, collector: Collector) -> None:
    """Two nodes send one save: only the node of rank 0 sends the root, and no span is sent twice."""
    url = str(tmp_path / "runs")
    for rank in (0, 1):
        traces = started(tmp_path / f"events{rank}")
        keep_events(tmp_path / f"events{rank}", url, *stages(0, rank=rank), rank=rank, host=f"node{rank}")
        until(lambda rank=rank: [span for span in collector.named("commit") if span.about["rank"] == rank])
        traces.close()
    assert len(collector.named("save")) == 1 and len(collector.spans) == 9
    assert len({span.trace for span in collector.spans}) == 1 and len({span.id for span in collector.spans}) == 9


def test_only_runs_of_this_job_are_sent(tmp_path: Path, collector: Collector) -> None:
    """Events of another job on the machine are not sent. Those before the run of this job is known are sent once it is."""
    events, url = tmp_path / "events", str(tmp_path / "runs")
    traces = started(events, of_process=os.getpid())
    keep_events(events, url, *stages(0), name="1", run="other")
    keep_events(events, url, *stages(1), name="2", run="mine")
    time.sleep(0.8)
    assert collector.spans == []
    keep_events(events, url, name="3", run="mine", role="supervisor", pid=os.getpid(), host=HOST)
    until(lambda: collector.spans)
    traces.close()
    assert {span.about["run"] for span in collector.spans} == {"mine"}


def test_a_save_that_fails_or_never_ends_is_an_error(tmp_path: Path, collector: Collector) -> None:
    """A failed save is sent with the status ERROR, and a save under way when the job ends is sent as well."""
    events, url = tmp_path / "events", str(tmp_path / "runs")
    traces = started(events)
    keep_events(events, url, *stages(0)[:2], {"event": "save.failed", "id": id_of(0), "time": time.time()})
    until(lambda: collector.named("save"), 20)
    keep_events(events, url, *stages(1)[:1])
    time.sleep(0.7)
    assert len(collector.named("save")) == 1
    traces.close()
    assert [span.good for span in collector.named("save")] == [False, False]


@pytest.mark.parametrize("how", ["closed", "hangs", "refuses"])
def test_a_dead_receiver_costs_spans_alone(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Spans are dropped and counted, in one event. Closing does not wait for the receiver."""
    lost: list[int] = []
    undo = subscribe(lambda event: lost.append(event.fields["count"]) if event.name == "traces.lost" else None)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "2")
    if how == "closed":
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    elif how == "hangs":
        collector.hangs.set()
    else:
        collector.status = 400
    events, url = tmp_path / "events", str(tmp_path / "runs")
    traces = started(events)
    keep_events(events, url, *stages(0))
    until(lambda: traces.dropped == 5, 30)
    requests = collector.requests
    keep_events(events, url, *stages(1))
    until(lambda: traces.dropped == 10, 30)
    assert collector.requests == requests, "no try for half a minute"
    began = time.monotonic()
    traces.close()
    assert time.monotonic() - began < trace_export.CLOSE_S + 1
    undo()
    assert lost[0] == 5 and sum(lost) <= 10 and traces.sent == 0


def test_a_job_that_ends_does_not_wait_for_a_receiver_that_hangs(tmp_path: Path, collector: Collector) -> None:
    """The first request hangs at the end of the job: closing takes about a second."""
    collector.hangs.set()
    traces = started(tmp_path / "events")
    keep_events(tmp_path / "events", str(tmp_path / "runs"), *stages(0))
    until(lambda: collector.requests, 30)
    began = time.monotonic()
    traces.close()
    assert time.monotonic() - began < trace_export.CLOSE_S + 1


def test_memory_is_bounded(tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many saves that never end, only the newest wait. The others are sent incomplete."""
    monkeypatch.setattr(trace_export, "OPEN_MAX", 3)
    events, url = tmp_path / "events", str(tmp_path / "runs")
    traces = started(events)
    keep_events(events, url, *[event for number in range(8) for event in stages(number)[:1]])
    until(lambda: len(collector.named("save")) == 5)
    assert len(traces._saves) == 3
    traces.close()
    assert len(collector.named("save")) == 8


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, None),
        ({"OTEL_SDK_DISABLED": "true"}, None),
        ({"OTEL_TRACES_EXPORTER": "none"}, None),
        ({"OTEL_TRACES_EXPORTER": "console"}, None),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "grpc"),
        ({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"}, "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ({"RELIGHT_EVENTS": "0"}, "no events are stored"),
    ],
    ids=str,
)
def test_variables_that_request_no_traces(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], why: str | None
) -> None:
    """Without a receiver, or if traces are disabled, nothing starts. If a variable cannot be followed, an event gives the reason."""
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    reasons: list[str] = []
    undo = subscribe(lambda event: reasons.append(event.fields["why"]) if event.name == "traces.off" else None)
    assert start_traces(of_this_job=True) is None
    undo()
    assert [why in reason for reason in reasons] == ([True] if why else [])


def test_a_missing_library_is_named(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without OpenTelemetry the job runs, and an event names what to install."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.setenv("RELIGHT_EVENTS", "events")
    reasons: list[str] = []
    undo = subscribe(lambda event: reasons.append(event.fields["why"]) if event.name == "traces.off" else None)
    assert start_traces(of_this_job=True) is None
    undo()
    assert len(reasons) == 1 and "relight[traces]" in reasons[0]


def test_variables_that_request_traces(tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver alone, the exporter otlp alone, and the protocol that is supported start the thread."""
    monkeypatch.setenv("RELIGHT_EVENTS", str(tmp_path / "events"))
    for names in (
        {}, {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"},
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            for name, text in names.items():
                patch.setenv(name, text)
            traces = start_traces(of_this_job=False)
            assert traces is not None
            traces.close()


def test_a_real_job_sends_its_traces(tmp_path: Path, collector: Collector) -> None:
    """``relight run`` sends saves, restores and the incident of a job in which a rank is killed."""
    before = counters["traces.lost"]
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps([{"rank": 1, "step": 12, "what": "kill"}]))
    done = subprocess.run(
        [sys.executable, "-m", "relight", "run", "--nproc-per-node", "2", str(JOB), str(tmp_path / "store"), "20", str(plan),
         str(tmp_path / "out")],
        cwd=tmp_path, env={**os.environ, "RELIGHT_EVENTS": str(tmp_path / "events"), "OTEL_SERVICE_NAME": "job"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert counters["traces.lost"] == before and "traces" not in done.stderr
    saves, (incident,) = collector.named("save"), collector.named("incident")
    assert len(saves) >= 3 and all(span.about["run"] == "run" for span in collector.spans)
    assert {span.resource["relight.role"] for span in collector.spans} >= {"trainer", "agent", "save", "supervisor"}
    assert {span.about["rank"] for span in collector.named("blocked")} == {0, 1}
    assert {span.about["rank"] for span in collector.named("restore")} == {0, 1}
    assert incident.good and incident.seconds > 0 and incident.about["rank"] == 1
    roots = {span.id for span in saves}
    assert all(span.parent in roots for span in collector.spans if span.parent)
    assert len({span.id for span in collector.spans}) == len(collector.spans)
