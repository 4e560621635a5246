"""A network file system in earnest, without privileges on any other machine: NFS-Ganesha, and clients that are Linux kernels of their own.

The server is a process (Debian: nfs-ganesha, nfs-ganesha-vfs). Each client is a user-mode Linux (Debian: user-mode-linux), with the NFS client
of Linux in it. They meet in a network namespace made for them. So caches, silly renames, stale handles, blocked and lost calls are what
they are on real machines, and server, client machine, client process and wire can each be killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.store.nfs_guest import PORT

ROOT = Path(__file__).resolve().parents[2]
GUEST = Path(__file__).with_name("nfs_guest.py")
JOBS = Path(__file__).with_name("nfs_jobs.py")
NFS = 2049
LEASE_S = 60
"""How long a client may be silent. Less than these machines may be held up on a busy host, and they are answered by EIO now and then."""
GRACE_S = 4
"""How long a server that was killed waits after its start for clients to come back."""

CONF = """NFS_CORE_PARAM {{ NFS_Port = {port}; Protocols = 4; Enable_NLM = false; Enable_RQUOTA = false; }}
EXPORT {{ Export_Id = 1; Path = {path}; Pseudo = /x; Access_Type = RW; Squash = No_Root_Squash; SecType = sys; Protocols = 4; Transports = TCP;
  FSAL {{ Name = VFS; }} }}
