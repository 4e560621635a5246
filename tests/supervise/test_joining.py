"""Polling for waiting nodes, and rejoining, while the rendezvous' host answers, is silent, or is gone."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

pytest.importorskip("torch")

from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousConnectionError

from relight.supervise.rendezvous_thread import EndedElsewhere, Joining


class Handler:
    """A stand-in for torch's handler, with planned answers."""

    def __init__(self, answer: Any = 0, meets: Any = "met") -> None:
        self.answer, self.meets, self.closed = answer, meets, False

    def num_nodes_waiting(self) -> int:
        """Return or raise the planned answer."""
        return self._give(self.answer)

    def next_rendezvous(self) -> Any:
        """Return or raise the planned meeting."""
        return self._give(self.meets)

    def shutdown(self) -> bool:
        """Record the call."""
        self.closed = True
        return True

    def _give(self, planned: Any) -> Any:
        if isinstance(planned, threading.Event):
            planned.wait()
            return 2
        if isinstance(planned, Exception):
            raise planned
        return planned


def test_who_waits_is_asked_without_waiting() -> None:
    """An available answer is returned. A missing one delays no caller, and is returned once it has arrived."""
    assert Joining(lambda: Handler(3), 1).num_nodes_waiting() == 3  # type: ignore[arg-type,return-value]
    silent = threading.Event()
    joining = Joining(lambda: Handler(silent), 1)  # type: ignore[arg-type,return-value]
    began = time.monotonic()
    assert joining.num_nodes_waiting() == joining.num_nodes_waiting() == 0
    assert time.monotonic() - began < 2
    silent.set()
    assert joining.num_nodes_waiting() == 2


def test_a_lost_rendezvous_ends_no_training() -> None:
    """A lost rendezvous counts as without waiting nodes. It is joined through a new connection, and is not closed for
    other nodes."""
    made = [Handler(RendezvousConnectionError("gone"), RendezvousConnectionError("gone")), Handler(meets="again")]
    first = made[0]
    joining = Joining(lambda: made.pop(0), 60)  # type: ignore[arg-type,return-value]
    assert joining.num_nodes_waiting() == joining.num_nodes_waiting() == 0
    assert not joining.shutdown() and not first.closed
    assert joining.next_rendezvous() == "again"
    joining.joined()
    assert joining.shutdown()


def test_a_rendezvous_that_does_not_answer_is_joined_again() -> None:
    """A cut connection may be silent for minutes, although the network works again."""
    made = [Handler(threading.Event()), Handler(meets="again")]
    joining = Joining(lambda: made.pop(0), 60)  # type: ignore[arg-type,return-value]
    assert joining.num_nodes_waiting() == 0
    assert joining.next_rendezvous() == "again"


def test_patience_has_an_end() -> None:
    """After the timeout the connection's error is raised."""
    joining = Joining(Handler, 0.0)  # type: ignore[arg-type]
    error = RendezvousConnectionError("gone")
    with pytest.raises(RendezvousConnectionError):
        joining.lost(error)


def test_errors_other_than_a_lost_connection_are_raised() -> None:
    """For example, a rendezvous that was closed."""
    joining = Joining(lambda: Handler(RendezvousClosedError("over")), 60)  # type: ignore[arg-type,return-value]
    with pytest.raises(RendezvousClosedError):
        joining.num_nodes_waiting()


def test_no_node_waits_for_nodes_that_have_ended_the_job() -> None:
    """A node that was left out may host the rendezvous itself, and would wait there until its timeout."""
    joining = Joining(lambda: Handler(meets=threading.Event()), 60)  # type: ignore[arg-type,return-value]
    answers = iter(["", "", "fenced"])
    joining.over = lambda: next(answers)
    began = time.monotonic()
    with pytest.raises(EndedElsewhere, match="fenced"):
        joining.next_rendezvous()
    assert time.monotonic() - began < 5


def test_a_connection_is_not_tried_again_for_a_job_that_is_over() -> None:
    """The rendezvous' host is gone for good, and the lost connection is the cause."""
    joining = Joining(Handler, 60)  # type: ignore[arg-type]
    joining.over = lambda: "fenced"
    error = RendezvousConnectionError("gone")
    with pytest.raises(EndedElsewhere, match="fenced") as caught:
        joining.lost(error)
    assert caught.value.__cause__ is error


def test_what_goes_wrong_at_the_meeting_is_raised_there() -> None:
    """An error is raised as in the same thread."""
    joining = Joining(lambda: Handler(meets=RendezvousClosedError("over")), 60)  # type: ignore[arg-type,return-value]
    with pytest.raises(RendezvousClosedError):
        joining.next_rendezvous()
