"""The agent: a process without torch that owns the arenas and writes what is sealed in them, whether the trainer lives or not; its client.

Always holds: what was sealed is committed or told to have failed, also after the trainer's death; what was not sealed never shows; nobody
waits without a deadline; an agent that nobody needs any more ends. May import everything from ``drain`` down.
"""

from relight.agent.client import Agent, AgentDied, HeldPart, SaveOutcome
from relight.agent.launch import connect, dismiss, reach
from relight.agent.messages import JoinPeers, ListenForPeers, OpenRun, PeerAddress, Request, TensorLayout, TensorSpec

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
    "TensorLayout",
    "TensorSpec",
    "connect",
    "dismiss",
    "reach",
]
