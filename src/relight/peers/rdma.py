"""Reads other processes' memory by NIXL: the RDMA plane of peers. Control messages, and all that is not read this way,
use TCP (``peers.wire``).

A process registers memory once (``share``). Another process reads ranges of it (``pieces``). With an RDMA device the
processors of the first one take no part in that. NIXL's transport is UCX, which uses shared memory or TCP where there is
no device.

NIXL and UCX run in a process of their own (``peers.rdma_process``), which maps the same memory: UCX ends its process if
another one dies at the wrong moment, and with it an agent would lose all snapshots. So the agent and the trainer load
neither. If that process ends, transfers fail, and a new one is started, ``STARTS_MAX`` times.

Always holds: a transfer writes only to a window, and no window is used again while its transfer may still write to it.
The bytes may be wrong: the caller compares them with checksums or hashes.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import socket
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from relight.arena import SharedMapping, allocate
from relight.comm.children import child_command, child_environment
from relight.decode import msgpack_decoder
from relight.errors import NoSpace
from relight.observe.thread_start import start_thread
from relight.peers.galois import BLOCK
from relight.peers.messages import PIECE_BYTES
from relight.peers.wire import PeerLost
from relight.units import duration_text

AUTO, TCP, RDMA = "auto", "tcp", "rdma"
"""Values of ``Peers(plane=)``. The last two are also the names of the planes in events."""
PACKAGES = ("nixl-cu13", "nixl-cu12")
"""NIXL's builds, which read the memory of hosts alike. The package ``nixl`` only chooses one, and may load torch for it."""
VERSION_LEAST = (1, 5)
INSTALL = "pip install --no-deps nixl-cu12"
WINDOW_BYTES = PIECE_BYTES + 2 * BLOCK
WINDOWS_MAX = 64
STUCK_MAX = 16
"""Transfers that did not end, after which the process is started again."""
STARTS_MAX = 8
AHEAD = 2
"""Transfers in flight of one ``pieces``."""
START_S, ANSWER_S, END_S = 60.0, 60.0, 2.0
ATTEND_S = 5.0
"""Seconds for which progress is made after each request of another process: UCX needs both sides to connect, and to
transfer without an RDMA device. A reader asks again every ``ASK_S``."""
ASK_S = 2.0
_HOUR_S = 3600.0
MESSAGE_BYTES_MAX = 1 << 17
_ALIVE_EVERY_S = 0.02
_WORDS_MAX = 300
_SETTINGS = {
    "UCX_HANDLE_ERRORS": "none",  # no backtraces
    "UCX_VFS_ENABLE": "n",  # a thread and a watch of the file system
    "UCX_LOG_LEVEL": "fatal",  # events report failures
    "NIXL_LOG_LEVEL": "FATAL",
}
"""Environment of the process that loads NIXL. Variables that are set already keep their values."""


