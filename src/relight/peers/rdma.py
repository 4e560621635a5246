"""Reads other processes' memory by NIXL: the RDMA plane of peers. Control messages, and all that is not read this way,
use TCP (``peers.wire``).

A process registers memory once (``share``). Another process reads ranges of it (``pieces``). With an RDMA device the
first process takes no part in that. NIXL's transport is UCX, which uses shared memory or TCP where there is no device.

Always holds: a transfer writes only to a window, and no window is used again while its transfer may still write to it.
A transfer that does not end in time keeps its window; ``STUCK_MAX`` of these end the plane. The bytes may be wrong: the
caller compares them with checksums or hashes.

NIXL's own progress thread takes a whole processor, so it is off. A reader's polls make progress. A thread of the process
that is read from polls for ``ATTEND_S`` after each ``share`` or ``attend``, because UCX needs both sides to connect.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging.config
import os
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from relight.arena import SharedMapping
from relight.peers.galois import BLOCK
from relight.peers.messages import PIECE_BYTES
from relight.peers.wire import PeerLost
from relight.store.buffers import page_buffer

AUTO, TCP, RDMA = "auto", "tcp", "rdma"
"""Values of ``Peers(plane=)``. The last two are also the names of the planes in events."""
PACKAGES = ("nixl-cu13", "nixl-cu12")
"""NIXL's builds, which read the memory of hosts alike. The package ``nixl`` only chooses one, and may load torch for it."""
VERSION_LEAST = (1, 5)
INSTALL = "pip install --no-deps nixl-cu12"
WINDOW_BYTES = PIECE_BYTES + 2 * BLOCK
WINDOWS_KEPT = 16
STUCK_MAX = 16
REMOTES_MAX = 256
AHEAD = 2
"""Transfers in flight of one ``pieces``."""
ATTEND_S = 10.0
_POLL_S, _POLL_MAX_S, _ALIVE_EVERY_S = 0.00005, 0.0005, 0.02
_SETTINGS = {
    "UCX_DEBUG_SIGNO": "0",  # UCX handles SIGHUP otherwise
    "UCX_ERROR_SIGNALS": "",
    "UCX_HANDLE_ERRORS": "none",
    "UCX_VFS_ENABLE": "n",  # a thread and a watch of the file system
    "UCX_LOG_LEVEL": "fatal",  # events report failures
    "NIXL_LOG_LEVEL": "FATAL",
}
"""Environment variables while the libraries are loaded. Those that are set already keep their values."""
_loading = threading.Lock()
os.register_at_fork(after_in_child=_loading._at_fork_reinit)  # type: ignore[attr-defined]


