"""Simulated machines: network, mount, name and process namespaces of this one, joined by a bridge.

The machines share a directory. Each has its own name, address, ``/dev/shm``, abstract sockets and process numbers.
``down`` removes a machine as a power cut does: its peers get no message. ``cut`` loses what one sends to another,
silently and in that direction only: its neighbour entry names a card that does not exist.

Everything is inside one process namespace: when its first process ends, whatever the reason, nothing is left.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

_APART = ("--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_NOWHERE = "02:de:ad:00:00:01"
_NET = "10.99.0"
_INIT = """
mount -t tmpfs -o size=1g tmpfs /dev/shm && mount --bind "$2" /etc/hosts && hostname "$1" && ip link set lo up || exit 1
while :; do sleep 0.2; done
"""
"""A first process that reaps orphaned processes."""


def missing() -> str:
    """Return what this machine lacks for the lab, "" if nothing."""
    lacks = [name for name in ("unshare", "nsenter", "ip", "hostname", "mount") if not shutil.which(name)]
    if lacks:
        return f"no {', '.join(lacks)} here (Debian: util-linux iproute2 hostname)"
    tried = subprocess.run(
        ["unshare", *_APART, "ip", "link", "add", "br0", "type", "bridge"], capture_output=True, text=True, check=False
    )
    return f"no namespaces may be made here: {tried.stderr.strip()}" if tried.returncode else ""


def within(script: str, arguments: Sequence[str]) -> list[str]:
    """The command that runs a Python script in a place of its own, where ``Lab`` can be made."""
    return ["unshare", *_APART, sys.executable, script, *arguments]


def wait_until(what: Callable[[], bool], seconds: float, why: str) -> float:
    """Ask until it is so: how long that took."""
    began = time.monotonic()
    while not what():
        if time.monotonic() > began + seconds:
            raise TimeoutError(f"{why}: not within {seconds:.0f} s")
        time.sleep(0.05)
    return time.monotonic() - began


class Host:
    """A simulated machine."""

    def __init__(self, name: str, number: int, hosts: Path) -> None:
        self.name, self.number, self.address = name, number, f"{_NET}.{number}"
        self.card = f"02:00:00:00:00:{number:02x}"
        command = [
            "unshare",
            "--net",
            "--mount",
            "--uts",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            _INIT,
            "sh",
            name,
            str(hosts),
        ]
        self._outer = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._started: list[subprocess.Popen[str]] = []
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        wait_until(lambda: bool(children.read_text().split()), 5, f"{name} does not start")
        self.init = int(children.read_text().split()[0])
        wait_until(lambda: self.ask("hostname").strip() == name, 5, f"{name} has not its name")

    def enter(self, *command: str) -> list[str]:
        """Return the command that runs ``command`` on the machine."""
        return ["nsenter", "--target", str(self.init), "--net", "--mount", "--uts", "--pid", "--", *command]

    def ask(self, *command: str) -> str:
        """Run a command there and return its output."""
        return subprocess.run(self.enter(*command), capture_output=True, text=True, check=False).stdout

    def start(self, *command: str, out: IO[str], env: dict[str, str], cwd: Path) -> subprocess.Popen[str]:
        """Start a process there, without waiting for it."""
        cwd.mkdir(parents=True, exist_ok=True)
        shell = 'cd "$1" && shift && exec "$@"'  # nsenter would go to its own root
        process = subprocess.Popen(
            self.enter("sh", "-c", shell, "sh", str(cwd), *command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
        self._started.append(process)
        return process

    def down(self) -> None:
        """No process of it is left."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)
        for process in (*self._started, self._outer):
            process.wait()


class Lab:
    """A bridge, and the machines that are connected to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts: dict[str, Host] = {}
        self._count = 0
        self._names = folder / "hosts"
        self._names.write_text(
            "127.0.0.1 localhost\n" + "".join(f"{_NET}.{number} host{number}\n" for number in range(1, 60))
        )
        _call("ip", "link", "set", "lo", "up")
        _call("ip", "link", "add", "br0", "type", "bridge")
        _call("ip", "link", "set", "br0", "up")

    def host(self, number: int = 0) -> Host:
        """Start a further machine, connected to all. With a number, start that one again."""
        self._count += not number
        number = number or self._count
        host = Host(f"host{number}", number, self._names)
        port = f"port{number}"
        _call(
            "ip",
            "link",
            "add",
            port,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "address",
            host.card,
            "netns",
            str(host.init),
        )
        _call("ip", "link", "set", port, "master", "br0", "up")
        _call(*host.enter("ip", "addr", "add", f"{host.address}/24", "dev", "eth0"))
        _call(*host.enter("ip", "link", "set", "eth0", "up"))
        self.hosts[host.name] = host
        return host

    def cut(self, source: Host, target: Host) -> None:
        """Lose all that ``source`` sends to ``target``."""
        self._leads(source, target, _NOWHERE)

    def heal(self, source: Host, target: Host) -> None:
        """Deliver again what ``source`` sends to ``target``."""
        self._leads(source, target, target.card)

    def part(self, ones: Sequence[Host], others: Sequence[Host], apart: bool = True) -> None:
        """Cut both directions between the two groups, or heal them."""
        for first in ones:
            for second in others:
                for pair in ((first, second), (second, first)):
                    (self.cut if apart else self.heal)(*pair)

    def down(self, host: Host, silently: bool = True) -> None:
        """Cut the power. If not ``silently``, end all its processes: the kernel then closes their connections."""
        if silently:
            _call("ip", "link", "set", f"port{host.number}", "down")
        self.hosts.pop(host.name)
        host.down()
        # gone with its namespace, sooner or later
        subprocess.run(["ip", "link", "del", f"port{host.number}"], capture_output=True, check=False)

    def close(self) -> None:
        """End all machines and remove the bridge."""
        for host in list(self.hosts.values()):
            self.down(host)
        _call("ip", "link", "del", "br0")

    def _leads(self, source: Host, target: Host, card: str) -> None:
        _call(
            *source.enter("ip", "neigh", "replace", target.address, "lladdr", card, "dev", "eth0", "nud", "permanent")
        )


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
