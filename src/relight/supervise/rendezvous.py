"""The rendezvous of ``relight run``, without pickle. One node listens on no socket; several nodes seal each value.

torch keeps the state of its dynamic rendezvous as a pickle in a store, and loads that pickle at each poll. Any process
that reaches the store's port may write to it. Here the state is JSON, and all values that nodes exchange have a seal.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous import registry as torch_registry

from relight.decode import from_json_bytes
from relight.errors import ConfigError, InternalError
from relight.supervise.job_secret import VARIABLE, Seal
from relight.supervise.rendezvous_port import with_own_port
from relight.supervise.static_nodes import LOOPBACK, StaticNodes, served_store
from relight.torch_private.torchrun import PickleFreeStateHolder, StateFields, state_holders

_DYNAMIC = ("c10d", "etcd-v2")
_REPLACED = (*_DYNAMIC, "etcd", "static")
"""torch's own back ends. A job of one node uses ``OneNode`` instead."""
_STATE_BYTES_MAX = 8 << 20
_STATE = "state"
_STATIC_S = 600
"""torch's own: seconds that nodes of a static rendezvous have to arrive."""


class Forged(RendezvousStateError):
    """The rendezvous holds a value without this job's seal."""

    def __init__(self, what: str) -> None:
        hint = f"give all nodes the same {VARIABLE} and --rdzv-id, or use another --rdzv-id"
        super().__init__(f"{what} in the rendezvous was not written with this job's secret; {hint}")


class Meetings:
    """Makes the rendezvous of a node, and a new one after a lost connection."""

    def __init__(self, parameters: RendezvousParameters, secret: bytes) -> None:
        """``secret``: the job's, or empty."""
        self._parameters = parameters
        self._seal = Seal(secret, parameters.run_id)
        self._state: StateHolder | None = None
        self._static: StaticNodes | None = None

    def handler(self) -> RendezvousHandler:
        """Return a new handler. Raise ``Forged`` if the rendezvous already has a state of another secret."""
        parameters = self._parameters
        if parameters.max_nodes == 1 and parameters.backend in _REPLACED:
            return OneNode(parameters.run_id, _port_in(parameters))
        if parameters.backend == "static":
            self._static = _static_nodes(parameters)
            return self._static
        holders: list[StateHolder] = []

        def holder(*arguments: Any, **named: Any) -> StateHolder:
            holders.append(StateHolder(self._seal, *arguments, **named))
            return holders[-1]

        with state_holders(holder):
            handler = torch_registry.get_rendezvous_handler(parameters)
        if len(holders) > 1 or (parameters.backend in _DYNAMIC and not holders):
            raise InternalError(
                "torch's rendezvous keeps its state in another way than Relight knows, and might load pickles"
            )
        self._state = holders[0] if holders else None
        if self._state is not None:
            self._state.sync()
        return handler

    def seen(self, info: RendezvousInfo) -> RendezvousInfo:
        """Return ``info`` with a store of sealed values, and with the address that rank 0's node itself states."""
        if self._parameters.max_nodes == 1 and self._parameters.backend in _REPLACED:
            return info
        address = info.bootstrap_store_info
        assert address is not None
        if self._static is not None:
            sealed: Any = SealedStore(info.store, self._seal, f"life {self._static.life}")
            return RendezvousInfo(sealed, info.rank, info.world_size, address)
        store: Any = SealedStore(
            info.store, self._seal, f"round {self._state.round}" if self._state is not None else ""
        )
        return with_own_port(
            RendezvousInfo(store, info.rank, info.world_size, address), self._parameters.local_addr or socket.getfqdn()
        )


def _static_nodes(parameters: RendezvousParameters) -> StaticNodes:
    """Return the handler of a node at a fixed address.

    Raise ``ConfigError`` if the address or the node's number is missing.
    """
    host, _, port = parameters.endpoint.strip().rpartition(":")
    rank = parameters.get_as_int("rank")
    if not host or not port.isdecimal() or rank is None:
        hint = "--node-rank N --master-addr HOST --master-port PORT"
        raise ConfigError("a static rendezvous needs this node's number and the address of node 0", hint=hint)
    if not 0 <= rank < parameters.max_nodes:
        message = f"--node-rank is {rank}, and there are {parameters.max_nodes} nodes"
        raise ConfigError(message, hint="count nodes from 0: the last of N nodes has --node-rank N-1")
    timeout_s = parameters.get_as_int("join_timeout") or parameters.get_as_int("timeout") or _STATIC_S
    return StaticNodes(host.strip("[]"), int(port), rank, parameters.max_nodes, parameters.run_id, timeout_s)


