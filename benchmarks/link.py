"""``python -m benchmarks.link``: what share of a network link a save takes, with and without ``bytes_per_second``.

Two network namespaces stand for a node and its object store. The wire between them (a veth pair) is slowed down by tc to ``--megabits``.
The node saves to a local directory, and copies outward to the server at the other end. The bytes that its card has sent are read from the
kernel ten times a second: data, protocol headers, requests and retransmissions, all that others on the link would feel.

An object store gets parts of 8 MiB, each as fast as the link takes it: the bound holds from part to part. So the link and the bound must be
such that a part is short: 1.7 s at 40 Mbit/s, 3 ms at 25 Gbit/s.

Wants unshare, nsenter, ip and tc, and to be root or a user who may make namespaces; nothing outside of the namespaces is touched.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

APART = ("unshare", "--user", "--map-root-user", "--net")
"""Begins a command in new namespaces."""
_WIRE, _HERE, _THERE, _PORT = "wire", "10.78.0.1", "10.78.0.2", 9000
SAMPLE_S = 0.1
WAYS = ("no bound", "bounded")


def missing() -> str:
    """Return what this machine lacks for it; empty if nothing."""
    lacks = [name for name in ("unshare", "nsenter", "ip", "tc") if not shutil.which(name)]
    if lacks:
        return f"no {', '.join(lacks)} here (Debian: util-linux iproute2)"
    for module in ("moto", "boto3", "obstore"):
        with contextlib.suppress(ImportError):
            __import__(module)
            continue
        return f"no {module} here: requirements/test.txt has it"
    tried = f"ip link add {_WIRE} type veth peer name end && tc qdisc add dev {_WIRE} root tbf rate 80mbit burst 64kb latency 100ms"
    done = subprocess.run([*APART, "sh", "-c", tried], capture_output=True, text=True, check=False)
    return f"no network namespaces can be made here: {done.stderr.strip()[-200:]}" if done.returncode else ""


def measure(megabits: int, megabytes: int, share: float, ways: Sequence[str] = WAYS) -> dict[str, Any]:
    """Measure each of ``ways`` in new namespaces, which are removed afterwards."""
    numbers = [
        f"--megabits={megabits}",
        f"--megabytes={megabytes}",
        f"--share={share}",
        *(f"--way={way}" for way in ways),
    ]
    command = [*APART, sys.executable, str(Path(__file__).resolve()), "--inside", *numbers]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env={**os.environ, "RELIGHT_JOB_SECRET": "none"})
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def windows(samples: list[tuple[float, int]], window_s: float) -> list[float]:
    """Return bytes a second in each whole window, from samples of (time, bytes sent so far)."""
    counts, begun = [], samples[0]
    for time_s, sent in samples:
        if time_s - begun[0] >= window_s - SAMPLE_S / 2:
            counts.append((sent - begun[1]) / (time_s - begun[0]))
            begun = (time_s, sent)
    return counts


# -- inside ---------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _wire(megabits: int) -> Iterator[list[str]]:
    """Yield the command that enters the other namespace. The wire is limited in the direction of the store."""
    holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    try:
        ours = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{holder.pid}/ns/net") == ours:
            time.sleep(0.05)
        enter = ["nsenter", f"--net=/proc/{holder.pid}/ns/net"]
        call("ip", "link", "add", _WIRE, "type", "veth", "peer", "name", _WIRE, "netns", str(holder.pid))
        for prefix, address in (([], _HERE), (enter, _THERE)):
            for command in (
                ["addr", "add", f"{address}/24", "dev", _WIRE],
                ["link", "set", "lo", "up"],
                ["link", "set", _WIRE, "up"],
            ):
                call(*prefix, "ip", *command)
        call(
            "tc",
            "qdisc",
            "add",
            "dev",
            _WIRE,
            "root",
            "tbf",
            "rate",
            f"{megabits}mbit",
            "burst",
            "64kb",
            "latency",
            "100ms",
        )
        yield enter
    finally:
        holder.kill()
        holder.wait()


def call(*command: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _inside(megabits: int, megabytes: int, share: float, ways: Sequence[str]) -> dict[str, Any]:
    from tests.store.servers import CREDENTIALS, Server, wait_for

    import relight  # noqa: F401  imported before anything is measured

    link_s = megabits * 1e6 / 8
    with tempfile.TemporaryDirectory() as top, _wire(megabits) as enter, open(f"{top}/log", "wb") as log:
        server = subprocess.Popen(
            [*enter, sys.executable, str(Path(__file__).parents[1] / "tests/store/moto_server.py"), str(_PORT), _THERE],
            stdout=log,
            stderr=log,
            env={**os.environ, "MOTO_S3_CUSTOM_ENDPOINTS": ""},
        )
        try:
            address = f"http://{_THERE}:{_PORT}"
            wait_for(address, server, 120.0)
            given = {**CREDENTIALS, "AWS_ENDPOINT_URL": address}
            os.environ.update(given)
            rows = {
                way: _save(Path(top), Server(address, given).new_bucket(), megabytes, bound, link_s)
                for way, bound in zip(WAYS, (None, share * link_s), strict=True)
                if way in ways
            }
        finally:
            server.kill()
            server.wait()
    return {"megabits": megabits, "megabytes": megabytes, "bound": share, "ways": rows}


def _save(top: Path, bucket: str, megabytes: int, bound: float | None, link_s: float) -> dict[str, Any]:
    """Save once and copy to the store at the other end. Return the shares of the link."""
    import numpy as np

    import relight

    state = np.random.default_rng(3).integers(0, 255, megabytes * 1_000_000, dtype=np.uint8)
    tiers = relight.Tiers(near=top / bucket / "run", far=relight.tier(f"s3://{bucket}/run", bytes_per_second=bound))
    samples: list[tuple[float, int]] = []
    done = threading.Event()
    watching = threading.Thread(target=_watch, args=(samples, done))
    with relight.Checkpointer(tiers, weights=state, save=relight.every(steps=1000), background=True) as ckpt:
        ckpt.restore()
        watching.start()
        ckpt.save(0).wait(600)
    done.set()
    watching.join()
    return {"sent_bytes": samples[-1][1] - samples[0][1], "state_bytes": state.nbytes, **shares(samples, link_s)}


def shares(samples: list[tuple[float, int]], link_s: float) -> dict[str, Any]:
    """Return the shares of the link while the copy was under way: between 1 % and 99 % of all bytes."""
    first, sent = samples[0][1], samples[-1][1] - samples[0][1]
    during = [(time_s, count) for time_s, count in samples if 0.01 * sent <= count - first <= 0.99 * sent]
    each = [round(sent_bytes / link_s, 4) for sent_bytes in windows(samples, 1.0)]
    copy_s, moved = during[-1][0] - during[0][0], during[-1][1] - during[0][1]
    return {
        "copy_s": round(copy_s, 2), "share": round(moved / max(copy_s, SAMPLE_S) / link_s, 4),
        "most_in_1_s": max(each),
        "most_in_10_s": round(max(sum(each[start : start + 10]) / 10 for start in range(max(1, len(each) - 9))), 4),
        "each_second": each,
    }  # fmt: skip


def _watch(samples: list[tuple[float, int]], done: threading.Event) -> None:
    """Sample the bytes that the card has sent, as the kernel counts them."""
    path = Path(f"/sys/class/net/{_WIRE}/statistics/tx_bytes")
    read = path.read_text if path.exists() else _by_proc
    while not done.wait(SAMPLE_S):
        samples.append((time.monotonic(), int(read())))


def _by_proc() -> str:
    """Return the same count, for kernels with another namespace's cards in /sys."""
    line = next(
        row
        for row in Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
        if row.strip().startswith(f"{_WIRE}:")
    )
    return line.partition(":")[2].split()[8]


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabits", type=int, default=40, help="a second, of the link")
    parser.add_argument("--megabytes", type=int, default=60, help="of state")
    parser.add_argument("--share", type=float, default=0.2, help="of the link, that bytes_per_second allows")
    parser.add_argument("--way", action="append", choices=WAYS, help="only this one")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(_inside(options.megabits, options.megabytes, options.share, options.way or WAYS)))
        return 0
    if why := missing():
        print(why, file=sys.stderr)
        return 1
    from benchmarks.machine import describe

    machine = describe(Path(tempfile.gettempdir()))
    report = {"machine": machine, **measure(options.megabits, options.megabytes, options.share, options.way or WAYS)}
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(
        f"a link of {options.megabits} Mbit/s, {options.megabytes} MB of state, bytes_per_second for {options.share:.0%} of it"
    )
    for way, row in report["ways"].items():
        print(
            f"{way:9} {row['share']:.1%} of the link for {row['copy_s']:.1f} s, at most {row['most_in_10_s']:.1%} in 10 s and"
            f" {row['most_in_1_s']:.1%} in 1 s; {row['sent_bytes'] / row['state_bytes']:.3f} bytes sent for each byte of state"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
