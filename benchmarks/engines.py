"""``python -m benchmarks.engines``: heavy commands by 1, 4 and 16 workers of a Ray cluster, on a store with slow connections.

A web server sends each response at ``--megabytes-s`` at most, as a busy object store does. So a worker waits for the network, and sixteen
fit on two cores. The cluster is started for 16 CPUs on this machine. Times are of whole commands, with their start.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

WORKERS = (1, 4, 16)
PIECE = 64 << 10


class SlowRanges(SimpleHTTPRequestHandler):
    """Files by ranges, each response at a limited rate."""

    protocol_version = "HTTP/1.1"
    bytes_per_second = 1e6

    def do_GET(self) -> None:
        """Send a file or a range of it."""
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        size, asked = path.stat().st_size, re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first, last = (int(asked[1]), min(int(asked[2] or size), size - 1)) if asked else (0, size - 1)
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.send_header("Last-Modified", self.date_time_string(path.stat().st_mtime))
        self.send_header("ETag", f'"{path.stat().st_mtime_ns:x}"')
        self.end_headers()
        began, sent = time.monotonic(), 0
        with open(path, "rb") as file, contextlib.suppress(ConnectionError):
            file.seek(first)
            while sent < last + 1 - first:
                data = file.read(min(PIECE, last + 1 - first - sent))
                self.wfile.write(data)
                sent += len(data)
                time.sleep(max(0.0, sent / self.bytes_per_second - (time.monotonic() - began)))

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@contextlib.contextmanager
def served(folder: Path, megabytes_s: float) -> Iterator[str]:
    """Yield the URL of a folder's files."""
    handler = functools.partial(
        type("Limited", (SlowRanges,), {"bytes_per_second": megabytes_s * 1e6}), directory=str(folder)
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()


@contextlib.contextmanager
def cluster(cpus: int, folder: Path) -> Iterator[str]:
    """Yield the address of a Ray cluster of this machine. Its token is in ``RAY_AUTH_TOKEN``."""
    os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", secrets.token_hex(32)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray = str(Path(sys.executable).with_name("ray"))
    start = [
        ray,
        "start",
        "--head",
        f"--num-cpus={cpus}",
        f"--port={port}",
        "--include-dashboard=false",
        f"--temp-dir={folder}",
    ]
    subprocess.run(start, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        subprocess.run([ray, "stop", "--force"], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def measure(megabytes: int, megabytes_s: float, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each command by the number of workers. Every result is compared with that of one worker."""
    from tests.engines.kills import make, outcome

    times: dict[str, dict[str, list[float]]] = {
        name: {str(count): [] for count in WORKERS} for name in ("verify", "export", "cp")
    }
    with tempfile.TemporaryDirectory() as top, contextlib.ExitStack() as stack:
        folder = Path(top)
        make(folder / "store", megabytes // 2)
        url = stack.enter_context(served(folder / "store", megabytes_s))
        address = stack.enter_context(cluster(max(WORKERS), folder / "ray"))
        expected: dict[str, tuple[str, str]] = {}
        for turn in range(rounds):
            for count in WORKERS if turn % 2 else WORKERS[::-1]:
                for name in times:
                    target = folder / f"{name}-{count}-{turn}"
                    target.mkdir()
                    words = {
                        "verify": ["verify", f"{url}/run", "--json"],
                        "export": ["export", f"{url}/run", str(target / "model.safetensors"), "--all"],
                        "cp": ["cp", f"{url}/run", f"{target}/copy"],
                    }[name]
                    command = [sys.executable, "-m", "relight", *words, "--engine", "ray", "--jobs", str(count)]
                    began = time.perf_counter()
                    done = subprocess.run(
                        command, capture_output=True, text=True, check=False, env={**os.environ, "RAY_ADDRESS": address}
                    )
                    times[name][str(count)].append(round(time.perf_counter() - began, 2))
                    assert done.returncode == 0, done.stderr
                    result = outcome(name, target, done.stdout)
                    earlier, printed = expected.setdefault(name, (result, done.stdout))
                    assert earlier == result, f"{name} by {count}: {done.stdout[-2000:]}, and before: {printed[-2000:]}"
                    print(
                        f"round {turn + 1} of {rounds}: {name} by {count}: {times[name][str(count)][-1]} s",
                        file=sys.stderr,
                        flush=True,
                    )
    return times


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024, help="of the store, in two checkpoints")
    parser.add_argument("--megabytes-s", type=float, default=1.0, help="of each response")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true", dest="as_json")
    given = parser.parse_args()
    from benchmarks.machine import describe

    times = measure(given.megabytes, given.megabytes_s, given.rounds)
    report = {
        "machine": describe(Path(tempfile.gettempdir())),
        "megabytes": given.megabytes,
        "megabytes_s": given.megabytes_s,
        "seconds": times,
    }
    if given.out is not None:
        given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if given.as_json:
        print(json.dumps(report))
        return 0
    for name, by_count in times.items():
        single = statistics.median(by_count["1"])
        for count, seconds in by_count.items():
            median = statistics.median(seconds)
            print(f"{name:<7} {count:>2} workers  {median:6.1f} s  {single / median:4.1f} times as fast as one")
    return 0


if __name__ == "__main__":
    sys.exit(main())