def _port_in(parameters: RendezvousParameters) -> int:
    """Return the port that the user has given for the ranks of one node with ``--master-port``; 0 for any."""
    port = parameters.endpoint.rpartition(":")[2] if parameters.backend == "static" else ""
    return int(port) if port.isdecimal() and 0 < int(port) < 1 << 16 else 0


class OneNode(RendezvousHandler):
    """The rendezvous of a job with one node: in this process's memory. No other process takes part in it.

    This process also serves the store of the ranks, a new one for each incarnation. It listens at 127.0.0.1 only.
    torch's store of rank 0 would listen at every address of the machine.
    """

    def __init__(self, run_id: str, port: int = 0) -> None:
        self._run_id, self._port = run_id, port
        self._store, self._lives, self._closed = HashStore(), 0, False
        self._ranks: TCPStore | None = None

    def get_backend(self) -> str:
        """See torch's."""
        return "one node"

    @property
    def use_agent_store(self) -> bool:
        """Return True: ranks are clients of the store at ``MASTER_PORT``, rank 0 as well."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return at once, with a new store for the ranks.

        Cost: one listening socket at 127.0.0.1, and one of torch's threads.
        """
        if self._closed:
            raise RendezvousClosedError
        self._ranks = None  # its port is free again
        try:
            self._ranks = loopback_store(self._port)
        except OSError as error:
            raise ConfigError(
                f"the ranks cannot meet at port {self._port} of {LOOPBACK}: {error.strerror}",
                hint="give another --master-port, or none",
            ) from None
        self._lives += 1
        store = PrefixStore(f"life{self._lives}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._ranks.port))

    def is_closed(self) -> bool:
        """See torch's."""
        return self._closed

    def set_closed(self) -> None:
        """See torch's."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Return 0: no other node can wait here."""
        return 0

    def get_run_id(self) -> str:
        """See torch's."""
        return self._run_id

    def shutdown(self) -> bool:
        """See torch's."""
        self._closed, self._ranks = True, None
        return True


def loopback_store(port: int = 0) -> TCPStore:
    """Return a store that this process serves at 127.0.0.1 and no other address."""
    return served_store(LOOPBACK, port)


class StateHolder(PickleFreeStateHolder):
    """torch's state holder, with the state as JSON with a seal and a version.

    Raise ``Forged`` if a state is older than one read before.
    """

    def __init__(self, seal: Seal, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._seal, self._version = seal, 0

    def encoded(self) -> bytes:
        """Return the present state as sealed JSON, with the next version."""
        return self._seal.close(_STATE, msgspec.json.encode(self.fields(self._version + 1)))

    def decoded(self, data: bytes | None) -> StateFields | None:
        """Return the state in sealed JSON; None if nothing was written yet."""
        if data is None:
            if self._version:
                raise Forged("an empty state")
            return None
        try:
            fields = from_json_bytes(self._seal.open(_STATE, data[:_STATE_BYTES_MAX]), StateFields)
        except (ValueError, msgspec.MsgspecError) as error:
            raise Forged("the state") from error
        if fields.version < self._version:
            raise Forged("an earlier state")
        self._version = fields.version
        return fields


class SealedStore:
    """The operations of a store that torch's agent and Relight use. Each value has a seal for its key.

    Counters have no seal, because a wrong counter can only delay a job.

    Raise ``Forged`` if a value has another seal, or none.
    """

    def __init__(self, store: Store, seal: Seal, place: str) -> None:
        self._store: Any = store  # takes bytes, and has more than its stub states
        self._seal, self._place = seal, place

    def set(self, key: str, value: str | bytes) -> None:
        """See torch's."""
        self._store.set(key, self._closed(key, value))

    def get(self, key: str) -> bytes:
        """See torch's."""
        return self._opened(key, self._store.get(key))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """See torch's."""
        self._store.multi_set(list(keys), [self._closed(key, value) for key, value in zip(keys, values, strict=True)])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """See torch's."""
        return [self._opened(key, value) for key, value in zip(keys, self._store.multi_get(list(keys)), strict=True)]

    def add(self, key: str, amount: int) -> int:
        """See torch's."""
        return int(self._store.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """See torch's."""
        return bool(self._store.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """See torch's."""
        if timeout is None:
            self._store.wait(list(keys))
        else:
            self._store.wait(list(keys), timeout)

    @property
    def timeout(self) -> timedelta:
        """See torch's."""
        timeout: timedelta = self._store.timeout
        return timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """See torch's."""
        self._store.set_timeout(timeout)

    def _closed(self, key: str, value: str | bytes) -> bytes:
        return self._seal.close(f"{self._place}/{key}", value.encode() if isinstance(value, str) else bytes(value))

    def _opened(self, key: str, value: bytes) -> bytes:
        try:
            return self._seal.open(f"{self._place}/{key}", bytes(value))
        except ValueError as error:
            raise Forged(repr(key)) from error