class PlaneShare(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Register the memory of the descriptor that comes with this message, to be read by others. ``window``: as a target
    of transfers instead."""

    number: int
    size: int
    window: bool


class PlaneUnshare(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Unmap memory that was shared as ``number``."""

    number: int


class PlaneRead(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Read ``length`` bytes at ``address`` of the process that described its memory, to the start of a window."""

    number: int
    description: bytes
    address: int
    length: int
    window: int


class PlaneCancel(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Cancel transfer ``number``, and disconnect from its process."""

    number: int


class PlaneAttend(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Make progress for other processes, which read shared memory, for ``seconds`` from now on."""

    seconds: float


class PlaneReply(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of request ``number``; an empty ``error`` is success. Number 0: NIXL is loaded, or why it is not."""

    number: int
    error: str = ""
    reason: str = ""
    address: int = 0
    description: bytes = b""


PlaneRequest = PlaneShare | PlaneUnshare | PlaneRead | PlaneCancel | PlaneAttend
_replies: msgspec.msgpack.Decoder[PlaneReply] = msgpack_decoder(PlaneReply)


class NoPlane(Exception):  # caught below: the peers use TCP
    """This process has no RDMA plane. ``reason`` is one of ``chosen``, ``tls``, ``device``, ``package``, ``version``,
    ``load``, ``plugin``, ``failed``."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason, self.why = reason, why


class PlaneFailed(Exception):  # caught in this package: the same bytes are read over TCP
    """A transfer failed, or its bytes are wrong."""


class _Window(NamedTuple):
    """Memory that transfers write to."""

    number: int
    memory: SharedMapping


class _Pending:
    """A request without a reply."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.reply = PlaneReply(0)


class DirectRead:
    """A transfer into a window. ``release`` it once, whatever happened."""

    def __init__(self, plane: RdmaPlane, number: int, pending: _Pending, window: _Window) -> None:
        self._plane, self._number, self._pending, self._window = plane, number, pending, window

    def wait(self, ends: float, alive: Callable[[], bool]) -> memoryview:
        """Return the window, with the bytes at its start, when the transfer is complete.

        ``PlaneFailed`` if it fails, or at ``ends`` (``time.monotonic``); ``PeerLost`` soon after ``alive`` returns False.
        """
        while not self._pending.done.wait(_ALIVE_EVERY_S):
            if time.monotonic() >= ends:
                raise PlaneFailed("the transfer did not end in time")
            if not alive():
                raise PeerLost("closed")
        if self._pending.reply.error:
            raise PlaneFailed(f"the transfer failed: {self._pending.reply.error}")
        return self._window.memory.view

    def release(self) -> None:
        """Give the window back. A window that a transfer may still write to is never used again."""
        self._plane.end(self._number, self._window, stuck=not self._pending.done.is_set())


class RdmaPlane:
    """This process's plane. Any thread. Construction starts a process that loads NIXL: half a second. ``NoPlane`` if that
    does not work."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._shared: weakref.WeakKeyDictionary[SharedMapping, tuple[int, bytes]] = weakref.WeakKeyDictionary()
        self._waiting: dict[int, _Pending] = {}
        self._windows: list[_Window] = []
        self._made = self._stuck = self._number = self._attending = 0
        self._closed = False
        self.registrations = 0
        """How often memory of this process was registered to be read by others."""
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        try:
            self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise NoPlane("load", f"no descriptor is left for the process that loads NIXL: {error}") from error
        self._errors = -1
        added = {name: value for name, value in _SETTINGS.items() if name not in os.environ}
        hello = self._waiting[0] = _Pending()
        try:
            with theirs:
                self._errors = os.memfd_create("relight-rdma", os.MFD_CLOEXEC)
                self._process = subprocess.Popen(
                    child_command("relight.peers.rdma_process", str(theirs.fileno())),
                    env=child_environment(None, **added),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._errors,
                )
            thread = threading.Thread(target=self._receive, name="relight-peers-rdma", daemon=True)
            start_thread(thread)
            self._thread = thread
        except (OSError, RuntimeError) as error:
            self.close()
            raise NoPlane("load", f"the process that loads NIXL cannot be started: {error}") from error
        if not hello.done.wait(START_S):
            self.close()
            raise NoPlane("load", f"NIXL was not loaded within {duration_text(START_S)}")
        if hello.reply.error:
            self.close()
            raise NoPlane(hello.reply.reason or "load", hello.reply.error)
        self.name = hello.reply.description.decode()

    def share(self, memory: SharedMapping) -> tuple[int, bytes]:
        """Let other processes read this memory. Return its address there, and NIXL's description of it.

        The memory is registered at the first call, and until it is unmapped. ``ValueError`` if it was released;
        ``PlaneFailed`` if it cannot be registered.
        """
        with self._lock:
            known = self._shared.get(memory)
            if known is None:
                with memory.view[:1]:  # keeps it mapped meanwhile; ValueError if it was released
                    number, reply = self._register(memory, window=False)
                    memory.before_unmap(partial(self._unshare, number))
                self.registrations += 1
                known = self._shared[memory] = (reply.address, reply.description)
        self.attend()
        return known

    def attend(self) -> None:
        """Make progress for other processes that read this one's memory, for ``ATTEND_S`` from now on."""
        with self._lock, contextlib.suppress(PlaneFailed):
            if not self._attending:
                self._send(PlaneAttend(ATTEND_S))

    @contextlib.contextmanager
    def attending(self) -> Iterator[None]:
        """Make progress for other processes until the block ends."""
        with self._lock:
            self._attending += 1
            self._send(PlaneAttend(_HOUR_S))
        try:
            yield
        finally:
            with self._lock:
                self._attending -= 1
            self.attend()

    def begin(self, description: bytes, address: int, length: int) -> DirectRead:
        """Start to read ``length`` bytes, at most ``WINDOW_BYTES``, at ``address`` of the process that described its memory."""
        with self._lock:
            window = self._windows.pop() if self._windows else self._make_window()
            number, pending = self._expect()
            try:
                self._send(PlaneRead(number, description, address, length, window.number))
            except PlaneFailed:
                self._waiting.pop(number, None)
                raise
            return DirectRead(self, number, pending, window)

    def pieces(
        self, description: bytes, address: int, length: int, ends: float, alive: Callable[[], bool]
    ) -> Generator[memoryview, None, None]:
        """Yield the bytes in pieces of ``PIECE_BYTES``, each valid until the next one. Errors: see ``DirectRead.wait``."""
        waiting: deque[tuple[DirectRead, int]] = deque()
        starts = iter(range(0, length, PIECE_BYTES))
        try:
            while True:
                while len(waiting) < AHEAD and (start := next(starts, None)) is not None:
                    size = min(PIECE_BYTES, length - start)
                    waiting.append((self.begin(description, address + start, size), size))
                if not waiting:
                    return
                yield waiting[0][0].wait(ends, alive)[: waiting[0][1]]
                waiting.popleft()[0].release()
        finally:
            for read, _ in waiting:
                read.release()

    def end(self, number: int, window: _Window, *, stuck: bool) -> None:
        """Take a window back. ``stuck``: its transfer may still write to it."""
        with self._lock:
            self._waiting.pop(number, None)
            if not stuck:
                self._windows.append(window)
                return
            self._stuck += 1
            with contextlib.suppress(PlaneFailed):
                self._send(PlaneCancel(number))

    @property
    def ended(self) -> str:
        """Return why this plane must not be used any more; empty if it works."""
        if self._closed:
            return self._end_of_process()
        return f"{STUCK_MAX} transfers did not end" if self._stuck >= STUCK_MAX else ""

    def close(self) -> None:
        """End all transfers, and the process. Memory that was shared cannot be read any more."""
        self._fail()
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join(END_S)
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
            self._process.kill()
            self._process.wait()
        with self._lock:
            self._channel.close()
            if self._errors >= 0:
                os.close(self._errors)
            self._errors = -1
            self._windows, self._stuck = [], 0
            self._shared.clear()

    def _make_window(self) -> _Window:
        if self._made >= WINDOWS_MAX:
            raise PlaneFailed(f"all {WINDOWS_MAX} windows are in use")
        try:
            memory = SharedMapping(allocate(WINDOW_BYTES, "relight-rdma"), WINDOW_BYTES, writable=True)
        except (NoSpace, OSError) as error:
            raise PlaneFailed(f"no memory for a window: {error}") from error
        memory.populate()
        self._made += 1
        return _Window(self._register(memory, window=True)[0], memory)

    def _register(self, memory: SharedMapping, *, window: bool) -> tuple[int, PlaneReply]:
        fd = memory.fd
        try:
            fds = [os.dup(fd)]
        except OSError as error:
            raise ValueError("the memory was released") from error
        number, pending = self._expect()
        try:
            if memory.fd != fd:  # it was closed meanwhile, and the number may be another file's
                raise ValueError("the memory was released")
            self._send(PlaneShare(number, memory.size, window), fds)
            if not pending.done.wait(ANSWER_S):
                raise PlaneFailed("memory was not registered in time")
        finally:
            os.close(fds[0])
            self._waiting.pop(number, None)
        if pending.reply.error:
            raise PlaneFailed(f"memory cannot be registered: {pending.reply.error}")
        return number, pending.reply

    def _unshare(self, number: int) -> None:
        with contextlib.suppress(PlaneFailed):
            self._send(PlaneUnshare(number))

    def _expect(self) -> tuple[int, _Pending]:
        with self._lock:
            self._number += 1
            number, pending = self._number, _Pending()
        self._waiting[number] = pending
        if self._closed:  # else ``_fail`` finds it
            self._waiting.pop(number, None)
            raise PlaneFailed(self._end_of_process())
        return number, pending

    def _send(self, request: PlaneRequest, fds: list[int] | None = None) -> None:
        """Send a request. A process that takes none for ``ANSWER_S`` counts as hung, and is killed."""
        data, ends = msgspec.msgpack.encode(request), time.monotonic() + ANSWER_S
        with self._lock:
            while not self._closed:
                try:
                    socket.send_fds(self._channel, [data], fds or [], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                    return
                except BlockingIOError:
                    if time.monotonic() >= ends:
                        assert self._process is not None
                        self._process.kill()
                        self._fail()
                    time.sleep(0.001)
                except OSError:
                    self._fail()
        raise PlaneFailed(self._end_of_process())

    def _receive(self) -> None:
        while True:
            try:
                data = self._channel.recv(MESSAGE_BYTES_MAX)
            except OSError:
                data = b""
            if not data:
                break
            reply = _replies.decode(data)
            pending = self._waiting.get(reply.number)
            if pending is not None:
                pending.reply = reply
                pending.done.set()
        self._fail()

    def _fail(self) -> None:
        """Let all requests fail: the process has ended. Without the lock, which a thread that waits may have."""
        self._closed = True
        for pending in list(self._waiting.values()):
            if not pending.done.is_set():
                pending.reply = PlaneReply(0, self._end_of_process())
                pending.done.set()

    def _end_of_process(self) -> str:
        """Return the last line that the process has written."""
        text = b""
        with contextlib.suppress(OSError):
            text = os.pread(self._errors, 1 << 16, 0)
        lines = text.decode(errors="replace").strip().splitlines()
        return f"the process that reads has ended{': ' + lines[-1][-_WORDS_MAX:] if lines else ''}"


class PlaneChoice:
    """Decides at the first use whether this process has an RDMA plane, and makes it. Any thread.

    ``wanted``: ``Peers(plane=)``. ``report`` is called once, with reason and text, if a plane was expected and there is
    none. ``auto`` expects one if an RDMA device and NIXL are there.
    """

    def __init__(self, wanted: str, tls: bool, report: Callable[[str, str], None]) -> None:
        self.wanted, self.tls, self._report = wanted, tls, report
        self._lock = threading.Lock()
        self._plane: RdmaPlane | None = None
        self._without: NoPlane | None = None
        self._starts = 0

    def get(self) -> RdmaPlane | None:
        """Return the plane; None if there is none: ``why`` has the reason then."""
        with self._lock:
            plane = self._plane
            if plane is not None and (why := plane.ended):
                self._report("failed", why)
                plane.close()
                self._plane = plane = None
                if self._starts >= STARTS_MAX:
                    self._without = NoPlane("failed", f"{why}, {STARTS_MAX} times")
            if plane is None and self._without is None:
                self._starts += 1
                try:
                    excluded = without_plane(self.wanted, self.tls)
                    if excluded is not None:
                        raise excluded
                    self._plane = plane = RdmaPlane()
                except NoPlane as error:
                    self._decide(error)
            return plane

    @property
    def made(self) -> RdmaPlane | None:
        """Return the plane if it was made."""
        return self._plane

    @property
    def why(self) -> str:
        """Return why there is no plane; empty if there is one."""
        self.get()
        return "" if self._without is None else self._without.why

    def shown(self) -> tuple[str, str]:
        """Return the plane's name, and why there is none, for other processes."""
        plane = self.get()
        return ("", self.why) if plane is None else (plane.name, "")

    def close(self) -> None:
        """Close the plane."""
        with self._lock:
            plane, self._plane = self._plane, None
            self._without = NoPlane("failed", "it is closed")
        if plane is not None:
            plane.close()

    def _decide(self, without: NoPlane) -> None:
        self._without = without
        if self.wanted == RDMA or without.reason in ("version", "load", "plugin", "failed"):
            self._report(without.reason, without.why)


def without_plane(wanted: str, tls: bool) -> NoPlane | None:
    """Return why RDMA is not used, as far as that is known without loading NIXL; None if it is worth loading."""
    if wanted == TCP:
        return NoPlane("chosen", 'Peers(plane="tcp") is set')
    if tls:
        return NoPlane("tls", "the peers use TLS, and RDMA is not encrypted")
    if wanted == AUTO and not devices():
        return NoPlane("device", "no RDMA device has an active port")
    return None if installed() is not None else not_installed()


def plane_here(wanted: str, tls: bool) -> tuple[str, str]:
    """Return the plane of a process of this machine, and why. Loads NIXL and makes a plane if need be."""
    try:
        excluded = without_plane(wanted, tls)
        if excluded is not None:
            raise excluded
        plane = RdmaPlane()
    except NoPlane as error:
        return TCP, error.why
    plane.close()
    return RDMA, f"{plane.name}, {', '.join(devices()) or 'without an RDMA device'}"


def devices(top: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Return the names of this machine's RDMA devices that have an active port."""
    active = set()
    for state in top.glob("*/ports/*/state"):
        with contextlib.suppress(OSError):
            if "ACTIVE" in state.read_text(encoding="ascii", errors="replace"):
                active.add(state.parts[-4])
    return sorted(active)


def installed() -> tuple[str, str] | None:
    """Return the installed package of NIXL and its version; None if there is none."""
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return package, importlib.metadata.version(package)
    return None


def not_installed() -> NoPlane:
    """Return that NIXL is missing."""
    return NoPlane("package", f"NIXL is not installed ({INSTALL})")
