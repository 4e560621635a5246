"""A connection to the agent ends with the object that owns it."""

from __future__ import annotations

import gc
import socket
import threading
import time

import pytest

from relight.agent.client import Agent
from relight.agent.messages import HeldList
from relight.agent.wire import AgentConnection


def test_a_lost_connection_ends_with_its_object() -> None:
    """Symptom: an interrupt between the connection and its assignment leaked its thread and descriptors, in a notebook once for each."""
    ours, theirs = socket.socketpair()
    agent = Agent(ours)
    reader = agent._reader
    assert reader.is_alive()
    del agent
    gc.collect()
    reader.join(10)
    assert not reader.is_alive() and ours.fileno() == -1 and theirs.recv(10) == b""
    theirs.close()


def test_the_answer_to_an_interrupted_request_is_not_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is dropped when it comes."""
    ours, theirs = socket.socketpair()
    agent, server = Agent(ours), AgentConnection(theirs, object, ())
    wait_for = threading.Condition.wait_for

    def interrupted(condition: threading.Condition, *words: object) -> bool:
        if condition is agent._changed:
            monkeypatch.undo()
            raise KeyboardInterrupt
        return wait_for(condition, *words)  # type: ignore[arg-type]

    monkeypatch.setattr(threading.Condition, "wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        agent.held(10)
    for _ in range(2):
        server.send(HeldList([]), [])
    time.sleep(0.2)
    assert agent.held(10) == [] and not agent._late
    agent.close()
    server.close()
