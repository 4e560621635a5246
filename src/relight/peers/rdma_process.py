"""``python -m relight.peers.rdma_process DESCRIPTOR``: transfers by NIXL, for the process that starts it (``peers.rdma``).

Requests and replies are messages on a socket. Each is taken and answered by one thread, which also makes the progress
of all transfers: NIXL's own progress thread takes a whole processor, so it is off. Without transfers this process
sleeps. It ends with its socket.
"""

from __future__ import annotations

import importlib
import os
import resource
import secrets
import select
import signal
import socket
import sys
import threading
import time
from typing import Any, NamedTuple

import msgspec

from relight.arena import SharedMapping
from relight.decode import msgpack_decoder
from relight.peers.rdma import (
    END_S,
    MESSAGE_BYTES_MAX,
    VERSION_LEAST,
    NoPlane,
    PlaneAttend,
    PlaneCancel,
    PlaneRead,
    PlaneReply,
    PlaneRequest,
    PlaneShare,
    PlaneUnshare,
    installed,
    not_installed,
)

POLL_S, ATTEND_POLL_S = 0.00003, 0.0002
REMOTES_MAX = 256


class _Registered(NamedTuple):
    """Registered memory."""

    memory: SharedMapping
    address: int
    description: Any


class _Transfer(NamedTuple):
    """A transfer in progress."""

    handle: Any
    remote: str


class _PlaneProcess:
    """The loop of this process."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._decoder = msgpack_decoder(PlaneRequest)
        api, self.name = _load()
        self._errors: tuple[type[Exception], ...] = _error_types(api)
        self._agent = _make_agent(api, self._errors)
        self._memory: dict[int, _Registered] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._remotes: dict[bytes, str] = {}
        self._attend_until = 0.0

    def run(self) -> None:
        """Answer requests until the other process ends."""
        self._reply(PlaneReply(0, description=self.name.encode()))
        while True:
            attending = time.monotonic() < self._attend_until
            pause = POLL_S if self._transfers else ATTEND_POLL_S if attending else None
            if select.select([self._channel], [], [], pause)[0] and not self._take():
                return
            if self._transfers:
                for number in list(self._transfers):
                    self._check(number)
            elif attending:
                self._agent.get_new_notifs()

    def close(self) -> None:
        """Disconnect, so that the other processes need no timeout to see it."""
        for remote in set(self._remotes.values()):
            self._forget(remote)
        self._agent = None

    def _take(self) -> bool:
        """Execute one request. Return False if there is none any more."""
        data, fds, _, _ = socket.recv_fds(self._channel, MESSAGE_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return False
        request = self._decoder.decode(data)
        if isinstance(request, PlaneShare):
            self._share(request, fds[0])
        elif isinstance(request, PlaneUnshare):
            self._unshare(request.number)
        elif isinstance(request, PlaneRead):
            self._read(request)
        elif isinstance(request, PlaneCancel):
            transfer = self._transfers.pop(request.number, None)
            if transfer is not None:
                self._release(transfer)
                self._forget(transfer.remote)
        else:
            assert isinstance(request, PlaneAttend)
            self._attend_until = time.monotonic() + request.seconds
        return True

    def _share(self, request: PlaneShare, fd: int) -> None:
        """Map and register memory: for reading only where the device permits it, so that no other process can write to it."""
        error = ""
        for writable in (True,) if request.window else (False, True):
            try:
                memory = SharedMapping(os.dup(fd), request.size, writable=writable)
                memory.populate()
                registered = self._agent.register_memory([(memory.address, request.size, 0, "")], "DRAM")
                description = self._agent.get_partial_agent_metadata(registered, True, ["UCX"])
            except self._errors as raised:
                error = _text(raised)
                continue
            self._memory[request.number] = _Registered(memory, memory.address, registered)
            self._reply(PlaneReply(request.number, address=memory.address, description=bytes(description)))
            break
        else:
            self._reply(PlaneReply(request.number, error))
        os.close(fd)

    def _unshare(self, number: int) -> None:
        known = self._memory.pop(number, None)
        if known is not None:
            try:
                self._agent.deregister_memory(known.description)
            except self._errors:
                pass
            known.memory.close()

    def _read(self, request: PlaneRead) -> None:
        window = self._memory[request.window]
        try:
            remote = self._remote(request.description)
            target = self._agent.get_xfer_descs([(window.address, request.length, 0)], "DRAM")
            source = self._agent.get_xfer_descs([(request.address, request.length, 0)], "DRAM")
            transfer = _Transfer(self._agent.initialize_xfer("READ", target, source, remote), remote)
        except self._errors as error:
            self._reply(PlaneReply(request.number, _text(error)))
            return
        self._transfers[request.number] = transfer
        try:
            self._settle(request.number, self._agent.transfer(transfer.handle))
        except self._errors as error:
            self._settle(request.number, _text(error))

    def _check(self, number: int) -> None:
        try:
            self._settle(number, self._agent.check_xfer_state(self._transfers[number].handle))
        except self._errors as error:
            self._settle(number, _text(error))

    def _settle(self, number: int, state: str) -> None:
        """Answer a transfer that has ended. After an error, the next transfer connects again."""
        if state == "PROC":
            return
        transfer = self._transfers.pop(number)
        self._release(transfer)
        if state != "DONE":
            self._forget(transfer.remote)
        self._reply(PlaneReply(number, "" if state == "DONE" else state))

    def _release(self, transfer: _Transfer) -> None:
        try:
            self._agent.release_xfer_handle(transfer.handle)
        except self._errors:
            pass

    def _remote(self, description: bytes) -> str:
        """Return NIXL's name for the process that described its memory."""
        known = self._remotes.get(description)
        if known is None:
            while len(self._remotes) >= REMOTES_MAX:
                self._forget(next(iter(self._remotes.values())))
            name = self._agent.add_remote_agent(description)
            known = self._remotes[description] = name.decode() if isinstance(name, bytes) else str(name)
        return known

    def _forget(self, remote: str) -> None:
        self._remotes = {known: name for known, name in self._remotes.items() if name != remote}
        try:
            self._agent.remove_remote_agent(remote)
        except self._errors:
            pass

    def _reply(self, reply: PlaneReply) -> None:
        self._channel.sendall(msgspec.msgpack.encode(reply))


