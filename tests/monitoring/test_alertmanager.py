"""Alerts at an Alertmanager: one that checks each post against the published schema, and a real one."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shlex
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from receivers import until
from watched import RUN, make_run

from relight.comm.ports import free_port
from relight.errors import ConfigError
from relight.monitoring import RunSeen, Watcher
from relight.monitoring.alert_delivery import trial_message
from relight.monitoring.alertmanager import ENDS_AFTER_S, KEPT_S, REPEAT_S, as_posted, receiver_of
from relight.monitoring.notify import TRIES, Alarms, check_targets, send
from relight.monitoring.rules import FIRING, Alert
from relight.monitoring.settings import AlertTarget, alerting_of
from relight.observe import subscribe

DASHBOARD = "https://relight.example:8443/"


class Posts:
    """What an Alertmanager was sent. ``status``: of its next responses; ``auth``: the header that it requires."""

    def __init__(self, auth: str = "") -> None:
        self.alerts: list[list[dict[str, Any]]] = []
        self.refused: list[str] = []
        self.status, self.auth, self.port = 200, auth, 0

    @property
    def latest(self) -> dict[str, Any]:
        """Return the one alert of the latest post."""
        (alert,) = self.alerts[-1]
        return alert


def faults(path: str, body: bytes) -> list[str]:
    """Return the differences of a request from ``postableAlerts`` of the Alertmanager's OpenAPI specification, version 2."""
    if path != "/prefix/api/v2/alerts":
        return [f"path {path}"]
    alerts = json.loads(body)
    wrong = [] if isinstance(alerts, list) and alerts else ["not a list of alerts"]
    for alert in alerts:
        wrong += [name for name in alert if name not in ("labels", "annotations", "startsAt", "endsAt", "generatorURL")]
        for kind in ("labels", "annotations"):
            for name, text in alert.get(kind, {}).items():
                if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name) or not isinstance(text, str) or not text:
                    wrong.append(f"{kind} {name}={text!r}")
        wrong += [] if alert.get("labels", {}).get("alertname") else ["no alertname"]
        times = [datetime.fromisoformat(alert[name].replace("Z", "+00:00")) for name in ("startsAt", "endsAt")]
        wrong += [] if all(time.tzinfo for time in times) and times[0] <= times[1] else ["times"]
        wrong += [] if re.match(r"https?://", alert.get("generatorURL", "http://")) else ["generatorURL"]
    return wrong