LOG {{ Default_Log_Level = WARN; }}
NFSV4 {{ Only_Numeric_Owners = true; Allow_Numeric_Owners = true; RecoveryRoot = "{recovery}"; Lease_Lifetime = {lease}; Grace_Period = {grace}; }}
NFS_KRB5 {{ Active_krb5 = false; }}
"""


def missing() -> str:
    """Return what this machine lacks for the lab, "" if nothing."""
    if os.geteuid() != 0:
        return "needs root: a network namespace and a server's own mounts"
    lacks = [name for name in ("ganesha.nfsd", "linux.uml", "ip") if not shutil.which(name)]
    if lacks:
        return f"no {', '.join(lacks)} here (Debian: nfs-ganesha nfs-ganesha-vfs user-mode-linux iproute2)"
    if not os.path.exists("/dev/net/tun"):
        return "no /dev/net/tun here: client machines cannot be connected"
    return ""


def wait_until(what: Callable[[], bool], seconds: float, why: str) -> None:
    """Ask until it is so."""
    ends = time.monotonic() + seconds
    while not what():
        if time.monotonic() > ends:
            raise TimeoutError(f"{why}: not within {seconds} s")
        time.sleep(0.05)


def _with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: if the tests are killed, their machines die too


class Network:
    """A network namespace with a link for each client machine. Nothing outside can be reached from it."""

    def __init__(self) -> None:
        self.name = f"relight-nfs-{os.getpid()}"
        self._links = 0
        for name in os.listdir("/run/netns") if os.path.isdir("/run/netns") else []:  # of runs that were killed
            pid = name.removeprefix("relight-nfs-")
            if pid != name and not os.path.exists(f"/proc/{pid}"):
                subprocess.run(["ip", "netns", "del", name], capture_output=True)
        self._call("ip", "netns", "add", self.name)
        self._call("ip", "-n", self.name, "link", "set", "lo", "up")

    def _call(self, *command: str) -> None:
        subprocess.run(command, check=True, capture_output=True)

    def link(self) -> tuple[str, str, str]:
        """A new link: its name, the server's address on it, the client's."""
        self._links += 1
        name, net = f"tap{self._links}", f"10.77.{self._links}"
        self._call("ip", "-n", self.name, "tuntap", "add", name, "mode", "tap")
        self._call("ip", "-n", self.name, "link", "set", name, "up")
        self.switch(name, True)
        return name, f"{net}.1", f"{net}.2"

    def switch(self, link: str, on: bool) -> None:
        """Plug a client machine in, or pull its plug: the server's address does not answer there.

        The link stays up: a link that goes down may stop the client's driver for good.
        """
        address = f"10.77.{link.removeprefix('tap')}.1/24"
        self._call("ip", "-n", self.name, "addr", "add" if on else "del", address, "dev", link)

    def socket(self) -> socket.socket:
        """A socket in it: a thread goes there, and it stays when the thread is gone."""

        def make() -> socket.socket:
            with open(f"/run/netns/{self.name}") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0x40000000):
                    raise OSError(ctypes.get_errno(), "setns")
            return socket.socket(socket.AF_INET, socket.SOCK_STREAM)

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(make).result()

    def within(self, *command: str) -> list[str]:
        """Return the command that runs ``command`` in the network."""
        return ["ip", "netns", "exec", self.name, *command]

    def close(self) -> None:
        """Remove the network."""
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True)


class NfsServer:
    """NFS-Ganesha, exporting ``export`` as ``/x``."""

    def __init__(self, network: Network, folder: Path) -> None:
        self._network, self.folder, self.export = network, folder, folder / "export"
        self.export.mkdir(parents=True)
        (folder / "recovery").mkdir()
        self._conf = folder / "ganesha.conf"
        self._conf.write_text(
            CONF.format(port=NFS, path=self.export, recovery=folder / "recovery", lease=LEASE_S, grace=GRACE_S)
        )
        self.starts = 0
        self._starter = ThreadPoolExecutor(1)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it and wait until it listens."""
        self.starts += 1
        command = (
            "ganesha.nfsd",
            "-F",
            "-f",
            str(self._conf),
            "-L",
            str(self.folder / "ganesha.log"),
            "-p",
            str(self.folder / "pid"),
        )
        command = tuple(self._network.within(*command))

        def go() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=_with_parent
            )

        self._process = self._starter.submit(go).result()  # PDEATHSIG acts when the thread that started it ends

        def listens() -> bool:
            with self._network.socket() as connection:
                return connection.connect_ex(("127.0.0.1", NFS)) == 0

        try:
            wait_until(listens, 30, "the server starts")
        except TimeoutError as error:
            self.kill()
            raise RuntimeError((self.folder / "ganesha.log").read_text(errors="replace")[-2000:]) from error

    def signal(self, what: signal.Signals) -> None:
        """Send a signal to the server's process."""
        assert self._process is not None
        self._process.send_signal(what)

    def kill(self) -> None:
        """SIGKILL: what it had not written is still in the host's cache, what it knew of its clients is gone."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()


class Running:
    """A command on a client machine."""

    def __init__(self, machine: Machine, connection: socket.socket) -> None:
        self._machine, self._connection = machine, connection
        self._lines = connection.makefile("rb")
        self.pid = int(self._lines.readline())
        self.code: int | None = None
        self.output: list[str] = []

    def line(self) -> str:
        """Return the next line that the command prints, "" after its end."""
        try:
            line = self._lines.readline()
        except ConnectionError:
            line = b""
        if line.startswith(b"\0") or not line:
            self.code = int(line[1:] or b"-9")
            self._lines.close()
            self._connection.close()
            return ""
        return line.decode(errors="replace").rstrip("\n")

    def send(self, *what: object) -> None:
        """Send a line to the command's input."""
        self._connection.sendall(json.dumps(what).encode() + b"\n")

    def receive(self) -> list[Any]:
        """Return the next line that is JSON. Raise ``AssertionError`` if the command ends first."""
        lines = []
        while self.code is None:
            lines.append(self.line())
            if lines[-1].startswith("["):
                return json.loads(lines[-1])
        raise AssertionError(f"it ended ({self.code}):\n" + "\n".join(lines)[-6000:])

    def ask(self, *what: object) -> list[Any]:
        """Send a line and return the answer."""
        self.send(*what)
        return self.receive()

    def end(self) -> int:
        """Close its input. Return its exit status, and add its remaining output to ``output``."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        self.output = self.rest()
        assert self.code is not None
        return self.code

    def rest(self) -> list[str]:
        """All that it still prints, until it ends."""
        lines = []
        while self.code is None:
            lines.append(self.line())
        return lines[:-1]

    def until(self, begin: str) -> str:
        """Read lines until one with that begin, and return it. Raise ``AssertionError`` if the command ends before."""
        lines = []
        while self.code is None:
            line = self.line()
            lines.append(line)
            if line.startswith(begin):
                return line
        raise AssertionError(f"it ended ({self.code}) before {begin!r}:\n" + "\n".join(lines))

    def signal(self, what: int) -> None:
        """Send a signal to the command and all that it started."""
        self._machine.ask({"pid": self.pid, "signal": what}).close()


class Machine:
    """A client machine. ``run`` runs commands on it."""

    def __init__(self, network: Network, folder: Path, *, memory: str = "1G") -> None:
        self._network = network
        self.link, self.server_address, self.address = network.link()
        folder.mkdir(parents=True)
        self._console = open(folder / "console", "wb")
        self._folder = folder
        self.mounted: set[str] = set()
        command = (
            "unshare", "--pid", "--fork", "--kill-child", "linux.uml", f"mem={memory}", "root=none", "rootfstype=hostfs", "rootflags=/", "ro", f"init={sys.executable}", "con=null",
            "con0=fd:0,fd:1", "quiet", f"uml_dir={folder}", f"vec0:transport=tap,ifname={self.link},depth=128,gro=1", "--", str(GUEST),
            self.address,
        )  # fmt: skip
        self._process = subprocess.Popen(
            network.within(*command),
            stdin=subprocess.DEVNULL,
            stdout=self._console,
            stderr=self._console,
            start_new_session=True,
            env={**os.environ, "TMPDIR": "/dev/shm"},
            preexec_fn=_with_parent,
        )
        try:
            wait_until(self._answers, 60, "a client machine starts")
        except TimeoutError as error:
            raise RuntimeError((folder / "console").read_text(errors="replace")[-2000:]) from error

    def _answers(self) -> bool:
        if self._process.poll() is not None:
            raise RuntimeError((self._folder / "console").read_text(errors="replace")[-2000:])
        with self._network.socket() as connection:
            connection.settimeout(1)
            return connection.connect_ex((self.address, PORT)) == 0

    def ask(self, request: dict[str, object]) -> socket.socket:
        """Send a request to its first process."""
        connection = self._network.socket()
        connection.settimeout(300)
        connection.connect((self.address, PORT))
        connection.sendall(json.dumps(request).encode() + b"\n")
        return connection

    def start(self, *command: str, env: dict[str, str] | None = None) -> Running:
        """Start a command there."""
        given = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "RELIGHT_BACKGROUND": "0", **(env or {})}
        return Running(self, self.ask({"argv": list(command), "env": given, "cwd": str(ROOT)}))

    def run(self, *command: str, env: dict[str, str] | None = None) -> list[str]:
        """Run a command there. Return its output, or raise ``AssertionError`` if it fails."""
        running = self.start(*command, env=env)
        lines = running.rest()
        if running.code != 0:
            raise AssertionError(f"{' '.join(command)[:300]} ended with {running.code}:\n" + "\n".join(lines)[-6000:])
        return lines

    def job(self, name: str, *arguments: object) -> Running:
        """Start one of ``nfs_jobs`` there."""
        return self.start(sys.executable, "-P", str(JOBS), name, *(str(argument) for argument in arguments))

    def mount(self, where: str, options: str = "vers=4.2,hard", *, port: int = NFS) -> str:
        """Mount the export at ``/mnt/<where>``. Return that path."""
        path = f"/mnt/{where}"
        if path in self.mounted:
            return path
        self.mounted.add(path)
        given = f"{options},nosharecache,port={port},addr={self.server_address},clientaddr={self.address}"
        self.run("mkdir", "-p", path)
        self.run("mount", "-i", "-t", "nfs4", "-o", given, f"{self.server_address}:/x", path)
        return path

    def unmount(self, where: str) -> None:
        """Unmount it, even if processes use it."""
        self.mounted.discard(f"/mnt/{where}")
        self.run("umount", "-f", "-l", f"/mnt/{where}")

    def kill(self) -> None:
        """Kill the machine as a power cut does: data that its kernel had not sent is lost."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._console.close()


