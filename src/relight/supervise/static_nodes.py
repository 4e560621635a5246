"""The rendezvous of several nodes at a fixed address, ``--master-addr`` and ``--master-port``: a new store there for each life.

torch's own handler keeps one store for all lives, and ranks read it without a prefix. Ranks of a new life then find the addresses of dead
ranks, try to connect to them, and fail.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
import time
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from relight.errors import ConfigError

LOOPBACK = "127.0.0.1"
_PREFIX = "relight/nodes"
_LIFE, _BEGUN, _WANTED, _CLOSED = "life", "begun", "wanted", "closed"
_POLL_S = 0.1
_ASK_EVERY_S = 1.0
_PORT_S = 10.0
"""Seconds to wait for the port: the process that held it before may still be ending."""
_CONNECT_S = 2.0


class StaticNodes(RendezvousHandler):
    """The handler of one node. Node 0 serves the store; all nodes begin a life together.

    A life's end closes its store, so no process of that life can read or write the next one's. A node whose ranks ended first asks node 0
    for a new life; node 0 then ends its own ranks, as a dynamic rendezvous does when a node waits.
    """

    def __init__(self, host: str, port: int, rank: int, nodes: int, run_id: str, timeout_s: float) -> None:
        """``timeout_s``: how long all nodes have to arrive."""
        self._host, self._port, self._rank, self._nodes = host, port, rank, nodes
        self._run_id, self._timeout_s = run_id, timeout_s
        self._server: TCPStore | None = None
        self._store: Store | None = None
        self._asked_at = 0.0
        self.life = ""
        """Random name of the life that was joined last, the same on all nodes."""

    def get_backend(self) -> str:
        """See torch's."""
        return "static"

    @property
    def use_agent_store(self) -> bool:
        """Return True: ranks are clients of the store at ``MASTER_PORT``, rank 0 as well."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return when all nodes have arrived. ``RendezvousTimeoutError`` if they do not within ``timeout_s``."""
        until = time.monotonic() + self._timeout_s
        client = self._serve(until) if self._rank == 0 else self._join(until)
        store = PrefixStore(self._run_id, client)
        return RendezvousInfo(store, self._rank, self._nodes, RendezvousStoreInfo(self._host, self._port))

    def num_nodes_waiting(self) -> int:
        """Return 1 if another node waits for a new life, else 0. Asks once a second."""
        now = time.monotonic()
        if now - self._asked_at < _ASK_EVERY_S:
            return 0
        self._asked_at = now
        if self._rank == 0:
            return int(self._store is not None and self._store.check([_WANTED]))
        try:
            if self._store is not None and self._store.check([_BEGUN]):
                return 0
        except DistError:
            self._store = None  # node 0 has closed this life's store
        with contextlib.suppress(OSError, DistError):
            _, found = self._connect(1.0)
            return int(found.check([_LIFE]) and found.get(_LIFE).decode() != self.life)
        return 0

    def is_closed(self) -> bool:
        """Return whether a node has ended the job."""
        try:
            return self._store is not None and self._store.check([_CLOSED])
        except DistError:
            return False

    def set_closed(self) -> None:
        """Let the other nodes know that the job is over."""
        with contextlib.suppress(DistError):
            if self._store is not None:
                self._store.set(_CLOSED, "1")

    def get_run_id(self) -> str:
        """See torch's."""
        return self._run_id

    def shutdown(self) -> bool:
        """See torch's."""
        self.set_closed()
        return True

    # -- inside

    def _serve(self, until: float) -> TCPStore:
        """Close the last life's store, open the next one's, and wait for the other nodes."""
        if self.is_closed():
            raise RendezvousClosedError
        self._store = self._server = None  # frees the port, and cuts off what is left of the life before
        self._server = self._listen()
        client, self._store = self._connect(self._timeout_s)
        self.life = secrets.token_hex(8)
        self._store.set(_LIFE, self.life)
        others = [_arrived(rank) for rank in range(1, self._nodes)]
        while not self._store.check(others):
            self._wait(until)
        self._store.set(_BEGUN, "1")
        return client

    def _join(self, until: float) -> TCPStore:
        """Arrive at a store whose life has not begun yet. Ask for one if the store is that of a life which has."""
        while True:
            with contextlib.suppress(OSError, DistError):  # node 0 is not there yet, or has just closed that store
                client, self._store = self._connect(self._timeout_s)
                if self._store.check([_BEGUN]):
                    self._store.set(_WANTED, "1")
                    self._wait(until)
                    self._store = None  # a new connection each time: torch logs a stack for each that node 0 closes
                    time.sleep(_POLL_S)
                elif self._store.check([_LIFE]):
                    self.life = self._store.get(_LIFE).decode()
                    self._store.set(_arrived(self._rank), "1")
                    while not self._store.check([_BEGUN]):
                        self._wait(until)
                    return client
            self._wait(until)

    def _wait(self, until: float) -> None:
        if self.is_closed():
            raise RendezvousClosedError
        if time.monotonic() > until:
            raise RendezvousTimeoutError
        time.sleep(_POLL_S)

    def _connect(self, timeout_s: float) -> tuple[TCPStore, Store]:
        """Return a new client, and its part for this file's own keys. ``timeout_s`` is for what is read there."""
        host = LOOPBACK if self._rank == 0 else self._host
        socket.create_connection((host, self._port), _CONNECT_S).close()  # torch would log each refusal, and try for minutes
        client = TCPStore(host, self._port, None, False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
        return client, PrefixStore(_PREFIX, client)

    def _listen(self) -> TCPStore:
        until = time.monotonic() + _PORT_S
        while True:
            try:
                return served_store("", self._port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                    what = f"the nodes cannot meet at port {self._port}: {error.strerror}"
                    raise ConfigError(what, hint="give all nodes another --master-port") from None
            time.sleep(_POLL_S)


def _arrived(rank: int) -> str:
    return f"arrived/{rank}"


def served_store(address: str, port: int) -> TCPStore:
    """Return a store that this process serves at that address; empty: at all of the machine's. ``OSError`` if the port is taken."""
    both = not address and socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if both else socket.AF_INET, socket.SOCK_STREAM) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if both:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        one.bind((address, port))
        one.listen(1024)
        found = one.getsockname()[1]
        try:
            store = TCPStore(LOOPBACK, found, None, True, wait_for_workers=False, master_listen_fd=one.fileno())
        except NotImplementedError:  # older torch: its default server takes no socket
            store = TCPStore(LOOPBACK, found, None, True, wait_for_workers=False, master_listen_fd=one.fileno(), use_libuv=False)
        one.detach()  # the store's server closes it
    return store
