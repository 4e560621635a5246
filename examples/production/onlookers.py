"""Observers of training: a dashboard with roles and an audit log, Prometheus' numbers, and a receiver of alerts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from expecting import Unexpected, expect, wait_until

from relight.comm.ports import free_port

if TYPE_CHECKING:
    from job import Job

ALERTS = """[alerts]
to = ["env:ALERTS_URL"]
group_s = 1

[alerts.rules.crash_loop]
count = 1      # within an hour; three would be usual
"""


class Onlookers:
    """The observers of one job, from ``start`` to ``stop``."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.folder = job.folder / "onlookers"
        self.pages, self.numbers = free_port(), free_port()
        self.audit = str(self.folder / "audit")
        self.tokens: dict[str, str] = {}
        self.alerts: list[str] = []
        """What came where alerts go."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._receiver: ThreadingHTTPServer | None = None

    def start(self) -> None:
        """The server of pages, the one of numbers, and the one where alerts arrive."""
        self.folder.mkdir()
        (self.folder / "alerts.toml").write_text(ALERTS)
        state = str(self.folder / "serve.sqlite")
        for role in ("viewer", "operator"):
            token = json.loads(self.job.relight("token", "new", role, "--role", role, "--state", state, "--json"))
            self.tokens[role] = token["token"]
        self._receiver = _receiver(self.alerts)
        environment = {**self.job.environment, "ALERTS_URL": f"json://127.0.0.1:{self._receiver.server_address[1]}/"}
        serve = ["serve", *self.job.stores, "--listen", f"127.0.0.1:{self.pages}"]
        serve += ["--state", state, "--audit", self.audit, "--settings", str(self.folder / "alerts.toml")]
        metrics = ["metrics", self.job.hot, "--listen", f"127.0.0.1:{self.numbers}"]
        for words in (serve, metrics):
            with (self.folder / f"{words[0]}.log").open("wb") as out:
                command = [sys.executable, "-m", "relight", *words]
                self._processes.append(
                    subprocess.Popen(command, env=environment, cwd=self.folder, stdout=out, stderr=out)
                )

    def stop(self) -> None:
        """End all observers."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        if self._receiver is not None:
            self._receiver.shutdown()
            self._receiver.server_close()
            self._receiver = None

    # -- observing -------------------------------------------------------------------------------------------------------------

    def ask(self, path: str, role: str = "viewer", body: object = None) -> tuple[int, Any]:
        """The status and the answer of the dashboard's API."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.tokens[role]}", "Content-Type": "application/json"}
        try:
            with urlopen(Request(f"http://127.0.0.1:{self.pages}{path}", data, headers), timeout=20) as answer:
                return answer.status, json.loads(answer.read())
        except HTTPError as error:
            return error.code, json.loads(error.read() or b"null")
        except (URLError, TimeoutError, ConnectionError):
            return 0, None

    def number(self, name: str, **labels: str) -> float | None:
        """Return a metric's value as Prometheus would read it, None if it does not exist."""
        try:
            with urlopen(f"http://127.0.0.1:{self.numbers}/metrics", timeout=20) as answer:
                body = answer.read().decode()
        except (URLError, TimeoutError, ConnectionError):
            return None
        for line in body.splitlines():
            match = re.fullmatch(rf"{name}\{{(.*)\}} (\S+)", line)
            if match and all(f'{key}="{value}"' in match[1] for key, value in labels.items()):
                return float(match[2])
        return None

    def follow(self) -> None:
        """The dashboard and the numbers know what the store has."""
        newest = self.job.newest(self.job.hot)
        wait_until(
            lambda: (self.number("relight_checkpoint_step") or -1) >= newest, f"step {newest} among Prometheus' numbers"
        )
        wait_until(lambda: (self._seen() or -1) >= newest, f"step {newest} on the dashboard")
        expect(True, f"dashboard and Prometheus have seen the checkpoint of step {newest}")

    def _seen(self) -> int:
        status, answer = self.ask(f"/api/v1/runs/{self.job.NEAR}/{self.job.name}/checkpoints?limit=1")
        return max((row["step"] for row in answer["rows"]), default=-1) if status == 200 else -1

    def act(self) -> None:
        """Check that a viewer cannot act, and that an operator's action is in the audit log."""
        fields = {"store": self.job.NEAR, "run": self.job.name, "which": "latest", "name": "seen"}
        status, _ = self.ask("/api/v1/actions/tag", "viewer", {"fields": fields})
        expect(status == 403, "a viewer is refused a tag")
        for _ in range(5):  # "latest" may have changed when the plan is confirmed
            _, plan = self.ask("/api/v1/actions/tag", "operator", {"fields": fields})
            status, done = self.ask("/api/v1/actions/tag", "operator", {"fields": fields, "confirm": plan["digest"]})
            if status == 200:
                break
        if status != 200 or not done["ok"]:
            raise Unexpected(f"a tag by who may make one: {status} {done}")
        entries = json.loads(self.job.relight("log", "--audit", self.audit, "--json"))
        expect(
            any((entry["who"], entry["what"]) == ("operator", "tag") for entry in entries),
            "an operator's tag is in the audit log",
        )
        self.job.relight("log", "--audit", "--check", self.audit)

    def wait_for_alert(self, word: str) -> None:
        """Wait for an alert that contains ``word``."""
        wait_until(
            lambda: any(word in alert for alert in self.alerts), f"an alert of {word!r}; there came {self.alerts}"
        )
        expect(True, f"an alert came: {next(alert for alert in self.alerts if word in alert)}")


def _receiver(alerts: list[str]) -> ThreadingHTTPServer:
    """Start the server that receives alerts."""

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the name is http.server's
            alert = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            alerts.append(f"{alert.get('title', '')}: {alert.get('message', '')}".replace("\n", " "))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
