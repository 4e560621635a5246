"""Records of a log as text for people."""

from __future__ import annotations

from relight.format import Record
from relight.format.records import CommitBody, FenceBody, NoteBody, RecallBody, RetireBody, RunBody, SweepBody, TagBody
from relight.units import duration_text, metrics_text, value_text


def writer_text(record: Record) -> str:
    """Return a writer's host and process, without its random suffix."""
    return ":".join(record.writer.split(":")[:2])


def record_text(record: Record) -> str:
    """Return the content of a record."""
    body = record.body
    if isinstance(body, CommitBody):
        facts = [f"{body.id} step {body.step}", body.reason, metrics_text(body.metrics)]
        return ", ".join(fact for fact in facts if fact) + (", suspect" if body.suspect else "")
    if isinstance(body, RetireBody):
        return f"{' '.join(body.ids)} ({body.reason})" + (
            f", may be recalled for {duration_text(body.undo_s)}" if body.undo_s else ""
        )
    if isinstance(body, RecallBody):
        return f"{' '.join(body.ids)}" + (f" ({body.reason})" if body.reason else "")
    if isinstance(body, SweepBody):
        return f"{' '.join(body.ids)} given up"
    if isinstance(body, TagBody):
        details = "".join(f", {word}" for word in (body.by and f"by {body.by}", body.why) if word)
        return (f"{body.name} → {body.id}" if body.id else f"{body.name} removed") + details
    if isinstance(body, FenceBody):
        return f"attempt {record.epoch} takes charge: {writer_text(record)} ({body.reason})"
    if isinstance(body, RunBody):
        return f"run {body.name} begins: {writer_text(record)}"
    assert isinstance(body, NoteBody)
    return " ".join([f"{body.topic}:", *(f"{name}={value_text(value)}" for name, value in body.data.items())])
