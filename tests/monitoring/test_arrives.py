"""Metrics, alerts and traces arrive: at a real Prometheus, by mail, at a webhook, at a receiver of traces."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from email import message_from_string
from pathlib import Path

import pytest
from receivers import mail_server, prometheus, until, web_server
from watched import RUN, id_of, keep_events, make_run

from relight.comm.ports import free_port
from relight.errors import ConfigError, StoreUnavailable
from relight.monitoring import Watcher
from relight.monitoring.alert_delivery import Message, trial_message
from relight.monitoring.exposition import Collector
from relight.monitoring.files import EventFiles
from relight.monitoring.generated import write_rules
from relight.monitoring.http import make_server, parse_address
from relight.monitoring.loop import AlertLoop
from relight.monitoring.notify import TRIES, Alarms, check_targets, send
from relight.monitoring.otlp import export
from relight.monitoring.rules import FIRING, usual_rules
from relight.monitoring.settings import Alerting, AlertTarget, alerting_of
from relight.monitoring.trace import saves_in, trace_of
from relight.observe import counters, subscribe
from relight.observe.metrics import METRICS

# apprise asks for it where it is there
pytestmark = pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")
SAVED = {"event": "save.durable", "step": 100, "id": id_of(0), "seconds": 2.0, "blocked_s": 0.004, "bytes": 2000}


@pytest.fixture
def late(tmp_path: Path) -> Watcher:
    """Return a watcher of a run with a newest checkpoint that is two hours old."""
    url = make_run(tmp_path / "runs", 1, began=int(time.time()) - 7200)
    keep_events(tmp_path / "events", url, {**SAVED, "time": time.time() - 7200})
    return Watcher([url], events=tmp_path / "events")


def test_prometheus_scrapes_it_and_its_rules_fire(tmp_path: Path, late: Watcher) -> None:
    """A real one: the numbers arrive, and the generated rule for a checkpoint that is too old fires."""
    if shutil.which("prometheus") is None:
        pytest.skip("there is no prometheus")
    rules = write_rules(tmp_path, Alerting(rules=usual_rules()))
    with make_server(Collector(late.poll), "127.0.0.1:0") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with prometheus(tmp_path, f"127.0.0.1:{server.server_address[1]}", rules) as ask:
            (series,) = until(lambda: ask("relight_checkpoint_step"))
            assert (series["metric"]["run"], series["value"][1]) == (RUN, "100")
            (quantile,) = ask("relight_save_blocked_seconds_bucket{le='0.01'}")
            assert quantile["value"][1] == "1"
            fires = until(lambda: ask('ALERTS{alertstate="firing"}'))
            assert {alert["metric"]["alertname"] for alert in fires} == {"RelightNoGoodCheckpoint"}
        server.shutdown()


def test_the_page_is_what_promtool_takes(late: Watcher) -> None:
    """``promtool check metrics`` finds no fault in names, units, types and helps."""
    if shutil.which("promtool") is None:
        pytest.skip("there is no promtool")
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=Collector(late.poll).text(), capture_output=True, check=False
    )
    assert (done.returncode, done.stderr.decode()) == (0, "")


def test_it_serves_one_page_and_refuses_invalid_addresses(late: Watcher) -> None:
    """Metrics and health are served, all else is 404. An address that is not of this machine, or is taken, is a
    ConfigError."""
    with make_server(Collector(late.poll), "127.0.0.1:0") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_address[1]}"
        assert b"relight_checkpoint_step" in urllib.request.urlopen(f"{base}/metrics", timeout=20).read()
        assert urllib.request.urlopen(f"{base}/healthz", timeout=20).read() == b"ok\n"
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"{base}/../../etc/passwd", timeout=20)
        with pytest.raises(ConfigError):
            make_server(Collector(late.poll), f"127.0.0.1:{server.server_address[1]}")
        server.shutdown()
    assert parse_address("9464") == ("127.0.0.1", 9464) and parse_address("[::1]:1") == ("::1", 1)
    for wrong in ("", "x", "127.0.0.1:x", "127.0.0.1:70000", "example.com:80", "127.0.0.1:²"):
        with pytest.raises(ConfigError):
            parse_address(wrong)


def test_many_scrapes_are_one_poll(late: Watcher) -> None:
    """Scrapes a hundred times a second poll the store once a second."""
    polls = []
    collector = Collector(lambda now: (polls.append(now), late.poll(now))[1], clock=lambda: 5.0)
    pages = {collector.text() for _ in range(20)}
    assert len(polls) == 1 and len(pages) == 1


def test_an_alert_arrives_by_mail_and_at_a_webhook(late: Watcher) -> None:
    """Both targets get an alert once, and once more when it is over. Neither text nor log has a secret."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        with mail_server() as (mail_port, mails), web_server() as (web_port, posts):
            to = [
                f"mailto://127.0.0.1:{mail_port}?from=relight@here.example&to=me@here.example&mode=insecure",
                f"json://user:hunter2@127.0.0.1:{web_port}/hook?+X-Token=hunter2",
            ]
            settings = alerting_of({"to": to, "group_s": 0}, "")
            alarms = Alarms(settings)
            alert_loop = AlertLoop(late, alarms, every_s=0.05)
            until(lambda: mails and posts)
            late_run = late.poll(time.time())[0]
            time.sleep(0.3)
            alert_loop.stop()
            assert [alert.kind for alert in alarms.alerts if alert.state == FIRING] == ["no_good_checkpoint"]
            assert (len(mails), len(posts)) == (1, 1)
            text = message_from_string(mails[0])
            assert "critical: demo: no good checkpoint" in str(text["Subject"])
            post = json.loads(posts[0][1])
            assert "the newest good checkpoint is step 100, 2 h" in post["message"]
            assert post["type"] == "failure"
            alarms.update([late_run._replace(unprotected_s=1.0)], time.time())
            until(lambda: len(mails) == 2 and len(posts) == 2)
            assert json.loads(posts[1][1])["message"].startswith("over: no good checkpoint")
            assert "hunter2" not in "".join([*mails, *(str(post) for post in posts)])
    finally:
        logging.getLogger().removeHandler(handler)
    assert any("no good checkpoint" in line for line in logged)
    assert "hunter2" not in "\n".join(logged)


