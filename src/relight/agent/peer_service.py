"""The agent as a peer of agents on other nodes: it offers them committed parts, and serves them the data it holds."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from relight.agent.messages import JoinPeers, ListenForPeers, PeerAddress
from relight.arena import SharedMapping
from relight.errors import RelightError
from relight.keys.dumps import keep_out_of_core_dumps

if TYPE_CHECKING:
    from relight.peers import PeerService  # loaded on demand: most agents have no peers

Notify = Callable[[str, str, dict[str, Any]], None]


class Offered(NamedTuple):
    """One rank's part of a checkpoint that was just committed. See ``peers.HeldPartFile``."""

    id: str
    seq: int
    rank: int
    memory: SharedMapping
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    is_there: Callable[[], bool]


class AgentPeers:
    """The agent's peer service. Does nothing until a trainer asks for it. Thread-safe."""

    def __init__(self, notify: Notify) -> None:
        self._notify, self._id = notify, secrets.token_hex(8)
        self._lock = threading.Lock()
        self._peers: PeerService | None = None
        self._ranks: tuple[int, ...] = ()
        self._token = b""
        self._others: list[str] = []

    def meet(self, request: ListenForPeers) -> PeerAddress:
        """Listen for peers that know the token. Return this agent's address."""
        from relight.peers import PeerService

        with self._lock:
            try:
                if request.tls:  # this process has the certificate's private key
                    keep_out_of_core_dumps(whole=True)
                if self._peers is None:
                    self._peers = PeerService(
                        request.host,
                        token=request.token,
                        memory=request.memory,
                        notify=self._notify,
                        bytes_per_second=request.bytes_per_second,
                        tls=request.tls,
                        plane=request.plane,
                    )
                    self._token = request.token
                else:
                    self._peers.use(request.tls, request.plane)
                    if request.change:
                        self._peers.set_token(request.token)
                        self._token = request.token
            except (RelightError, OSError) as error:  # OSError: no descriptor is left for the certificate's key
                return PeerAddress(self._id, "", str(error))
            return PeerAddress(self._id, self._peers.address, "", self._token if self._others else b"", self._others)

    def find(self) -> PeerAddress:
        """Return the roster's addresses for a reader on this node."""
        with self._lock:
            if self._peers is None or not self._others:
                return PeerAddress(self._id, "")
            return PeerAddress(
                self._id, self._peers.address, "", self._token, self._others, self._peers.tls, self._peers.plane
            )

    def join(self, request: JoinPeers) -> None:
        """Protect, and be protected by, the agents of the roster."""
        from relight.peers import Peer

        roster = [Peer(id, host, rack, address, tuple(ranks)) for id, host, rack, address, ranks in request.roster]
        with self._lock:
            if self._peers is None:
                return
            self._others = [peer.address for peer in roster]
            self._ranks = next((peer.ranks for peer in roster if peer.id == self._id), ())
            try:
                self._peers.join(roster, self._id, request.data, request.parity)
            except RelightError as error:
                self._notify(
                    "peers.failed", f"no other node holds a copy of this node's saves: {error}", {"why": str(error)}
                )

    def leave(self) -> None:
        """Protect nothing until the next ``join``: the run ends. Peers that leave first are then not reported as lost."""
        with self._lock:
            if self._peers is not None:
                self._ranks = ()
                self._peers.leave()

    def offer(self, part: Offered) -> None:
        """Have a part protected, if there are peers."""
        with self._lock:
            if self._peers is not None and part.rank in self._ranks:
                from relight.peers import HeldPartFile

                lane = self._ranks.index(part.rank)
                self._peers.offer(
                    HeldPartFile(
                        part.id, part.seq, part.rank, lane, part.memory, part.starts, part.sizes, part.is_there
                    )
                )

    @property
    def holds(self) -> bool:
        """Return whether peers may need data that this agent holds."""
        with self._lock:
            return self._peers is not None and self._peers.held_bytes > 0

    def close(self) -> None:
        """Close the peer service and free its memory."""
        with self._lock:
            if self._peers is not None:
                self._peers.close()
                self._peers = None