class NoPlane(Exception):  # caught below: the peers use TCP
    """This process has no RDMA plane. ``reason`` is one of ``chosen``, ``tls``, ``device``, ``package``, ``version``,
    ``load``, ``plugin``, ``failed``."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason, self.why = reason, why


class PlaneFailed(Exception):  # caught in this package: the same bytes are read over TCP
    """A transfer failed, or its bytes are wrong."""


class _Window(NamedTuple):
    """Registered memory that transfers write to."""

    view: memoryview
    address: int


class DirectRead:
    """A transfer into a window. ``release`` it once, whatever happened."""

    def __init__(self, plane: RdmaPlane, remote: str, handle: Any, state: str, window: _Window, length: int) -> None:
        self._plane, self._remote, self._handle, self._state = plane, remote, handle, state
        self._window, self._length = window, length

    def wait(self, ends: float, alive: Callable[[], bool]) -> memoryview:
        """Return the window, with the bytes at its start, when the transfer is complete.

        ``PlaneFailed`` if it fails, or at ``ends`` (``time.monotonic``); ``PeerLost`` soon after ``alive`` returns False.
        """
        pause, check = _POLL_S, time.monotonic() + _ALIVE_EVERY_S
        while self._state == "PROC":
            now = time.monotonic()
            if now >= ends:
                self._plane.forget(self._remote)
                raise PlaneFailed("the transfer did not end in time")
            if now >= check:
                check = now + _ALIVE_EVERY_S
                if not alive():
                    self._plane.forget(self._remote)
                    raise PeerLost("closed")
            time.sleep(pause)
            pause = min(2 * pause, _POLL_MAX_S)
            self._poll()
        if self._state != "DONE":
            self._plane.forget(self._remote)
            raise PlaneFailed(f"the transfer failed ({self._state})")
        return self._window.view

    def release(self) -> None:
        """Give the window back. A window that a transfer may still write to is never used again."""
        if self._state == "PROC":
            self._poll()
        self._plane.end(self._handle, self._window, stuck=self._state == "PROC")

    def _poll(self) -> None:
        try:
            self._state = self._plane.state(self._handle)
        except PlaneFailed as error:
            self._state = str(error)


class RdmaPlane:
    """This process's plane. Any thread. Construction loads the libraries: half a second. ``NoPlane`` if they do not work.

    Threads: UCX's own, asleep without transfers, and one that polls while another process may read.
    """

    def __init__(self) -> None:
        self._api, self.name = _load()
        self._errors: tuple[type[Exception], ...] = _error_types(self._api)
        self._lock = threading.RLock()
        self._shared: weakref.WeakKeyDictionary[SharedMapping, tuple[int, bytes]] = weakref.WeakKeyDictionary()
        self._remotes: dict[bytes, str] = {}
        self._windows: list[_Window] = []
        self._stuck: list[tuple[Any, _Window]] = []
        self.registrations = 0
        """How often memory of this process was registered to be read by others."""
        self._agent: Any = self._make_agent()
        self._attending = threading.Condition()
        self._attend_until, self._thread = 0.0, False

    def share(self, memory: SharedMapping) -> tuple[int, bytes]:
        """Let other processes read this memory. Return its address here, and NIXL's description of it.

        The memory is registered at the first call, and until it is unmapped. ``ValueError`` if it was released;
        ``PlaneFailed`` if it cannot be registered.
        """
        with self._lock:
            known = self._shared.get(memory)
            if known is None:
                with memory.view[:1]:  # keeps it mapped meanwhile; ValueError if it was released
                    agent, address = self._living(), memory.address
                    try:
                        registered = agent.register_memory([(address, memory.size, 0, "")], "DRAM")
                        described = agent.get_partial_agent_metadata(registered, True, ["UCX"])
                    except self._errors as error:
                        raise PlaneFailed(f"memory cannot be registered: {_text(error)}") from error
                    memory.before_unmap(partial(self._deregister, registered))
                self.registrations += 1
                known = self._shared[memory] = (address, bytes(described))
        self.attend()
        return known

    def attend(self) -> None:
        """Make progress for other processes that read this one's memory, for ``ATTEND_S`` from now on."""
        with self._attending:
            self._attend_until = time.monotonic() + ATTEND_S
            if not self._thread:
                self._thread = True
                threading.Thread(target=self._attend, name="relight-peers-rdma", daemon=True).start()
            self._attending.notify_all()

    def begin(self, description: bytes, address: int, length: int) -> DirectRead:
        """Start to read ``length`` bytes, at most ``WINDOW_BYTES``, at ``address`` of the process that described its memory."""
        with self._lock:
            agent, window = self._living(), self._take_window()
        try:
            remote = self._remote(description)
            here = agent.get_xfer_descs([(window.address, length, 0)], "DRAM")
            there = agent.get_xfer_descs([(address, length, 0)], "DRAM")
            handle = agent.initialize_xfer("READ", here, there, remote)
        except self._errors as error:
            with self._lock:
                self._windows.append(window)
            raise PlaneFailed(f"no transfer: {_text(error)}") from error
        try:
            state = agent.transfer(handle)
        except self._errors as error:
            state = _text(error)
        return DirectRead(self, remote, handle, state, window, length)

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

    def state(self, handle: Any) -> str:
        """Return a transfer's state: ``PROC`` while it runs, ``DONE``, ``ERR``. ``PlaneFailed`` if it was disconnected."""
        try:
            return str(self._living().check_xfer_state(handle))
        except self._errors as error:
            raise PlaneFailed(_text(error)) from error

    def end(self, handle: Any, window: _Window, *, stuck: bool) -> None:
        """Free a transfer. ``stuck``: it may still write to its window."""
        with self._lock:
            if self._agent is None:
                return
            with contextlib.suppress(*self._errors):
                self._agent.release_xfer_handle(handle)
            if stuck:
                self._stuck.append((handle, window))
            elif len(self._windows) < WINDOWS_KEPT:
                self._windows.append(window)
            else:
                with contextlib.suppress(*self._errors):
                    self._agent.deregister_memory(self._described(window))

    def forget(self, remote: str) -> None:
        """Disconnect from a process, so that the next transfer connects again."""
        with self._lock:
            self._remotes = {known: name for known, name in self._remotes.items() if name != remote}
            if self._agent is not None:
                with contextlib.suppress(*self._errors):
                    self._agent.remove_remote_agent(remote)

    @property
    def spent(self) -> bool:
        """Return whether so many transfers did not end that this plane must not be used any more."""
        return len(self._stuck) >= STUCK_MAX

    def close(self) -> None:
        """End all transfers, and free the windows. Memory that was shared cannot be read any more."""
        with self._attending:
            self._attend_until = -1.0
            self._attending.notify_all()
        with self._lock:
            # NIXL's agent ends its transfers, so the windows are freed only after it
            agent, self._agent = self._agent, None
            windows = self._windows, self._stuck
            self._windows, self._stuck, self._remotes = [], [], {}
            self._shared.clear()
        del agent, windows

    def _make_agent(self) -> Any:
        """Return NIXL's agent with UCX."""
        api = self._api
        try:
            config = api.nixl_agent_config(
                enable_prog_thread=False, backends=[], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            )
            with _settings():
                agent = api.nixl_agent(f"relight-{secrets.token_hex(8)}", config)
                if "UCX" not in agent.get_plugin_list():
                    raise NoPlane("plugin", "NIXL has no UCX plugin")
                agent.create_backend("UCX")
        except self._errors as error:
            raise NoPlane("plugin", f"NIXL's UCX plugin does not start: {_text(error)}") from error
        return agent

    def _living(self) -> Any:
        agent = self._agent
        if agent is None:
            raise PlaneFailed("the plane is closed")
        return agent

    def _take_window(self) -> _Window:
        if self._windows:
            return self._windows.pop()
        view = page_buffer(WINDOW_BYTES)
        window = _Window(view, _address(view))
        try:
            self._living().register_memory(self._described(window))
        except self._errors as error:
            raise PlaneFailed(f"memory cannot be registered: {_text(error)}") from error
        return window

    def _described(self, window: _Window) -> Any:
        return self._living().get_reg_descs([(window.address, WINDOW_BYTES, 0, "")], "DRAM")

    def _remote(self, description: bytes) -> str:
        """Return NIXL's name for the process that described its memory."""
        with self._lock:
            known = self._remotes.get(description)
            if known is None:
                while len(self._remotes) >= REMOTES_MAX:
                    self.forget(next(iter(self._remotes.values())))
                name = self._living().add_remote_agent(description)
                known = self._remotes[description] = name.decode() if isinstance(name, bytes) else str(name)
            return known

    def _deregister(self, registered: Any) -> None:
        with self._lock:
            if self._agent is not None:
                with contextlib.suppress(*self._errors):
                    self._agent.deregister_memory(registered)

    def _attend(self) -> None:
        while True:
            with self._attending:
                self._attending.wait_for(lambda: self._attend_until < 0 or time.monotonic() < self._attend_until)
                agent = self._agent
                if self._attend_until < 0 or agent is None:
                    return
            with contextlib.suppress(*self._errors):
                agent.get_new_notifs()
            del agent
            time.sleep(4 * _POLL_S)


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

    def get(self) -> RdmaPlane | None:
        """Return the plane; None if there is none: ``why`` has the reason then."""
        with self._lock:
            plane = self._plane
            if plane is not None and plane.spent:
                self._decide(NoPlane("failed", f"{STUCK_MAX} transfers did not end"))
                plane.close()
                self._plane = plane = None
            elif plane is None and self._without is None:
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
    return None if installed() is not None else NoPlane("package", f"NIXL is not installed ({INSTALL})")


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
    found = devices()
    return RDMA, f"{plane.name}, {', '.join(found) if found else 'without an RDMA device'}"


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


