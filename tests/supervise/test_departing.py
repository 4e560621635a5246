"""A node that is asked to leave: the others learn it, continue if they are enough, and need not wait for it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from relight.prediction import Alarm
from relight.settings.supervise_settings import SuperviseRules, SuperviseSettings
from relight.supervise import departing, launch
from relight.supervise.classify import classify
from relight.supervise.decide import decide
from relight.supervise.departing import Departing, leave
from relight.supervise.facts import Departure, FailureEvidence, Worker
from relight.supervise.incidents import incidents_in
from relight.supervise.rendezvous import Forged
from relight.supervise.supervisor import Supervisor

ENDED = (Worker(0, -15, 5.0), Worker(1, -15, 5.1))


def decided(facts: FailureEvidence) -> tuple[str, str]:
    """Return the action and the reason of the decision."""
    decision = decide(classify(facts), (), SuperviseRules(), 0.0)
    return decision.action, decision.reason


def test_the_others_continue_if_they_are_enough() -> None:
    """Ranks end with those of a node that was asked to leave: resume with the rest, or end if too few nodes are left."""
    assert decided(FailureEvidence(ENDED, departure=Departure("node b (SIGTERM came)", 2, 2))) == (
        "resume",
        "asked to leave: node b (SIGTERM came): 2 nodes continue",
    )
    assert decided(FailureEvidence(ENDED, departure=Departure("node b (SIGTERM came)", 1, 2))) == (
        "end",
        "asked to leave: node b (SIGTERM came): too few nodes are left, 1 of at least 2",
    )
    assert decided(FailureEvidence(ENDED))[0] == "end", (
        "no node has announced that it goes: the ranks themselves were asked"
    )
    assert (
        decided(FailureEvidence(ENDED, asked_to_end="SIGTERM came", departure=Departure("node b", 2, 1)))[0] == "end"
    ), "this node is asked as well"


def test_a_failure_of_its_own_is_not_a_departure() -> None:
    """A rank that fails by itself decides what is done, also while another node goes."""
    fenced = Worker(0, 1, 5.0, "relight.errors.Fenced: attempt 3 of this run was superseded by attempt 4")
    failure = classify(FailureEvidence((fenced, ENDED[1]), departure=Departure("node b", 2, 1)))
    assert failure.kind == "fenced" and failure.departure is None


def test_what_a_node_announces_the_others_read() -> None:
    """Others read which nodes leave, and whether enough are left. A job of one node has no other to announce it to."""
    store = HashStore()
    first, second, third = Departing(2), Departing(2), Departing(2)
    assert third.others(store, 3) is None
    first.announce(store, 0, 3, "node a (SIGTERM came)")
    first.announce(store, 0, 3, "again")
    assert first.others_continue()
    assert third.others(store, 3) == Departure("node a (SIGTERM came)", 2, 2)
    second.announce(store, 1, 3, "node b (SIGINT came)")
    assert not second.others_continue() and not first.others_continue()
    assert third.others(store, 3) == Departure("node a (SIGTERM came), node b (SIGINT came)", 1, 2)
    alone = Departing(1)
    alone.announce(HashStore(), 0, 1, "node a")
    assert not alone.others_continue() and alone.others(HashStore(), 1) is None


def test_a_store_that_does_not_answer_costs_little_of_the_grace_period(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are signalled after two seconds at most, here a tenth. An error counts as no answer."""
    monkeypatch.setattr(departing, "_ANSWER_S", 0.1)
    silent: Any = SimpleNamespace(set=lambda *_: threading.Event().wait(), check=lambda *_: threading.Event().wait())
    broken: Any = SimpleNamespace(set=lambda *_: 1 / 0, check=lambda *_: 1 / 0)
    for store in (silent, broken):
        began, node = time.monotonic(), Departing(1)
        node.announce(store, 0, 2, "node a")
        assert node.others(store, 2) is None and not node.others_continue()
        assert time.monotonic() - began < 10


class Handler:
    """The part of torch's dynamic handler that a departure uses. The others meet again after ``meets_s``."""

    def __init__(self, meets_s: float) -> None:
        self.did: list[str] = []
        self._state = SimpleNamespace(round=3, complete=True)
        self._state_holder = SimpleNamespace(state=self._state, sync=self._sync)
        self._op_executor = SimpleNamespace(run=lambda *_: self.did.append("left"))
        self._until = time.monotonic() + meets_s

    def _stop_heartbeats(self) -> None:
        self.did.append("silent")

    def _sync(self) -> None:
        if time.monotonic() > self._until:
            self._state.round = 4


def test_a_node_leaves_the_rendezvous_and_serves_it_until_the_others_have_met() -> None:
    """The machine that serves the rendezvous waits for their next round, within its grace period; another machine goes at once."""
    for endpoint, continues, meets_s, grace_s, least, most in (
        ("127.0.0.1:29400", True, 0.3, 20.0, 0.3, 10.0), ("127.0.0.1:29400", True, 60.0, 0.5, 0.5, 5.0),
        ("127.0.0.1", True, 0.3, 20.0, 0.3, 10.0), ("127.0.0.1:29400", False, 60.0, 20.0, 0.0, 5.0), ("192.0.2.1:29400", True, 60.0, 20.0, 0.0, 5.0),
    ):  # fmt: skip
        handler, began = Handler(meets_s), time.monotonic()
        leave(handler, endpoint, continues, grace_s)  # type: ignore[arg-type]
        assert handler.did == ["silent", "left"] and least <= time.monotonic() - began < most, endpoint
    leave(SimpleNamespace(), "127.0.0.1:29400", True, 20.0)  # type: ignore[arg-type] # a handler without a state of its own


@pytest.mark.parametrize(
    ("error", "action"),
    [
        (RendezvousTimeoutError(), "stop"),
        (RendezvousConnectionError("gone"), "exclude_node"),
        (RendezvousClosedError(), ""),
        (Forged("it"), "exclude_node"),
    ],
    ids=["too few", "cut off", "closed by another", "forged"],
)
def test_an_end_without_a_failure_is_written_down(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, action: str
) -> None:
    """Too few nodes stop the job; a node that is cut off leaves it to the others. A node that another has ended writes nothing."""

    class Broken:
        def __init__(self, *, supervisor: Supervisor, **_: Any) -> None:
            self._supervisor = supervisor

        def run(self) -> None:
            self._supervisor.begin([0], {}, "life 1")
            raise error

    for name in (
        "TORCHELASTIC_SIGNALS_TO_HANDLE",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    ):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("RELIGHT_JOB_SECRET", "none")
    monkeypatch.setattr(launch.Meetings, "handler", lambda self: SimpleNamespace(shutdown=lambda: True))
    monkeypatch.setattr(launch, "SupervisedAgent", Broken)
    arguments = [
        "--nnodes",
        "2:3",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:1",
        "--rdzv-id",
        "j",
        "train.py",
    ]
    assert launch.launch(launch.parse(arguments), SuperviseSettings(), tmp_path).code == 1
    assert [(incident.action, incident.meeting) for incident in incidents_in(tmp_path)] == (
        [(action, "life 1 ended")] if action else []
    )


def test_a_machine_that_is_drained_has_left(tmp_path: Path) -> None:
    """Its incident has the decision ``leave``: an operator sees that a node is excluded."""
    watched = Supervisor(SuperviseSettings(), "job", tmp_path)
    try:
        watched.foresee(Alarm(0.0, "ecc", "drain node", "corrected errors rise", "so", 0.9, "rules", 0.7), drain=True)
        watched.begin([0], {})
        assert watched.ended("SIGTERM").action == "exclude_node"
    finally:
        watched.close()