@contextlib.contextmanager
def alertmanager(auth: str = "") -> Iterator[Posts]:
    """Start a server that answers as the Alertmanager does: 200, 400 with a text for what its schema does not allow."""
    posts = Posts(auth)

    class Page(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            wrong = faults(self.path, body)
            wrong += [] if self.headers["Content-Type"] == "application/json" else ["Content-Type"]
            posts.refused += wrong
            is_known = self.headers.get("Authorization", "") == posts.auth
            status = 401 if not is_known else 400 if wrong else posts.status
            if status == 200:
                posts.alerts.append(json.loads(body))
            answer = json.dumps("; ".join(wrong)).encode() if status == 400 else b""
            self.send_response(status)
            if status == 307:
                self.send_header("Location", f"http://127.0.0.1:{posts.port}/prefix/api/v2/alerts?stolen")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        posts.port = server.server_address[1]
        yield posts
        server.shutdown()
    assert posts.refused == []


@pytest.fixture
def late(tmp_path: Path) -> RunSeen:
    """Return a run with a newest checkpoint that is two hours old."""
    url = make_run(tmp_path / "runs", 1, began=int(time.time()) - 7200)
    (seen,) = Watcher([url], events=tmp_path / "events").poll(time.time())
    return seen


def fine(seen: RunSeen) -> RunSeen:
    """Return the run without the reason for its alert."""
    return seen._replace(unprotected_s=1.0)


def alarms(address: str, **more: Any) -> Alarms:
    """Return alarms with this target."""
    return Alarms(alerting_of({"to": [address], "group_s": 0, **more}, ""))


def seconds(text: str) -> float:
    """Return a time of the API in seconds since 1970."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def test_the_command_of_an_alert_is_quoted() -> None:
    """A store's path may have any character: the shell that gets the hint takes it as one argument."""
    store = "/mnt/my runs; touch x"
    alert = Alert("damaged", "critical", store, "demo", "", FIRING, "a file differs", 1.0)
    assert shlex.split(as_posted(alert, 2.0)["annotations"]["hint"]) == ["relight", "verify", f"{store}/demo"]


def test_an_alert_is_posted_repeated_and_ended(late: RunSeen) -> None:
    """A firing alert has name, run, store, severity, texts and a link. It is repeated each minute, and its end is posted once."""
    with alertmanager() as posts:
        sender, now = alarms(f"alertmanager://127.0.0.1:{posts.port}/prefix", dashboard=DASHBOARD), time.time()
        sender.update([late], now)
        alert = posts.latest
        assert alert["labels"] == {
            "alertname": "RelightNoGoodCheckpoint", "severity": "critical", "store": late.store, "run": RUN,
        }  # fmt: skip
        where = f"{late.store}/{RUN}"
        assert alert["annotations"]["summary"] == f"{where}: no good checkpoint for too long"
        assert alert["annotations"]["description"].startswith("the newest good checkpoint is step 100, 2 h")
        assert alert["annotations"]["hint"] == f"relight doctor {where}"
        assert alert["generatorURL"] == DASHBOARD
        assert seconds(alert["startsAt"]) == pytest.approx(now, abs=0.01)
        assert seconds(alert["endsAt"]) == pytest.approx(now + ENDS_AFTER_S, abs=0.01)
        for later in range(15, int(REPEAT_S), 15):
            sender.update([late], now + later)
        assert len(posts.alerts) == 1
        sender.update([late], now + REPEAT_S)
        assert len(posts.alerts) == 2 and posts.latest["startsAt"] == alert["startsAt"]
        assert posts.latest["labels"] == alert["labels"], "another label would be another alert"
        sender.update([fine(late)], now + 75)
        assert posts.latest["labels"] == alert["labels"] and posts.latest["startsAt"] == alert["startsAt"]
        assert seconds(posts.latest["endsAt"]) == pytest.approx(now + 75, abs=0.01)
        sender.update([fine(late)], now + 90)
        assert len(posts.alerts) == 3


def test_an_end_that_is_not_taken_is_posted_again(late: RunSeen) -> None:
    """While the Alertmanager fails, the end of an alert waits, for a quarter of an hour. One that fires again has no end."""
    with alertmanager() as posts:
        sender, now = alarms(f"alertmanager://127.0.0.1:{posts.port}/prefix"), time.time()
        sender.update([late], now)
        posts.status = 503
        sender.update([fine(late)], now + 15)
        sender.update([fine(late)], now + 30)
        posts.status = 200
        sender.update([fine(late)], now + 45)
        assert len(posts.alerts) == 2 and seconds(posts.latest["endsAt"]) == pytest.approx(now + 15, abs=0.01)
        sender.update([late], now + 60)
        posts.status = 503
        sender.update([fine(late)], now + 75)
        posts.status = 200
        sender.update([late], now + 90)
        sender.update([late], now + 60 + REPEAT_S)
        assert len(posts.alerts) == 4, "it never ended there, and is repeated after a minute"
        assert seconds(posts.latest["endsAt"]) == pytest.approx(now + 60 + REPEAT_S + ENDS_AFTER_S, abs=0.01)
        posts.status = 503
        sender.update([fine(late)], now + 135)
        posts.status, count = 200, len(posts.alerts)
        sender.update([fine(late)], now + 136 + KEPT_S)
        assert len(posts.alerts) == count


def test_a_restarted_process_posts_what_fires(late: RunSeen) -> None:
    """A new process with the state of the one before posts the alert at once, with the time at which it began."""
    with alertmanager() as posts:
        address, now = f"alertmanager://127.0.0.1:{posts.port}/prefix", time.time()
        first = alarms(address)
        first.update([late], now)
        began = posts.latest["startsAt"]
        Alarms(alerting_of({"to": [address]}, ""), first.state, first.ledger).update([late], now + 20)
        assert len(posts.alerts) == 2 and posts.latest["startsAt"] == began


def test_quiet_times_and_repeats_are_the_alertmanagers(late: RunSeen) -> None:
    """Quiet times do not hold alerts back: the Alertmanager mutes. The least severity does, and so does an escalation's delay."""
    with alertmanager() as posts, alertmanager() as later:
        address, now = f"alertmanager://127.0.0.1:{posts.port}/prefix", time.time()
        rules = {"no_good_checkpoint": {"severity": "warning"}}
        alarms(address, quiet=["00:00-12:00", "12:00-00:00"], rules=rules).update([late], now)
        assert len(posts.alerts) == 1
        alarms(address, min_severity="critical", rules=rules).update([late], now)
        assert len(posts.alerts) == 1
        escalating = {"escalate_to": [f"alertmanager://127.0.0.1:{later.port}/prefix"], "escalate_after_s": 100}
        sender = alarms(address, **escalating)
        sender.update([late], now)
        assert not later.alerts
        sender.update([late], now + 100)
        assert later.latest["labels"]["run"] == RUN
        sender.update([fine(late)], now + 115)
        assert seconds(later.latest["endsAt"]) == pytest.approx(now + 115, abs=0.01)


@pytest.mark.parametrize(
    ("form", "header"),
    [
        ("alertmanager://me:h%40nter2@127.0.0.1:{}/prefix", "Basic " + base64.b64encode(b"me:h@nter2").decode()),
        ("alertmanager://127.0.0.1:{}/prefix?+Authorization=Bearer%20hunter2", "Bearer hunter2"),
    ],
    ids=["basic", "token"],
)
def test_user_or_token_are_sent_and_shown_nowhere(
    late: RunSeen, form: str, header: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A password or token of the address is a header. An Alertmanager that refuses it is reported once, without it."""
    seen: list[str] = []
    undo = subscribe(lambda event: seen.append(event.to_json()))
    with alertmanager(header) as posts:
        monkeypatch.setenv("ALERTS_URL", form.format(posts.port))
        assert send(trial_message(), [AlertTarget("env:ALERTS_URL")])[0].ok
        assert posts.latest["labels"] == {"alertname": "RelightTest", "severity": "info"}
        sender = alarms("env:ALERTS_URL")
        sender.update([late], time.time())
        assert len(posts.alerts) == 2
        posts.auth = "Basic other"
        sender = alarms("env:ALERTS_URL")
        for poll in range(TRIES + 3):
            sender.update([late], time.time() + poll)
        (sent,) = send(trial_message(), [AlertTarget("env:ALERTS_URL")])
    undo()
    unsent = [line for line in seen if '"alert.unsent"' in line]
    assert len(unsent) == 1 and "HTTP status 401" in unsent[0] and "env:ALERTS_URL" in unsent[0]
    assert not sent.ok and "401" in sent.why
    assert not any(secret in "".join([*seen, str(sent)]) for secret in ("nter2", header))


def test_a_redirect_is_not_followed(late: RunSeen) -> None:
    """The token is not sent to where a redirect leads: the post fails."""
    with alertmanager("Bearer hunter2") as posts:
        posts.status = 307
        (sent,) = send(
            trial_message(),
            [AlertTarget(f"alertmanager://127.0.0.1:{posts.port}/prefix?+Authorization=Bearer%20hunter2")],
        )
    assert not sent.ok and "redirect" in sent.why and not posts.alerts


def test_an_alertmanager_that_is_down_holds_no_other_target_up(late: RunSeen) -> None:
    """With one Alertmanager closed, the other one and the next poll get their alerts."""
    with alertmanager() as posts:
        to = [f"alertmanager://127.0.0.1:{free_port()}", f"alertmanager://127.0.0.1:{posts.port}/prefix"]
        Alarms(alerting_of({"to": to}, "")).update([late], time.time())
        assert posts.latest["labels"]["run"] == RUN


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("alertmanager://host", "http://host:9093/api/v2/alerts"),
        ("alertmanagers://host", "https://host:443/api/v2/alerts"),
        ("alertmanagers://u:p@host:8443/am/", "https://host:8443/am/api/v2/alerts"),
        ("alertmanager://[::1]:9093/api/v2/alerts", "http://[::1]:9093/api/v2/alerts"),
        ("json://host", None),
    ],
)
def test_addresses(address: str, url: str | None) -> None:
    """The scheme gives protocol and port. The path of the API may be part of the address. Others are apprise's."""
    receiver = receiver_of(AlertTarget(address))
    assert (receiver and receiver.url) == url


@pytest.mark.parametrize(
    "address",
    ["alertmanager://", "alertmanager://host:x", "alertmanager://host:99999", "alertmanager://hunter2@", "alertmanager://host?token=hunter2",
     "alertmanager://host?+A=hunter2%0d%0aB:1"],
)  # fmt: skip
def test_invalid_addresses_are_refused_without_showing_them(address: str) -> None:
    """A host that is missing, an invalid port and an unknown parameter are an error, which does not contain the address."""
    with pytest.raises(ConfigError) as caught:
        check_targets([AlertTarget(address)])
    assert "alertmanager://…" in str(caught.value) and "hunter2" not in str(caught.value)


def test_a_real_alertmanager_takes_alerts_and_their_end(late: RunSeen, tmp_path: Path) -> None:
    """Debian's Alertmanager lists the alert with its labels and times, and no longer once it is over."""
    if shutil.which("prometheus-alertmanager") is None:
        pytest.skip("there is no prometheus-alertmanager: apt-get install prometheus-alertmanager")
    port = free_port()
    (tmp_path / "am.yml").write_text("route: {receiver: none}\nreceivers: [{name: none}]\n")
    with open(tmp_path / "am.log", "wb") as log:
        process = subprocess.Popen(
            ["prometheus-alertmanager", f"--config.file={tmp_path}/am.yml", f"--storage.path={tmp_path}/am",
             f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address="],
            stdout=log, stderr=log,
        )  # fmt: skip

    def listed() -> list[dict[str, Any]] | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v2/alerts", timeout=5) as answer:
                return json.load(answer)
        except OSError:
            return None

    try:
        until(lambda: listed() is not None)
        sender, now = alarms(f"alertmanager://127.0.0.1:{port}", dashboard=DASHBOARD), time.time()
        sender.update([late], now)
        (alert,) = until(listed)
        assert alert["labels"]["alertname"] == "RelightNoGoodCheckpoint" and alert["labels"]["run"] == RUN
        assert seconds(alert["endsAt"]) == pytest.approx(now + ENDS_AFTER_S, abs=1)
        assert alert["generatorURL"] == DASHBOARD and alert["status"]["state"] in ("active", "unprocessed")
        sender.update([late], now + REPEAT_S)
        assert len(until(listed)) == 1, "a repeated alert is the same alert"
        sender.update([fine(late)], time.time())
        until(lambda: listed() == [])
    finally:
        process.kill()
        process.wait()