def _load() -> tuple[Any, str]:
    """Return NIXL's module, and its name with the version, which both processes must have in common."""
    package, version = installed() or ("", "")
    if not package:
        raise not_installed()
    name = f"nixl {version}"
    if tuple(int(each) if each.isdecimal() else 0 for each in version.split(".")[:2]) < VERSION_LEAST:
        raise NoPlane("version", f"{name} is older than {'.'.join(map(str, VERSION_LEAST))}")
    try:
        return importlib.import_module(package.replace("-", "_") + "._api"), name
    except (ImportError, OSError, AttributeError) as error:
        raise NoPlane("load", f"{name} cannot be loaded: {error}") from error


def _make_agent(api: Any, errors: tuple[type[Exception], ...]) -> Any:
    """Return NIXL's agent with UCX."""
    try:
        agent = api.nixl_agent(
            f"relight-{secrets.token_hex(8)}", api.nixl_agent_config(enable_prog_thread=False, backends=[])
        )
        if "UCX" not in agent.get_plugin_list():
            raise NoPlane("plugin", "NIXL has no UCX plugin")
        agent.create_backend("UCX")
    except errors as error:
        raise NoPlane("plugin", f"NIXL's UCX plugin does not start: {_text(error)}") from error
    return agent


def _error_types(api: Any) -> tuple[type[Exception], ...]:
    """Return the types that NIXL raises; they have no common base."""
    own = [value for value in vars(api.nixlBind).values() if isinstance(value, type) and issubclass(value, Exception)]
    return (*own, OSError, RuntimeError, ValueError, TypeError, KeyError)


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


def _end_with(channel: socket.socket) -> None:
    """End this process some seconds after the other one, even if a library hangs."""
    poll = select.poll()
    poll.register(channel, select.POLLRDHUP)
    poll.poll()
    time.sleep(END_S)
    os._exit(1)


def main() -> int:
    """Answer requests until the socket is closed. Return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process ends this one
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the memory has weights
    channel = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with, args=(channel,), daemon=True).start()
    try:
        plane = _PlaneProcess(channel)
    except NoPlane as error:
        channel.sendall(msgspec.msgpack.encode(PlaneReply(0, error.why, error.reason)))
        return 1
    try:
        plane.run()
    except (BrokenPipeError, ConnectionResetError):
        pass
    plane.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
