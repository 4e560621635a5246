"""Nodes that protect each other's snapshots: they meet when an attempt begins, and are asked when a node's own memory has nothing."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections import Counter

import msgspec

from relight.agent import Agent, JoinPeers, ListenForPeers, PeerAddress, connect
from relight.checkpointer.options import check_peers
from relight.checkpointer.ranks import Ranks
from relight.errors import RelightError
from relight.observe import emit
from relight.peers import TOKEN_BYTES, Remote, rings
from relight.peers import Peer as RosterPeer
from relight.policy import Limits, Peers

MEET_S = 30.0
"""How long an agent may take to say where it is."""
ASK_S = 20.0
"""How long a peer may take to answer."""


class PeerDiscovery:
    """The ranks' agents, made known to each other. All ranks make the same calls. Without ``wanted``, or with one rank, it does nothing."""

    def __init__(
        self, wanted: Peers | None, writer: str, background: bool, ranks: Ranks | None, url: str, run: str, limits: Limits
    ) -> None:
        self._wanted = check_peers(wanted, writer, background)
        self._ranks, self._url, self._run, self._limits = ranks, url, run, limits
        self._agent: Agent | None = None
        self._addresses: list[str] = []
        self._token = b""
        self._remote: Remote | None = None
        self._lock = threading.Lock()
        self._met = False

    def meet(self) -> None:
        """Once: have this node's agent started, and tell it of the others. Exchanges a few hundred bytes a rank."""
        wanted, ranks = self._wanted, self._ranks
        if wanted is None or self._met:
            return
        self._met = True
        if ranks is None:
            emit("peers.failed", "peers= are for several nodes: there is one rank here, and nothing is done", why="one rank")
            return
        candidate = ranks.run_on_rank0(lambda: secrets.token_bytes(TOKEN_BYTES), "telling the peers' token")
        met = self._reach(wanted, candidate)
        host, rack = os.environ.get("RELIGHT_NODE") or socket.gethostname(), os.environ.get("RELIGHT_RACK", "")
        word = msgspec.msgpack.encode([met.id, met.address, met.token, met.others, host, rack])
        told = [msgspec.msgpack.decode(one) for one in ranks.world.gather(word, "telling where the peers are")]
        # Agents of nodes that are not in this job any more know the token of the one before it, which most of those that are here know too.
        tokens = Counter(bytes(one[2]) for one in told if one[0] and one[2])
        self._token = max(tokens, key=lambda one: (tokens[one], one)) if tokens else candidate
        agents: dict[str, tuple[str, str, str, str, list[int]]] = {}
        for rank, (agent_id, address, _, _, its_host, its_rack) in enumerate(told):
            if agent_id:
                agents.setdefault(agent_id, (agent_id, its_host, its_rack, address, []))[4].append(rank)
        roster = list(agents.values())
        here = [one[3] for one in roster]
        others = {address for one in told if one[0] and bytes(one[2]) == self._token for address in one[3]}
        self._addresses = [*here, *sorted(others - {*here})]
        with contextlib.suppress(RelightError):  # an agent that is gone is told of by whoever needs it next
            if self._agent is not None:
                self._agent.meet(ListenForPeers(self._token, change=True), MEET_S)
        ranks.world.gather(b"", "meeting the peers")  # none is told of others before those know the token
        with contextlib.suppress(RelightError):
            if self._agent is not None:
                self._agent.join(JoinPeers(roster, met.id, wanted.data, wanted.parity))
        if ranks.world.rank == 0:
            found = rings([RosterPeer(one[0], one[1], one[2], one[3], tuple(one[4])) for one in roster], wanted.data, wanted.parity)
            short = [found.short] if found.short else []
            lost = [str(one) for one in found.shared if not one.survived]
            if short or lost:
                emit("peers.degraded", "; ".join(["peers protect less than was asked for", *short, *lost]), agents=len(roster))

    def remote(self) -> Remote | None:
        """What all agents have in memory, asked when it is wanted first; None if there are no peers."""
        with self._lock:
            if self._remote is None and self._addresses:
                self._remote = Remote(self._addresses, self._token, ASK_S)
            return self._remote

    def forget(self) -> None:
        """What the agents have is asked anew when it is wanted next."""
        with self._lock:
            if self._remote is not None:
                self._remote.close()
                self._remote = None

    def ends(self) -> None:
        """The run comes to its end: what is saved from now on need not be held by others, some of whom are gone already."""
        if self._agent is not None:
            with contextlib.suppress(RelightError):
                self._agent.leave()

    def close(self, polite: bool = True) -> None:
        """Let go of the agent, which ends when nobody needs it any more."""
        self.forget()
        if self._agent is not None:
            if polite:
                self._agent.bye()
            self._agent.close()
            self._agent = None

    def _reach(self, wanted: Peers, candidate: bytes) -> PeerAddress:
        """This node's agent; without id and address, and told, if there is none to be had."""
        try:
            self._agent = connect(self._url, self._run, nice=self._limits.nice)
            host = os.environ.get("RELIGHT_PEERS_HOST", "")
            meet = ListenForPeers(candidate, host=host, memory=wanted.memory, bytes_per_second=wanted.bytes_per_second)
            met = self._agent.meet(meet, MEET_S)
            if met.address:
                return met
            emit("peers.failed", f"this node is not protected by others: {met.why}", why=met.why)
        except RelightError as error:
            emit("peers.failed", f"this node is not protected by others: {error}", why=str(error))
        return PeerAddress("", "")
