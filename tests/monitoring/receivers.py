"""Servers on loopback that receive mail by SMTP, webhooks and traces by OTLP; and a real Prometheus."""

from __future__ import annotations

import contextlib
import json
import socketserver
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from relight.comm.ports import free_port


@contextlib.contextmanager
def mail_server() -> Iterator[tuple[int, list[str]]]:
    """Start a mail server. Yield its port and the list of its mails."""
    mails: list[str] = []

    class Talk(socketserver.StreamRequestHandler):
        timeout = 20

        def handle(self) -> None:
            def reply(line: str) -> None:
                self.wfile.write(line.encode() + b"\r\n")

            reply("220 here")
            while line := self.rfile.readline():
                word = line.split()[0].upper() if line.split() else b""
                if word == b"DATA":
                    reply("354 send the message")
                    body = []
                    while (part := self.rfile.readline()) not in (b".\r\n", b""):
                        body.append(part.decode(errors="replace"))
                    mails.append("".join(body))
                reply("221 bye" if word == b"QUIT" else "250 ok")
                if word == b"QUIT":
                    return

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads, allow_reuse_address = True, True

    with Server(("127.0.0.1", 0), Talk) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1], mails
        server.shutdown()


@contextlib.contextmanager
def web_server(status: int = 200) -> Iterator[tuple[int, list[tuple[str, bytes]]]]:
    """Start a web server that accepts every POST. Yield its port and the list of paths and bodies."""
    taken: list[tuple[str, bytes]] = []

    class Page(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append((self.path, self.rfile.read(int(self.headers.get("Content-Length", 0)))))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1], taken
        server.shutdown()


@contextlib.contextmanager
def prometheus(where: Path, target: str, rules: Path) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """Start Prometheus, which scrapes ``target`` each second. Yield a function that sends it a query."""
    port = free_port()
    (where / "prometheus.yml").write_text(
        f"global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: ['{rules}']\n"
        f"scrape_configs: [{{job_name: relight, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    with open(where / "log", "wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={where}/prometheus.yml",
                f"--storage.tsdb.path={where}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )

    def ask(query: str) -> list[dict[str, Any]]:
        url = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.request.quote(query)}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return json.load(answer)["data"]["result"]
        except OSError:
            return []

    try:
        yield ask
    finally:
        process.kill()
        process.wait()


def until(found: Callable[[], Any], seconds: float = 90.0) -> Any:
    """Return the first true value of ``found``. Fail after ``seconds``."""
    ends = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < ends, "it did not come"
        time.sleep(0.1)
    return value