class Wire:
    """A proxy between a client and the server that can withhold the reply to a creation by ``link``."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._listening = network.socket()
        self._listening.bind(("0.0.0.0", 0))
        self._listening.listen()
        self.port: int = self._listening.getsockname()[1]
        self._open: list[socket.socket] = []
        self._wanted = b""
        self.caught = threading.Event()
        self._going = True
        threading.Thread(target=self._accept, daemon=True).start()

    def catch(self, name: str) -> None:
        """Withhold all replies from the next request on that links something to ``name``, until ``release``."""
        text = name.encode()
        # NFSv4's operation 11 is LINK; what follows is its one argument
        self._wanted = struct.pack(">II", 11, len(text)) + text
        self.caught.clear()

    def release(self) -> None:
        """Break what is open, and let everything through again."""
        self._wanted = b""
        self.caught.clear()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def _accept(self) -> None:
        while self._going:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            server = self._network.socket()
            if server.connect_ex(("127.0.0.1", NFS)):
                server.close()
                client.close()
                continue
            self._open += [client, server]
            for source, sink, watched in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pass, args=(source, sink, watched), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, watched: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                if watched and self._wanted and self._wanted in data:
                    self.caught.set()
                if not watched and self.caught.is_set():
                    continue
                sink.sendall(data)
        for connection in (source, sink):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Accept no more connections, and release a withheld reply."""
        self._going = False
        self.release()
        self._listening.close()


class Lab:
    """A network, a server on it, and client machines."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.network = Network()
        self.machines: list[Machine] = []
        self._made = 0
        try:
            self.server = NfsServer(self.network, folder / "server")
        except BaseException:
            self.network.close()
            raise

    def machine(self) -> Machine:
        """Start one more client machine."""
        self._made += 1
        self.machines.append(Machine(self.network, self._folder / f"client{self._made}"))
        return self.machines[-1]

    def close(self) -> None:
        """End all machines and the server."""
        for machine in self.machines:
            machine.kill()
        with contextlib.suppress(ProcessLookupError):
            self.server.kill()
        self.network.close()


@contextlib.contextmanager
def lab(folder: Path) -> Iterator[Lab]:
    """Yield a lab with a server and no client machine yet."""
    made = Lab(folder)
    try:
        yield made
    finally:
        made.close()