def test_what_is_refused_is_retried_then_reported(late: Watcher) -> None:
    """After some polls an event names the target that did not get the alert, without the address."""
    unsent: list[str] = []
    undo = subscribe(lambda event: unsent.append(event.to_json()) if event.name == "alert.unsent" else None)
    before = counters["alert.unsent"]
    with web_server(status=500) as (port, posts):
        alarms = Alarms(alerting_of({"to": [f"json://user:hunter2@127.0.0.1:{port}/"], "group_s": 0}, ""))
        for number in range(TRIES + 2):
            alarms.update(late.poll(time.time()), time.time() + number)
    undo()
    assert len(posts) == TRIES
    assert counters["alert.unsent"] - before == 1 and "hunter2" not in unsent[0] and "json://…" in unsent[0]


def test_an_invalid_address_is_reported_without_it(caplog: pytest.LogCaptureFixture) -> None:
    """No error, result or log has the address, neither when targets are checked nor when an alert is sent."""
    caplog.set_level(logging.DEBUG)
    with pytest.raises(ConfigError) as caught:
        check_targets([AlertTarget("nosuch://hunter2")])
    assert "hunter2" not in str(caught.value) and "nosuch://…" in str(caught.value)
    (sent,) = send(trial_message(), [AlertTarget("env:NOT_THERE_AT_ALL")])
    assert not sent.ok and sent.target == "env:NOT_THERE_AT_ALL"
    (sent,) = send(Message("t", "b", "info"), [AlertTarget(f"json://127.0.0.1:{free_port()}/hunter2")])
    assert not sent.ok and "hunter2" not in str(sent)
    with pytest.raises(ConfigError):
        check_targets([AlertTarget("slack://hunter2")])
    assert "hunter2" not in caplog.text


# -- traces


def spans(rank: int, shift: float = 0.0, slow: float = 0.0) -> list[dict[str, object]]:
    """The way of one rank's save."""
    way = {
        "blocked": (10.0, 10.01), "snapshot": (10.01, 10.2), "write": (10.05, 11.0 + slow), "wait": (11.0 + slow, 11.0 + slow),
        "parts": (11.0 + slow, 11.1 + slow), "commit": (11.1 + slow, 13.0),
    }  # fmt: skip
    return [
        {
            "event": "save.span",
            "span": name,
            "id": id_of(0),
            "step": 100,
            "rank": rank,
            "start": start + shift,
            "end": end + shift,
            "time": end,
        }
        for name, (start, end) in way.items()
    ]


