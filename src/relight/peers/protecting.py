"""Peer protection as an agent uses it: it offers its node's parts to other agents, and holds parity for theirs."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Sequence

from relight.comm.tls import TlsIdentity
from relight.errors import ConfigError
from relight.peers.direct import fallback_event
from relight.peers.holder import Holder
from relight.peers.messages import Parity
from relight.peers.parts import HeldPartFile, Parts
from relight.peers.rdma import TCP, PlaneChoice
from relight.peers.rings import Peer, PeerRing, Rings, rings
from relight.peers.sender import Sender
from relight.peers.server import Notify, PeerServer
from relight.peers.wire import PeerLost, check_token, join_address, split_address
from relight.units import size_text

ANYWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Documentation addresses (RFC 5737, RFC 3849), which no host has.

The route to one shows which of this node's addresses other nodes see.
"""
LOOPBACK = "127.0.0.1"


class PeerService:
    """One agent's peer protection. It serves from construction to ``close``, and protects once it has joined a roster.

    ``host``: the address to listen at and to publish; "" publishes the one of ``own_address``, and listens at all of this
    node's addresses of its version, IPv4 or IPv6. ``port``: 0 for a free one. ``token``: 32 bytes, the same for all agents of a
    job. ``tls``: encrypt all connections, and call no agent without a certificate. ``plane``: as in ``Peers``.
    ``memory``: most bytes for other agents' parity, None for no limit. ``notify`` is called with ``peers.…`` events, in
    other threads: name, sentence, fields. Errors: ``ConfigError``; ``StoreUnavailable`` if the port cannot be bound.
    Threads: two, one for each connection from other agents, and up to four while it sends.
    """

    def __init__(
        self,
        host: str = "",
        port: int = 0,
        *,
        token: bytes,
        memory: int | None,
        notify: Notify,
        bytes_per_second: float | None = None,
        tls: bool = False,
        plane: str = TCP,
    ) -> None:
        self._token, self._notify, self._me = check_token(token), notify, ""
        if bytes_per_second is not None and not 0 < bytes_per_second < float("inf"):
            raise ConfigError(f"bytes_per_second= must be a number above 0, not {bytes_per_second!r}")
        self._joining = threading.Lock()
        self._joined: tuple[PeerRing | None] | None = None
        self._parts = Parts()
        self._holder = Holder(memory, self._completed)
        self._identity = TlsIdentity() if tls else None
        self._plane = self._choose(plane)
        self._host = host or own_address()
        self._server = PeerServer(
            host or ("::" if ":" in self._host else ""),
            port,
            lambda: self._token,
            lambda: self._identity,
            lambda: self._me,
            self._parts,
            self._holder,
            lambda: self._plane,
            notify,
        )
        try:
            self._sender = Sender(
                lambda: self._token, lambda: self._identity is not None, lambda: self._plane, notify, bytes_per_second
            )
        except BaseException:
            self._server.close()
            raise

    @property
    def address(self) -> str:
        """Address at which other agents reach this agent, with the fingerprint of its certificate."""
        return join_address(self._host, self._server.port, self._identity)

    @property
    def refused(self) -> int:
        """Return the number of callers that were refused."""
        return self._server.refused

    @property
    def held_bytes(self) -> int:
        """Return the bytes of memory that other agents' parity takes here."""
        return self._holder.used

    def set_token(self, token: bytes) -> None:
        """Use another token from now on. Connections with the old token are closed."""
        former, self._token = self._token, check_token(token)
        if former != token:
            self._server.hang_up()

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted."""
        return self._identity is not None

    @property
    def plane(self) -> str:
        """The wanted plane."""
        return self._plane.wanted

    def use(self, tls: bool, plane: str) -> None:
        """Encrypt connections from now on, or not, and use that plane. If either changes, sending stops and connections
        are closed until the next ``join``. ``address`` differs with TLS."""
        changed = tls != (self._identity is not None)
        if changed or plane != self._plane.wanted:
            self.leave()
            if changed:
                self._identity = TlsIdentity() if tls else None
            former, self._plane = self._plane, self._choose(plane)
            self._server.hang_up()
            former.close()

    def join(self, roster: Sequence[Peer], me: str, data: int, parity: int) -> Rings:
        """Protect the agents of a roster, and be protected by them. ``me``: the id of this agent. Return the rings.

        Every agent must join the same roster; until two of them have, no data goes between them. Parts that were
        offered before are sent to the new ring. Joining the same roster again changes nothing. ``ConfigError`` if
        ``me`` is not in the roster, or if it is invalid.
        """
        planned = rings(roster, data, parity)
        if all(peer.id != me for peer in roster):
            raise ConfigError(f"agent {me!r} is not in the roster")
        with self._joining:
            former, ring = self._joined, planned.ring_of(me)
            self._me = me
            if former is None or former != (ring,):
                self._holder.join(ring, me)
                self._sender.join(ring, me, self._parts.newest())
                self._joined = (ring,)
        return planned

    def leave(self) -> None:
        """Stop sending, also parts that are being sent, until the next ``join``. Keep serving, and keep held parity."""
        with self._joining:
            self._sender.join(None, self._me, [])
            self._joined = None

    def offer(self, part: HeldPartFile) -> None:
        """Serve this part, which is committed, and send it to its holders. Returns at once."""
        self._parts.add(part)
        self._sender.offer(part)

    def withdraw(self, id: str, rank: int) -> None:
        """Stop serving that part; its parity on other agents stays.

        Call it before ``is_there`` becomes False, or not at all.
        """
        self._parts.remove(id, rank)
        self._sender.withdraw(id, rank)

    def wait(self, timeout: float) -> bool:
        """Wait until all offered parts are sent or have failed.

        Return False if that takes longer than ``timeout`` seconds.
        """
        return self._sender.wait(timeout)

    def close(self) -> None:
        """Stop, and drop the parity that is held for other agents."""
        self._sender.close()
        self._server.close()
        self._plane.close()
        self._holder.close()
        self._parts.clear()

    def _choose(self, plane: str) -> PlaneChoice:
        def report(reason: str, why: str) -> None:
            self._notify("peers.fallback", *fallback_event("", reason, why))

        return PlaneChoice(plane, self._identity is not None, report)

    def _completed(self, piece: Parity) -> None:
        where = f"checkpoint {piece.id}, lane {piece.lane}"
        text = f"{where}: parity {piece.row} of stripe {piece.stripe} is complete, {size_text(piece.length)}"
        fields = {
            "checkpoint": piece.id,
            "lane": piece.lane,
            "stripe": piece.stripe,
            "row": piece.row,
            "bytes": piece.length,
        }
        self._notify("peers.complete", text, fields)


def own_address() -> str:
    """Return this node's address on its route to other networks, by IPv4 or else by IPv6. No packet is sent.

    Without a route: an address of the node's host name. Without that: 127.0.0.1, which no other node can reach.
    """
    for family, anywhere in ANYWHERE:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((anywhere, 9))
            address: str = probe.getsockname()[0]
            if _is_public(address):
                return address
    with contextlib.suppress(OSError, UnicodeError):
        for family, _, _, _, where in socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind(where)  # fails if it is another machine's
                if _is_public(address := str(where[0])):
                    return address
    return LOOPBACK


def is_loopback(address: str) -> bool:
    """Return whether ``host:port`` is an address that only processes of the same machine can reach."""
    with contextlib.suppress(PeerLost, ValueError):
        host = split_address(address)[0]
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    return False


def _is_public(address: str) -> bool:
    """Return whether other nodes can reach an address of this node. A link-local one needs an interface's name, too."""
    known = ipaddress.ip_address(address.partition("%")[0])
    return not (known.is_loopback or known.is_link_local or known.is_unspecified)
