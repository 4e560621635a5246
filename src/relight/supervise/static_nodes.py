"""The rendezvous of several nodes at a fixed address, ``--master-addr`` and ``--master-port``.

It has a new store for each incarnation. torch's own handler keeps one store for all incarnations, and ranks read it
without a prefix. Ranks of a new incarnation then read the addresses of dead ranks, try to connect to them, and fail.
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
    """The handler of one node. Node 0 serves the store. All nodes begin an incarnation together.

    The end of an incarnation closes its store, so none of its processes can read or write the next store. The node
    where ranks ended first requests a new incarnation from node 0. Node 0 then ends its own ranks, as a dynamic
    rendezvous does when a node waits.
    """

    def __init__(self, host: str, port: int, rank: int, nodes: int, run_id: str, timeout_s: float) -> None:
        """``timeout_s``: seconds that all nodes have to arrive."""
        self._host, self._port, self._rank, self._nodes = host, port, rank, nodes
        self._run_id, self._timeout_s = run_id, timeout_s
        self._server: TCPStore | None = None
        self._store: Store | None = None
        self._asked_at = 0.0
        self.life = ""
        """Random name of the incarnation that was joined last, the same on all nodes."""

    def get_backend(self) -> str:
        """See torch's."""
        return "static"

    @property
    def use_agent_store(self) -> bool:
        """Return True: ranks are clients of the store at ``MASTER_PORT``, rank 0 as well."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return when all nodes have arrived. Raise ``RendezvousTimeoutError`` if they do not within ``timeout_s``."""
        until = time.monotonic() + self._timeout_s
        client = self._serve(until) if self._rank == 0 else self._join(until)
        store = PrefixStore(self._run_id, client)
        return RendezvousInfo(store, self._rank, self._nodes, RendezvousStoreInfo(self._host, self._port))

    def num_nodes_waiting(self) -> int:
        """Return 1 if another node waits for a new incarnation, else 0. Reads the store once a second."""
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
            self._store = None  # node 0 has closed this incarnation's store
        with contextlib.suppress(OSError, DistError):
            _, store = self._connect(1.0)
            return int(store.check([_LIFE]) and store.get(_LIFE).decode() != self.life)
        return 0

    def is_closed(self) -> bool:
        """Return whether a node has ended the job."""
        try:
            return self._store is not None and self._store.check([_CLOSED])
        except DistError:
            return False

    def set_closed(self) -> None:
        """Report to the other nodes that the job is over."""
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
        """Close the last incarnation's store, open the next one's, and wait for the other nodes."""
        if self.is_closed():
            raise RendezvousClosedError
        self._store = self._server = None  # frees the port, and disconnects remaining processes of the last incarnation
        self._server = self._listen()
        client, self._store = self._connect(self._timeout_s)
        self.life = secrets.token_hex(8)
        self._store.set(_LIFE, self.life)
        other_nodes = [_arrived(rank) for rank in range(1, self._nodes)]
        while not self._store.check(other_nodes):
            self._wait(until)
        self._store.set(_BEGUN, "1")
        return client

    def _join(self, until: float) -> TCPStore:
        """Arrive at the store of an incarnation that has not begun.

        If the store's incarnation has begun, request a new one.
        """
        while True:
            with contextlib.suppress(OSError, DistError):  # node 0 does not serve a store yet, or has just closed it
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
        """Return a new client of the store, and a view of it for this module's own keys. ``timeout_s`` is for reads."""
        host = LOOPBACK if self._rank == 0 else self._host
        # torch would log each refusal, and try for minutes
        socket.create_connection((host, self._port), _CONNECT_S).close()
        client = TCPStore(host, self._port, None, False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
        return client, PrefixStore(_PREFIX, client)

    def _listen(self) -> TCPStore:
        until = time.monotonic() + _PORT_S
        while True:
            try:
                return served_store("", self._port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                    message = f"the nodes cannot meet at port {self._port}: {error.strerror}"
                    raise ConfigError(message, hint="give all nodes another --master-port") from None
            time.sleep(_POLL_S)


def _arrived(rank: int) -> str:
    return f"arrived/{rank}"


def served_store(address: str, port: int) -> TCPStore:
    """Return a store that this process serves at ``address``; if it is empty, at all addresses of the machine.

    Raise ``OSError`` if the port is taken.
    """
    is_dual_stack = not address and socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if is_dual_stack else socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_dual_stack:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((address, port))
        listener.listen(1024)
        bound_port = listener.getsockname()[1]
        try:
            store = TCPStore(
                LOOPBACK, bound_port, None, True, wait_for_workers=False, master_listen_fd=listener.fileno()
            )
        except NotImplementedError:  # older torch: its default server takes no socket
            store = TCPStore(
                LOOPBACK,
                bound_port,
                None,
                True,
                wait_for_workers=False,
                master_listen_fd=listener.fileno(),
                use_libuv=False,
            )
        listener.detach()  # the store's server closes it
    return store
