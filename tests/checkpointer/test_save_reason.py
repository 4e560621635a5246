"""The reason of a save. Its kind decides on urgency, retention and tiers. Its text is only for people."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import relight
from relight.format.records import CommitBody, plain_body
from relight.policy import TriggerInput
from relight.policy.triggers import reason_by_step, reason_now
from relight.save_reason import ASKED, END, SaveReason, of_exception, of_record, of_signal, preventive, requested_by


def body_of(run: Path) -> CommitBody:
    """Return the newest COMMIT."""
    return relight.open(run).checkpoints()[-1].body


@pytest.mark.parametrize(
    "text",
    [
        "SIGTERM",
        "exception: ValueError",
        "adaptive, every 3 s",
        "asked for by anna",
        "preventive: heat",
        "end",
        "import",
    ],
)
@pytest.mark.parametrize("background", [True, False])
def test_a_users_text_decides_nothing(tmp_path: Path, text: str, background: bool) -> None:
    """``save(reason=)`` may be any text. Before, some texts made a save urgent, final, or one that tiers hold back."""
    run = tmp_path / "s" / "run"
    with relight.Checkpointer(run, model=torch.nn.Linear(2, 2), save=None, background=background) as ckpt:
        ckpt.restore()
        save = ckpt.save(3, reason=text)
        assert save.reason == text and save.why == SaveReason("user", text)
    body = body_of(run)
    assert body.reason == text and body.save_reason == SaveReason("user", text)
    assert not (body.save_reason.is_urgent or body.save_reason.is_routine or body.save_reason.is_final)


def test_each_trigger_names_its_kind() -> None:
    """If several triggers are due, the first one that is not adaptive gives the kind, so that tiers get the checkpoint
    at once."""

    class Own(relight.Trigger):
        def due(self, facts: TriggerInput) -> str | None:
            return "adaptive, by its own text"

    facts = TriggerInput(
        step=3, now_s=100.0, last_save_step=None, last_save_s=0.0, metrics={"loss": 1.0}, interval_s=10.0
    )
    every, best, adaptive = relight.every(steps=2), relight.best("loss"), relight.adaptive()
    for trigger, kind in (
        (every, "every"),
        (best, "best"),
        (adaptive, "adaptive"),
        (Own(), "trigger"),
        (adaptive | every, "every"),
    ):
        reason = reason_now(trigger, facts)
        assert reason is not None and reason.kind == kind
    both = reason_now(adaptive | (best | every), facts)
    assert both == SaveReason("best", "adaptive, every 10 s, best loss: 1, every 2 steps")
    assert reason_by_step(adaptive | every, 3, 2) == SaveReason("every", "every 2 steps")
    assert reason_now(None, facts) is None and reason_now(relight.every(steps=100), facts) is None


def test_properties_of_each_kind() -> None:
    """Urgent: a caller waits for it. Final: the process ends after it. Routine: tiers may postpone it."""
    expected = {
        ASKED: (False, False, False), END: (False, True, False), of_signal("SIGTERM"): (True, True, False),
        of_signal("SIGUSR1"): (True, False, False), of_exception(ValueError()): (True, True, False), requested_by("anna"): (True, False, False),
        preventive("heat"): (True, False, False), SaveReason("adaptive", "adaptive, every 3 s"): (False, False, True),
        SaveReason("every", "every 2 steps"): (False, False, True),
        SaveReason("best", "best loss: 1"): (False, False, False),
    }  # fmt: skip
    assert {reason: (reason.is_urgent, reason.is_final, reason.is_routine) for reason in expected} == expected


@pytest.mark.parametrize(
    ("text", "kind", "by"),
    [
        ("SIGTERM", "signal", "SIGTERM"), ("SIGUSR1", "signal", "SIGUSR1"), ("asked for by anna: now", "requested", ""),
        ("preventive: heat", "preventive", ""), ("exception: ValueError", "exception", ""), ("adaptive, every 3 s", "adaptive", ""),
        ("every 2 steps", "every", ""), ("best loss: 1", "best", ""), ("end", "end", ""), ("import", "import", ""),
        ("branched off x", "branch", ""), ("asked", "user", ""), ("dcp.save", "user", ""), ("", "user", ""),
    ],
)  # fmt: skip
def test_records_of_earlier_versions_are_mapped_by_their_text(text: str, kind: str, by: str) -> None:
    """Records without a kind are mapped by their text, and so are unknown kinds."""
    for recorded in ("", "of another version"):
        reason = of_record(text, recorded, "")
        assert (reason.kind, reason.text, reason.by) == (kind, text, by)


def test_the_record_has_kind_and_signal(tmp_path: Path) -> None:
    """Empty fields are left out, so records are encoded as by earlier versions."""
    run = tmp_path / "s" / "run"
    with relight.Checkpointer(run, model=torch.nn.Linear(2, 2), save=relight.every(steps=1), background=False) as ckpt:
        ckpt.restore()
        ckpt.step(0)
        ckpt._signals._on_signal("SIGUSR1") if ckpt._signals else None
    plain = plain_body(body_of(run))
    assert plain["reason_kind"] == "every" and "reason_by" not in plain
