"""Subscribers of events that raise errors: neither saves nor training nor other subscribers notice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import relight
from relight.observe import Event, emit, subscribe


@pytest.fixture
def failing() -> Iterator[Callable[[str], None]]:
    """Return a function that subscribes a listener, which raises an error for one event."""
    undo: list[Callable[[], None]] = []

    def add(name: str) -> None:
        def broken(event: Event) -> None:
            if event.name == name:
                raise ConnectionError("the chat server does not answer")

        undo.append(subscribe(broken))

    yield add
    for each in undo:
        each()


def test_the_error_of_a_subscriber_is_logged_once(failing: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The subscribers after it get the event, and one line of the log has the error with its traceback."""
    received: list[Event] = []
    failing("steps.repeated")
    undo = subscribe(received.append)
    with caplog.at_level(logging.WARNING, "relight"):
        for step in range(3):
            emit("steps.repeated", f"step {step} was reported twice", step=step)
    undo()
    assert [event.fields["step"] for event in received] == [0, 1, 2]
    (line,) = [record for record in caplog.records if "subscriber" in record.getMessage()]
    assert "ConnectionError: the chat server does not answer" in line.getMessage() and line.exc_info is not None


@pytest.mark.parametrize("name", ["save.requested", "save.sealed", "save.span", "save.durable", "attempt.started"])
def test_saves_continue_after_the_error_of_a_subscriber(name: str, failing: Any, tmp_path: Path) -> None:
    """Each save becomes a checkpoint, whichever of its events the subscriber cannot handle, and in whichever thread."""
    failing(name)
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.Adam(model.parameters())
    limits = relight.Limits(deadline_s=30, when_busy="queue")
    with relight.Checkpointer(
        tmp_path / "s" / "run",
        model=model,
        optimizer=optimizer,
        save=relight.every(steps=2),
        limits=limits,
        background=True,
    ) as ckpt:
        for step in range(ckpt.restore(), 8):
            model(torch.randn(4, 300)).sum().backward()
            optimizer.step()
            save = ckpt.step(step)
            if save is not None:
                save.wait("20s")
    assert [checkpoint.step for checkpoint in relight.open(tmp_path / "s" / "run").checkpoints()] == [1, 3, 5, 7]