def _load() -> tuple[Any, str]:
    """Return NIXL's module, and its name with the version, which both processes must have in common."""
    found = installed()
    if found is None:
        raise NoPlane("package", f"NIXL is not installed ({INSTALL})")
    package, version = found
    name = f"nixl {version}"
    if tuple(int(each) if each.isdigit() else 0 for each in version.split(".")[:2]) < VERSION_LEAST:
        least = ".".join(map(str, VERSION_LEAST))
        raise NoPlane("version", f"{name} is older than {least}")
    with _loading, _settings():
        # NIXL configures logging, which closes the application's handlers, and writes to standard output
        configure, raises = logging.config.dictConfig, logging.raiseExceptions
        logging.config.dictConfig = lambda *_: None  # type: ignore[assignment]
        try:
            return importlib.import_module(package.replace("-", "_") + "._api"), name
        except (ImportError, OSError, AttributeError) as error:
            raise NoPlane("load", f"{name} cannot be loaded: {error}") from error
        finally:
            logging.config.dictConfig, logging.raiseExceptions = configure, raises


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    added = {name: value for name, value in _SETTINGS.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _error_types(api: Any) -> tuple[type[Exception], ...]:
    """Return the types that NIXL raises; they have no common base."""
    own = [
        value
        for value in vars(api.nixlBind).values()
        if isinstance(value, type) and issubclass(value, Exception) and value is not Exception
    ]
    return (*own, RuntimeError, ValueError, TypeError, KeyError)


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


def _address(view: memoryview) -> int:
    import numpy

    return int(numpy.frombuffer(view, numpy.uint8).ctypes.data)
