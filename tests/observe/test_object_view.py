"""``repr`` and HTML of objects: short, escaped, and without reading a store."""

from __future__ import annotations

from pathlib import Path

import pytest

import relight
from relight.checkpointer import Checkpointer
from relight.log.checkpoint_list import ROWS_MAX, CheckpointList
from relight.observe.object_view import html_table
from relight.save_reason import SaveReason
from relight.store.local import LocalStore

EVIL = "<script>alert(1)</script>\x1b[31m\u202e" + "x" * 500


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints."""
    for step in (1, 2):
        relight.save(
            tmp_path / "runs" / "demo", {"x": {"a": step}}, step=step, metrics={"loss": 0.5, "a": 1, "b": 2, "c": 3}
        )
    return tmp_path / "runs" / "demo"


def test_a_checkpointer_shows_run_step_and_saves(run: Path) -> None:
    """It names what was restored, then what was saved, then why it ended."""
    ckpt = relight.Checkpointer(run, state={"x": {"a": 0}}, save=None, signals=False)
    assert repr(ckpt) == f"<Checkpointer {run}>"
    ckpt.restore()
    assert "step 2, restored checkpoint step 2 (" in repr(ckpt)
    save = ckpt.save(3)
    assert f"newest checkpoint step 3 ({save.id}, " in repr(ckpt) and "failed" not in repr(ckpt)
    assert "state durable" in repr(save) and str(save.id) in save._repr_html_()
    ckpt.close()
    assert "ended close() was called" in repr(ckpt) and "<table" in ckpt._repr_html_()


def test_views_read_no_store(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the store has become unreachable, the views have what was known."""
    store = relight.open(run)
    opened, checkpoints = store.run(), store.checkpoints()
    opened.history()
    ckpt = relight.Checkpointer(run, state={"x": {"a": 0}}, save=None, signals=False)
    for name in ("get", "list", "open"):
        monkeypatch.setattr(LocalStore, name, lambda *_: pytest.fail("the store was read"))
    for shown in (store, opened, checkpoints[0], ckpt):
        assert repr(shown) and "<table" in shown._repr_html_()
    assert f"newest step 2 ({checkpoints[-1].id}, " in repr(store) and "checkpoints 2" in repr(opened)
    assert repr(checkpoints[0]).startswith("<Checkpoint step 1: id ")
    assert "loss=0.5 a=1 b=2 …" in repr(checkpoints[0]), "only the first metrics"


def test_a_list_of_checkpoints_is_a_table(run: Path) -> None:
    """The newest is first, and a long list is cut."""
    (first, second) = relight.open(run).checkpoints()
    html = relight.open(run).checkpoints()._repr_html_()
    assert html.index(second.id) < html.index(first.id) and html.count("<tr") == 3
    assert CheckpointList([first] * 1000)._repr_html_().count("<tr") == ROWS_MAX + 1
    assert CheckpointList()._repr_html_().count("<tr") == 1


def test_texts_are_escaped_and_short() -> None:
    """Names and reasons from elsewhere are no HTML and no codes of a terminal. Passwords of addresses are left out."""
    html = html_table(EVIL, ("a", EVIL), [(EVIL, EVIL)])
    assert "<script" not in html and "\x1b" not in html and "\u202e" not in html and len(html) < 6000
    save = relight.Save(1, SaveReason("user", EVIL))
    assert "\x1b" not in repr(save) and "<script" not in save._repr_html_()
    assert "secret" not in html_table("s3://user:secret@host/runs", (), [("store", "s3://user:secret@host/runs")])
    assert "color" not in html, "readable in dark and light themes"


def test_an_object_that_is_half_made_is_shown() -> None:
    """An object can be shown after its construction has failed: its view does not raise."""
    assert repr(Checkpointer.__new__(Checkpointer)) == "<Checkpointer (AttributeError)>"
    assert "<table" in Checkpointer.__new__(Checkpointer)._repr_html_()
