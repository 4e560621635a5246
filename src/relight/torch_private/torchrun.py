"""The private names of torch that ``relight run`` needs. Each has one class or function here, with the reason for it.

The import fails with a clear error if torch lacks one of them, before a job starts. All were found in
torch 2.6.0 and 2.13.0; of 2.9 to 2.12 and 2.14.1, only the files that had changed were read. The methods that
``SupervisedAgent`` overrides are not among them: torch documents those as extension points of its agents.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from types import ModuleType
from typing import IO, Any

import msgspec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import PContext
from torch.distributed.elastic.multiprocessing import api as multiprocessing_api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import RendezvousHandler, dynamic_rendezvous

from relight.torch_private.names import TorchName, check_torch

_ELASTIC = "torch.distributed.elastic"
_AGENT = f"{_ELASTIC}.agent.server"
_DYNAMIC = f"{_ELASTIC}.rendezvous.dynamic_rendezvous"


def _names(owner: str, names: str) -> tuple[TorchName, ...]:
    otherwise = "relight run ends with an error; torchrun starts the script"
    return tuple(TorchName(owner, name, "worker processes and their rendezvous", otherwise) for name in names.split())


NAMES = (
    *_names(f"{_ELASTIC}.multiprocessing.api", "get_subprocess_handler"),
    *_names(f"{_ELASTIC}.multiprocessing.subprocess_handler:SubprocessHandler", "_popen _stdout _stderr"),
    *_names(f"{_AGENT}.local_elastic_agent:LocalElasticAgent", "_pcontext"),
    *_names(f"{_AGENT}.api:SimpleElasticAgent", "_remaining_restarts"),
    *_names(_DYNAMIC, "_BackendRendezvousStateHolder _RendezvousState _NodeDesc _RendezvousExitOp"),
    *_names(
        f"{_DYNAMIC}:_BackendRendezvousStateHolder",
        "_backend _state _cache_duration _token _dirty _last_sync_time _sanitize",
    ),
    *_names(f"{_DYNAMIC}:DynamicRendezvousHandler", "_op_executor _state_holder _stop_heartbeats"),
)
"""All names that the functions below use."""


# before the imports below, which would fail without a hint
check_torch(NAMES, "relight run", "; without relight run, start the script with torchrun")

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (  # noqa: E402 - after check_torch
    _BackendRendezvousStateHolder,
    _NodeDesc,
    _RendezvousExitOp,
    _RendezvousState,
)

# -- worker processes

Take = Callable[[tuple[str, ...], Mapping[str, str], IO[Any] | None, IO[Any] | None], subprocess.Popen[bytes] | None]
"""Returns a process that becomes a worker with this command line, environment and output; None: start a new one."""


class WorkerHandler(SubprocessHandler):
    """torchrun's handler of one worker process. It first asks ``take`` for a process that is already running.

    ``_popen``: torchrun always starts a new process, and has no public hook in which a spare could take its place.
    ``_stdout`` and ``_stderr``: the spare needs the files that torchrun has opened for the worker's output.
    """

    def __init__(self, take: Take, *args: Any, **kwargs: Any) -> None:
        self._take = take
        super().__init__(*args, **kwargs)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        return self._take(args, env, self._stdout, self._stderr) or super()._popen(args, env)


@contextmanager
def worker_handlers(take: Take) -> Iterator[None]:
    """Have torchrun make ``WorkerHandler`` objects for the workers that it starts in the block.

    ``get_subprocess_handler``: torchrun calls it by name, and no argument of the agent or the context replaces it.
    """

    def make(*args: Any, **kwargs: Any) -> WorkerHandler:
        return WorkerHandler(take, *args, **kwargs)

    with _replaced(multiprocessing_api, "get_subprocess_handler", make):
        yield


@contextmanager
def _replaced(module: ModuleType, name: str, value: object) -> Iterator[None]:
    original = vars(module)[name]
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


def context_of(agent: LocalElasticAgent) -> PContext | None:
    """Return the worker processes of an agent; None before the first start.

    ``_pcontext``: the agent hands its context to no public method, and only the context has the processes.
    """
    return agent._pcontext


def allow_restart(agent: LocalElasticAgent, *, is_allowed: bool) -> None:
    """Set whether the agent starts its workers again after a failure.

    ``_remaining_restarts``: torchrun's agent only counts down from a fixed number, and the supervisor decides instead.
    """
    agent._remaining_restarts = int(is_allowed)


# -- the dynamic rendezvous

_PATCHING = threading.Lock()
"""Only one thread at a time replaces a name of torch, because each restores what it found."""
Node = tuple[str, int, int]
"""A node in torch's state: its address, process and number there."""