def four_ranks(events: Path, url: str) -> None:
    """Write events of four ranks. Ranks 0 and 1 are on one machine, 2 and 3 on another with a clock 500 s ahead.

    Rank 2 is slow, and a drain is reported twice.
    """
    for rank in range(4):
        host, shift = ("near", 0.0) if rank < 2 else ("far", 500.0)
        keep_events(
            events, url, *spans(rank, shift, 0.8 if rank == 2 else 0.1 * rank), name=f"{rank}", rank=rank, host=host
        )
    drain = {"event": "drain.done", "id": id_of(0), "tier": "cold", "seconds": 3.0, "bytes": 5, "time": 116.5}
    keep_events(events, url, drain, drain, name="0")


def test_ranks_of_two_machines_are_one_trace(tmp_path: Path) -> None:
    """Spans are aligned at the commit. The slowest rank wrote the last part, and the critical path is its stages,
    without gaps."""
    url = str(tmp_path / "runs")
    four_ranks(tmp_path / "events", url)
    (events,) = saves_in(EventFiles(tmp_path / "events").new(), url, RUN).values()
    trace = trace_of(url, RUN, id_of(0), events)
    assert trace is not None
    assert (trace.slowest, trace.hosts, trace.step, trace.committed) == (2, ("far", "near"), 100, True)
    assert [leg.part for leg in trace.path] == ["blocked", "snapshot", "write", "parts", "commit"]
    assert trace.durable_s == pytest.approx(3.0) == sum(leg.seconds for leg in trace.path)
    assert trace.path[2].seconds == pytest.approx(11.8 - 10.2)
    assert trace.slack == pytest.approx({0: 0.8, 1: 0.7, 2: 0.0, 3: 0.5})
    assert [span.seconds for span in trace.spans if span.part == "drain"] == [3.0]
    assert max(span.start for span in trace.spans) - trace.start < 10


def test_traces_arrive_at_a_receiver(tmp_path: Path) -> None:
    """By OTLP over HTTP a trace arrives as one root with a span for each part, with ranks, times and the critical
    path."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    url = str(tmp_path / "runs")
    four_ranks(tmp_path / "events", url)
    (events,) = saves_in(EventFiles(tmp_path / "events").new(), url, RUN).values()
    trace = trace_of(url, RUN, id_of(0), events)
    assert trace is not None
    with web_server() as (port, posts):
        count = export(trace, f"http://127.0.0.1:{port}/v1/traces")
    import gzip

    (path, body), request = posts[0], ExportTraceServiceRequest()
    request.ParseFromString(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
    spans = [span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans]
    assert path == "/v1/traces" and count == len(spans) == 1 + 4 * 6 + 1
    assert len({span.trace_id for span in spans}) == 1 and len({span.span_id for span in spans}) == len(spans)
    (root,) = [span for span in spans if not span.parent_span_id]
    assert root.name == "save" and all(span.parent_span_id == root.span_id for span in spans if span is not root)
    write = [
        span
        for span in spans
        if span.name == "write" and {key.key: key.value for key in span.attributes}["relight.rank"].int_value == 2
    ]
    assert (write[0].end_time_unix_nano - write[0].start_time_unix_nano) / 1e9 == pytest.approx(1.75)
    assert {key.key: key.value for key in write[0].attributes}["relight.critical"].bool_value


def test_a_receiver_that_refuses_a_trace_is_an_error(tmp_path: Path) -> None:
    """A refusal, a closed port and an invalid address are an error each, without the secret of the address."""
    url = str(tmp_path / "runs")
    keep_events(tmp_path / "events", url, *spans(0))
    (events,) = saves_in(EventFiles(tmp_path / "events").new(), url, RUN).values()
    trace = trace_of(url, RUN, id_of(0), events)
    assert trace is not None
    with web_server(status=400) as (port, _), pytest.raises(StoreUnavailable):
        export(trace, f"http://127.0.0.1:{port}/v1/traces?key=hunter2")
    for wrong in ("grpc://x", "x"):
        with pytest.raises(ConfigError):
            export(trace, wrong)


def test_every_metric_is_in_the_page(late: Watcher) -> None:
    """Each metric of a poll is printed under its name, with help and type."""
    text = Collector(late.poll).text().decode()
    seen = {sample.metric.name for sample in late.poll(time.time())[0].samples}
    assert seen and all(f"# TYPE {metric.name} {metric.kind}" in text for metric in METRICS if metric.name in seen)
