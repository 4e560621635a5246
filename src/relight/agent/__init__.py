"""The agent, a process without torch that owns the snapshot slots and writes sealed ones even if the trainer has died;
and its client.

Invariants: every sealed save is committed or reported as failed, also after the trainer's death. An unsealed save
never becomes a checkpoint. Every wait has a deadline. An agent that no process needs ends. May import everything from
``drain`` down.
"""

from relight.agent.client import Agent, AgentDied, HeldPart, SaveOutcome
from relight.agent.launch import connect, dismiss, reach
from relight.agent.messages import (
    JoinPeers,
    ListenForPeers,
    OpenRun,
    PeerAddress,
    Request,
    SaveResult,
    TensorLayout,
    TensorSpec,
)

__all__ = [
    "Agent",
    "AgentDied",
    "HeldPart",
    "JoinPeers",
    "ListenForPeers",
    "OpenRun",
    "PeerAddress",
    "Request",
    "SaveOutcome",
    "SaveResult",
    "TensorLayout",
    "TensorSpec",
    "connect",
    "dismiss",
    "reach",
]
