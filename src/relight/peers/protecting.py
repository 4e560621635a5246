"""The agent's end: parts of this node are offered, and kept safe by the others'; theirs are held here."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence

from relight.errors import ConfigError
from relight.peers.holder import Holder
from relight.peers.messages import Parity
from relight.peers.parts import HeldPartFile, Parts
from relight.peers.rings import Peer, PeerRing, Rings, rings
from relight.peers.sender import Sender, Tell
from relight.peers.server import PeerServer
from relight.peers.wire import check_token, join_address

ANYWHERE = ("192.0.2.1", 9)
"""An address of nobody (RFC 5737): the route to it tells which of this node's addresses others see."""


class PeerService:
    """One agent among others. Serves from construction to ``close``; protects once it has joined a roster.

    ``host``: the address to listen at, told to others; "" for all of this node's, of which the one that routes lead from is told. ``port``:
    0 for a free one. ``token``: 32 bytes, the same for all agents of a job. ``memory``: bytes that parity of others may take at most, None
    for what the machine has. ``tell`` hears of ``peers.…`` events, in other threads: name, sentence, fields. Errors: ``ConfigError``,
    ``StoreUnavailable`` if the port cannot be had. Threads: two, one for each connection from others, and up to four while sending.
    """

    def __init__(
        self, host: str = "", port: int = 0, *, token: bytes, memory: int | None, tell: Tell, bytes_per_second: float | None = None
    ) -> None:
        self._token, self._tell, self._me = check_token(token), tell, ""
        if bytes_per_second is not None and not 0 < bytes_per_second < float("inf"):
            raise ConfigError(f"bytes_per_second= is a number above 0, not {bytes_per_second!r}")
        self._joining = threading.Lock()
        self._joined: tuple[PeerRing | None] | None = None
        self._parts = Parts()
        self._holder = Holder(memory, self._completed)
        self._server = PeerServer(host, port, lambda: self._token, lambda: self._me, self._parts, self._holder)
        self._sender = Sender(lambda: self._token, tell, bytes_per_second)
        self.address = join_address(host or own_address(), self._server.port)
        """Where others reach this agent."""

    @property
    def held_bytes(self) -> int:
        """Memory that others' parity takes here."""
        return self._holder.used

    def set_token(self, token: bytes) -> None:
        """Another token from now on. Who is connected with the former one is hung up on."""
        former, self._token = self._token, check_token(token)
        if former != token:
            self._server.hang_up()

    def join(self, roster: Sequence[Peer], me: str, data: int, parity: int) -> Rings:
        """Protect and be protected by those agents; ``me`` is the id of this one. What comes of the roster is given back, also to be told.

        Every agent joins the same roster, sooner or later; until two have, nothing goes from one to the other. Parts that were offered are
        sent to the new ring. Joining the same again changes nothing. ``ConfigError``: ``me`` is not in it, or it makes no sense.
        """
        found = rings(roster, data, parity)
        if all(peer.id != me for peer in roster):
            raise ConfigError(f"agent {me!r} is not in the roster")
        with self._joining:
            former, ring = self._joined, found.ring_of(me)
            self._me = me
            if former is None or former != (ring,):
                self._holder.join(ring, me)
                self._sender.join(ring, me, self._parts.newest())
                self._joined = (ring,)
        return found

    def leave(self) -> None:
        """Send nothing more, not even what is on its way, until the next ``join``; serve, and hold what is held."""
        with self._joining:
            self._sender.join(None, self._me, [])
            self._joined = None

    def offer(self, part: HeldPartFile) -> None:
        """Serve this part, which is committed, and have it protected. Returns at once."""
        self._parts.add(part)
        self._sender.offer(part)

    def withdraw(self, id: str, rank: int) -> None:
        """Serve that part no more; what was made of it elsewhere stays. To be called, if at all, before ``is_there`` becomes untrue."""
        self._parts.remove(id, rank)
        self._sender.withdraw(id, rank)

    def wait(self, timeout: float) -> bool:
        """Until all that was offered is sent, or given up; False if that takes longer."""
        return self._sender.wait(timeout)

    def close(self) -> None:
        """Stop, and let go of what is held for others."""
        self._sender.close()
        self._server.close()
        self._holder.close()
        self._parts.clear()

    def _completed(self, piece: Parity) -> None:
        say = f"checkpoint {piece.id}, lane {piece.lane}: parity {piece.row} of stripe {piece.stripe} is complete, {piece.length >> 20} MiB"
        fields = {"checkpoint": piece.id, "lane": piece.lane, "stripe": piece.stripe, "row": piece.row, "bytes": piece.length}
        self._tell("peers.complete", say, fields)


def own_address() -> str:
    """The address of this node that a route to elsewhere leads from; loopback's without any. No packet is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(ANYWHERE)
        found: str = probe.getsockname()[0]
        return found
    return "127.0.0.1"
