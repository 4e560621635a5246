"""Peer discovery: nodes that protect each other's snapshots connect at an attempt's start; a restore reads from them if
needed."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections import Counter

import msgspec

from relight.agent import Agent, JoinPeers, ListenForPeers, PeerAddress, connect
from relight.checkpointer.hooks import Hook
from relight.checkpointer.options import check_peers
from relight.comm.tls import need_tls_library
from relight.commit import Attempt
from relight.errors import RelightError, StoreUnavailable
from relight.log import History
from relight.observe import emit
from relight.peers import TCP, TOKEN_BYTES, Remote, is_loopback, rings
from relight.peers import Peer as RosterPeer
from relight.policy import Limits, Peers
from relight.ranks.group import RankGroup
from relight.settings.environment import environment
from relight.store import ByteStore
from relight.store.encrypted import EncryptedStore
from relight.store.wrapper import layer_of

MEET_S = 30.0
"""Seconds that an agent may take to report its address."""
ASK_S = 20.0
"""Seconds that a peer may take to answer."""
_SEALED_AS = "peers-token"
"""Name under which the token is sealed. No file of a store has it."""


class PeerDiscovery(Hook):
    """Connects the ranks' agents with each other. All ranks make the same calls. Without ``wanted``, or with one rank,
    it does nothing.

    The ranks exchange the agents' addresses and token over their process group, which is not encrypted. In an encrypted
    run the token is sealed with the store's key, so a reader of that network cannot call an agent.
    """

    def __init__(
        self,
        wanted: Peers | None,
        writer: str,
        background: bool,
        ranks: RankGroup,
        store: ByteStore,
        run: str,
        limits: Limits,
    ) -> None:
        self._wanted = check_peers(wanted, writer, background)
        self._ranks, self._url, self._run, self._limits = ranks, store.url, run, limits
        self._encryption = layer_of(store, EncryptedStore)
        self._tls = False
        if self._wanted is not None:
            self._tls = self._encryption is not None if self._wanted.tls is None else self._wanted.tls
        if self._tls:
            need_tls_library()
        self._agent: Agent | None = None
        self._addresses: list[str] = []
        self._token = b""
        self._remote: Remote | None = None
        self._lock = threading.Lock()
        self._met = False

    def on_attempt(self, attempt: Attempt, history: History) -> None:
        """Connect the agents, if no restore has."""
        self.meet()

    def meet(self) -> None:
        """Start this node's agent and send it the other agents' addresses. Idempotent. Exchanges a few hundred bytes
        per rank."""
        wanted, ranks = self._wanted, self._ranks
        if wanted is None or self._met:
            return
        self._met = True
        if not ranks.several:
            emit(
                "peers.failed",
                "peers= need several nodes: this job has one rank, so no peer protects it",
                why="one rank",
            )
            return
        if self._encryption is not None and not self._tls and ranks.world.rank == 0:
            text = "the peers of this encrypted run exchange its weights in the clear, because of Peers(tls=False)"
            emit("peers.unencrypted", text)
        sealed = ranks.run_on_rank0(lambda: self._sealed(secrets.token_bytes(TOKEN_BYTES)), "sharing the peers' token")
        candidate = self._opened(sealed)
        met = self._reach(wanted, candidate)
        now = environment()
        host, rack = now.node or socket.gethostname(), now.rack
        token = self._sealed(met.token) if met.token else b""
        machine = socket.gethostname()
        message = msgspec.msgpack.encode([met.id, met.address, token, met.others, host, rack, machine])
        answers = [msgspec.msgpack.decode(each) for each in ranks.world.gather(message, "sharing the peers' addresses")]
        for each in answers:
            each[2] = self._opened(each[2]) if each[2] else b""
        # Agents of nodes that have left the job still use the previous token, which most agents of the present nodes also know.
        tokens = Counter(each[2] for each in answers if each[0] and each[2])
        self._token = max(tokens, key=lambda each: (tokens[each], each)) if tokens else candidate
        several = len({each[6] for each in answers}) > 1
        unreachable = {each[0] for each in answers if each[0] and several and is_loopback(each[1])}
        agents: dict[str, tuple[str, str, str, str, list[int]]] = {}
        for rank, (agent_id, address, _, _, its_host, its_rack, _) in enumerate(answers):
            if agent_id and agent_id not in unreachable:
                agents.setdefault(agent_id, (agent_id, its_host, its_rack, address, []))[4].append(rank)
        if met.id in unreachable and ranks.world.rank == [each[0] for each in answers].index(met.id):
            _report_unreachable(met.address.partition("#")[0])
        roster = list(agents.values())
        addresses = [each[3] for each in roster]
        peers = {address for each in answers if each[0] and each[2] == self._token for address in each[3]}
        self._addresses = [*addresses, *sorted(peers - {*addresses})]
        with contextlib.suppress(RelightError):  # the next save or restore that needs a dead agent reports it
            if self._agent is not None:
                change = ListenForPeers(self._token, change=True, tls=self._tls, plane=wanted.plane)
                self._agent.meet(change, MEET_S)
        ranks.world.gather(b"", "meeting the peers")  # no agent gets another's address before that one knows the token
        with contextlib.suppress(RelightError):
            if self._agent is not None and met.id not in unreachable:
                self._agent.join(JoinPeers(roster, met.id, wanted.data, wanted.parity))
        if ranks.world.rank == 0:
            placement = rings(
                [RosterPeer(each[0], each[1], each[2], each[3], tuple(each[4])) for each in roster],
                wanted.data,
                wanted.parity,
            )
            short = [placement.short] if placement.short else []
            lost = [str(each) for each in placement.shared if not each.survived]
            if short or lost:
                emit(
                    "peers.degraded",
                    "; ".join(["peers protect less than was asked for", *short, *lost]),
                    agents=len(roster),
                )

    def remote(self) -> Remote | None:
        """Return access to all agents' memory, connected at the first use; None if there are no peers."""
        with self._lock:
            if self._remote is None and self._addresses and self._token:
                plane = TCP if self._wanted is None else self._wanted.plane
                self._remote = Remote(self._addresses, self._token, ASK_S, tls=self._tls, plane=plane)
            return self._remote

    def forget(self) -> None:
        """Close the connections: the next use queries the agents again."""
        with self._lock:
            if self._remote is not None:
                self._remote.close()
                self._remote = None

    def ends(self) -> None:
        """Announce the run's end: later saves need no copies on peers, because some peers have ended already."""
        if self._agent is not None:
            with contextlib.suppress(RelightError):
                self._agent.leave()

    def on_close(self, polite: bool) -> None:
        """Disconnect from the agent, which ends when no process needs it any more."""
        self.forget()
        if self._agent is not None:
            if polite:
                self._agent.bye()
            self._agent.close()
            self._agent = None

    def _sealed(self, token: bytes) -> bytes:
        """Return the token in the form that is sent to other ranks."""
        return token if self._encryption is None else self._encryption.seal(_SEALED_AS, token)

    def _opened(self, sealed: bytes) -> bytes:
        """Return a token that another rank has sent; empty if it is not one of this store."""
        with contextlib.suppress(RelightError):
            token = sealed if self._encryption is None else self._encryption.unseal(_SEALED_AS, sealed)
            if len(token) == TOKEN_BYTES:
                return token
        return b""

    def _reach(self, wanted: Peers, candidate: bytes) -> PeerAddress:
        """Start this node's agent and return its address. If that fails, report it and return an empty address."""
        try:
            if not candidate:
                raise StoreUnavailable(
                    "joining the peers failed: the key of this rank cannot decrypt the token of rank 0"
                )
            self._agent = connect(self._url, self._run, nice=self._limits.nice)
            host = environment().peers_host
            meet = ListenForPeers(
                candidate,
                host=host,
                memory=wanted.memory,
                bytes_per_second=wanted.bytes_per_second,
                tls=self._tls,
                plane=wanted.plane,
            )
            met = self._agent.meet(meet, MEET_S)
            if met.address:
                return met
            emit("peers.failed", f"no other node holds a copy of this node's saves: {met.why}", why=met.why)
        except (RelightError, OSError) as error:  # OSError: no descriptor, memory or process left
            emit("peers.failed", f"no other node holds a copy of this node's saves: {error}", why=str(error))
        return PeerAddress("", "")


def _report_unreachable(address: str) -> None:
    """Report that other machines cannot reach this node's agent. They do not get its address."""
    cause = "" if environment().peers_host else ": no route to another network was found"
    why = f"other machines cannot reach its agent at {address}{cause}"
    text = (
        f"no other node holds a copy of this node's saves: {why}; set RELIGHT_PEERS_HOST to an address that they reach"
    )
    emit("peers.failed", text, why=why, address=address)
