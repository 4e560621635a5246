"""Requested saves on one node: which rank gets the signal, and which reason the checkpoint has."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from relight.heartbeat import SETTING, take_request
from relight.save_reason import SaveReason, preventive
from relight.supervise import save_requests
from relight.supervise.save_requests import FREQUENT_FOR_S, FREQUENT_INTERVAL_S, SaveRequests
from relight.supervise.shared_pages import SharedPages


class Node:
    """One node with two ranks. ``able``: the ranks that handle SIGUSR1."""

    def __init__(self, directory: Path) -> None:
        self.now, self.able, self.sent = 1000.0, {0, 1}, list[int]()
        self.pids: dict[int, int] = {0: 4711, 1: 4712}
        self.pages = SharedPages(directory)
        self.page = self.pages.begin([0, 1], {})[0][SETTING]
        self.saves = SaveRequests(self.pages, lambda: self.pids, lambda: self.now)

    def poll(self) -> SaveReason | None:
        """Poll, and return the reason that the rank would read."""
        self.saves.poll()
        return take_request(self.page)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """Make a node. Signals are recorded instead of sent."""
    made = Node(tmp_path)
    handles = {4711: 0, 4712: 1}
    monkeypatch.setattr(save_requests, "has_handler", lambda pid, number: handles[pid] in made.able)
    monkeypatch.setattr(os, "kill", lambda pid, number: made.sent.append(pid))
    yield made
    made.saves.close()
    made.pages.close()


def test_a_request_waits_for_a_rank_that_can_receive_it(node: Node) -> None:
    """The signal would end a rank without a handler, so the request is kept until one has a handler."""
    node.able = set()
    node.saves.request_for("anna")
    assert node.poll() is None and not node.sent
    assert "no rank handles SIGUSR1" in node.saves.why_unreachable()
    node.able = {1}
    assert node.saves.why_unreachable() == ""
    assert node.poll() == SaveReason("requested", "asked for by anna") and node.sent == [4712]
    assert node.poll() is None and node.sent == [4712], "each request is sent once"


def test_without_ranks_the_job_is_not_running(node: Node) -> None:
    """Between two incarnations a request is refused with that reason, and is kept."""
    node.pids = {}
    node.saves.request("SIGUSR1 came")
    assert node.saves.why_unreachable() == "the job is not running now"
    assert node.poll() is None and not node.sent
    node.pids = {0: 4711}
    node.saves.poll()
    assert node.sent == [4711]


def test_a_person_has_precedence_over_an_alarm(node: Node) -> None:
    """Whichever request is first, the checkpoint has the person's."""
    for first_person in (True, False):
        for is_person in (first_person, not first_person):
            if is_person:
                node.saves.request_for("anna")
            else:
                node.saves.request(reason=preventive("no room"))
        assert node.poll() == SaveReason("requested", "asked for by anna")


def test_saves_are_more_frequent_for_a_while(node: Node) -> None:
    """After a warning, a save is requested each minute, for ten minutes."""
    node.saves.save_often()
    began = node.now
    while node.now < began + 2 * FREQUENT_FOR_S:
        node.now += 10.0
        node.saves.poll()
    assert len(node.sent) == int(FREQUENT_FOR_S / FREQUENT_INTERVAL_S) - 1
    reason = preventive("saving more often because of an earlier warning")
    node.saves.save_often()
    node.now += FREQUENT_INTERVAL_S
    assert node.poll() == reason


def test_a_rank_that_has_just_ended_is_no_error(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next poll of the ranks reports its end."""

    def refuse(pid: int, number: int) -> None:
        assert number == signal.SIGUSR1
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", refuse)
    node.saves.request("SIGUSR1 came")
    node.saves.poll()