class StateFields(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of torch's state of a rendezvous, and the version that Relight gives it."""

    version: int
    round: int
    complete: bool
    deadline: datetime | None
    closed: bool
    participants: list[tuple[Node, int]]
    wait_list: list[Node]
    redundancy_list: list[Node]
    last_heartbeats: list[tuple[Node, datetime]]


class PickleFreeStateHolder(_BackendRendezvousStateHolder):
    """torch's state holder, with the bytes of a subclass in place of a pickle.

    ``_BackendRendezvousStateHolder`` and its attributes: torch loads a pickle from the store at each poll, and neither
    the handler nor its back end has a public way to encode the state otherwise. ``_RendezvousState`` and ``_NodeDesc``
    are the classes of that state.
    """

    def encoded(self) -> bytes:
        """Return the bytes of the present state."""
        raise NotImplementedError

    def decoded(self, data: bytes | None) -> StateFields | None:
        """Return the state in ``data``. None, for data and state: nothing is stored yet."""
        raise NotImplementedError

    @property
    def round(self) -> int:
        """The round that was read last."""
        return self._state.round

    def fields(self, version: int) -> StateFields:
        """Return the fields of the present state."""
        state = self._state
        return StateFields(
            version, state.round, state.complete, state.deadline, state.closed,
            [(_node_of(node), rank) for node, rank in state.participants.items()], sorted(map(_node_of, state.wait_list)),
            sorted(map(_node_of, state.redundancy_list)),
            [(_node_of(node), last) for node, last in state.last_heartbeats.items()],
        )  # fmt: skip

    def sync(self) -> bool | None:
        """Write the state if it has changed, else read it. Return whether a change was written; None without a change.

        Differs from torch's method only in the encoding of the state.
        """
        written: bool | None = None
        if self._dirty:
            written = False
            answer = self._backend.set_state(self.encoded(), self._token)
            data, token, written = answer if answer is not None else (None, None, False)
        else:
            if self._cache_duration > 0 and self._last_sync_time >= max(time.monotonic() - self._cache_duration, 0):
                return None
            data, token = self._backend.get_state() or (None, None)
        self._state = _state_of(self.decoded(data))
        self._token, self._dirty, self._last_sync_time = token, False, time.monotonic()
        self._sanitize()
        return written


@contextmanager
def state_holders(make: Callable[..., PickleFreeStateHolder]) -> Iterator[None]:
    """Have torch's rendezvous handlers use the state holders of ``make`` that are created in the block.

    ``_BackendRendezvousStateHolder``: ``DynamicRendezvousHandler.from_backend`` creates it by name.
    """
    with _PATCHING, _replaced(dynamic_rendezvous, "_BackendRendezvousStateHolder", make):
        yield


class Membership:
    """A node's membership of torch's dynamic rendezvous.

    ``_op_executor``, ``_RendezvousExitOp``, ``_stop_heartbeats``: the public ``shutdown`` closes the rendezvous for all
    nodes, and no public method removes one node. ``_state_holder``: only it knows whether the others have met again.
    """

    def __init__(self, handler: Any) -> None:
        self._executor, self._holder, self._stop = handler._op_executor, handler._state_holder, handler._stop_heartbeats
        self._round = self._holder.state.round

    @classmethod
    def of(cls, handler: RendezvousHandler) -> Membership | None:
        """Return the membership of a handler's node; None if the handler is no dynamic one."""
        return cls(handler) if hasattr(handler, "_op_executor") and hasattr(handler, "_state_holder") else None

    def leave(self, within_s: float) -> None:
        """Remove the node, and stop its heartbeats."""
        self._stop()
        self._executor.run(_RendezvousExitOp(), time.monotonic() + within_s)

    def sync(self) -> None:
        """Read the state."""
        self._holder.sync()

    @property
    def have_others_met(self) -> bool:
        """Whether the other nodes have completed a later round, as read last."""
        return bool(self._holder.state.complete) and self._holder.state.round > self._round


def _state_of(fields: StateFields | None) -> _RendezvousState:
    state = _RendezvousState()
    if fields is None:
        return state
    state.round, state.complete, state.deadline, state.closed = (
        fields.round,
        fields.complete,
        fields.deadline,
        fields.closed,
    )
    state.participants = {_NodeDesc(*node): rank for node, rank in fields.participants}
    state.wait_list = {_NodeDesc(*node) for node in fields.wait_list}
    state.redundancy_list = {_NodeDesc(*node) for node in fields.redundancy_list}
    state.last_heartbeats = {_NodeDesc(*node): last for node, last in fields.last_heartbeats}
    return state


def _node_of(node: _NodeDesc) -> Node:
    return node.addr, node.pid, node.local_id
