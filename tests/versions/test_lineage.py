"""The lineage of checkpoints as text, list and picture, and users' notes on checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import relight
from relight.catalog.run import Run
from relight.errors import CheckpointNotFound, ConfigError
from relight.format.records import CommitBody
from relight.log import Checkpoint
from relight.store import open_bytes
from relight.versions.branching import branch
from relight.versions.describing import describe, name_of
from relight.versions.lineage import Node, draw, lineage
from relight.versions.picture import picture
from relight.versions.stages import notes_of, promote, promotions, stages_of, take_back, write_note


def train(url: Path, steps: int, keep: int | None = None) -> None:
    """Train for some more steps."""
    weights = torch.zeros(10)
    rules = relight.keep(last=keep) if keep else None
    with relight.Checkpointer(
        url, weights=weights, loader={"position": 7}, save=relight.every(steps=1), keep=rules
    ) as ckpt:
        start = ckpt.restore()
        for step in range(start, start + steps):
            ckpt.step(step, loss=1.0)


def run_at(url: Path) -> Run:
    """Open a run for reading."""
    return Run(open_bytes(url.parent), url.name)


def nodes(*edges: tuple[str, str]) -> list[Node]:
    """Return checkpoints that are named by letters, newest first, each with its parents."""
    made = []
    for number, (name, parents) in enumerate(edges):
        body = CommitBody(
            id=name, step=100 - number, dir="d", root="", root_bytes=1, parents=[], reason="", metrics={}, logical_bytes=0, stored_bytes=0,
            new_bytes=0, requires=[],
        )  # fmt: skip
        made.append(
            Node(
                Checkpoint(number, "", 1, body), "r", parents=[(parent.lower(), parent.isupper()) for parent in parents]
            )
        )
    return made


@pytest.mark.parametrize(
    ("edges", "drawn"),
    [
        ([("c", "b"), ("b", "a"), ("a", "")], ["* c", "* b", "* a"]),
        ([("d", "b"), ("c", "b"), ("b", "a"), ("a", "")], ["* d", "| * c", "|/", "* b", "* a"]),
        ([("d", "B"), ("b", "")], ["* d", "* b"]),
        ([("e", "a"), ("d", "a"), ("c", "A"), ("a", "")], ["* e", "| * d", "| | * c", "|_|/", "|/", "* a"]),
        ([("m", "ab"), ("b", "o"), ("a", "o"), ("o", "")], ["* m", "|\\", "| * b", "* | a", "|/", "* o"]),
        ([("z", ""), ("a", "")], ["* z", "* a"]),
    ],
)
def test_the_drawing(edges: list[tuple[str, str]], drawn: list[str]) -> None:
    """A line, a fork, something left out, three that meet, an average of two, two that have nothing in common."""
    lines = [
        f"{line.graph.rstrip()}{' ' + line.node.id if line.node is not None else ''}" for line in draw(nodes(*edges))
    ]
    assert lines == drawn


def test_all_runs_of_a_store_are_one_graph(tmp_path: Path) -> None:
    """A branch's parent is its checkpoint in the other run. Retired checkpoints between are skipped.

    For one run, only its ancestors are shown.
    """
    base, other = tmp_path / "base", tmp_path / "other"
    train(base, 3)
    branch(run_at(base), run_at(base).history().live[1], "other")
    train(other, 4, keep=2)
    train(base, 1)
    train(tmp_path / "alone", 1)
    nodes, silent = lineage(open_bytes(tmp_path))
    assert not silent and len(nodes) == 4 + 2 + 1
    by_name = {(node.run, node.checkpoint.step): node for node in nodes}
    first = by_name["other", 4]
    assert first.parents == [(by_name["base", 1].id, True)] and by_name["other", 5].parents == [(first.id, False)]
    order = [node.id for node in nodes]
    assert all(order.index(node.id) < order.index(parent) for node in nodes for parent, _ in node.parents)
    assert {node.run for node in lineage(open_bytes(tmp_path), "other")[0]} == {"base", "other"}
    assert len(lineage(open_bytes(tmp_path), "other")[0]) == 4  # base@1 and its parent
    picture(nodes, str(tmp_path / "a" / "graph.png"))
    assert (tmp_path / "a" / "graph.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ConfigError, match="no kind of picture"):
        picture(nodes, str(tmp_path / "graph.doc"))


def test_a_run_with_an_unreadable_log_hides_no_other(tmp_path: Path) -> None:
    """An unreadable run is named with the reason."""
    train(tmp_path / "base", 1)
    train(tmp_path / "bad", 1)
    for record in (tmp_path / "bad" / "log").iterdir():
        record.write_bytes(b"x")
    nodes, silent = lineage(open_bytes(tmp_path))
    assert {node.run for node in nodes} == {"base"} and [name for name, _ in silent] in (["bad"], [])


def test_stages_move_on_and_back(tmp_path: Path) -> None:
    """The log has author, time and reason of a stage. The checkpoint is kept, and the last stage has no next one."""
    train(tmp_path / "run", 4)
    run = run_at(tmp_path / "run")
    first, second = run.history().live[:2]
    assert [promote(run, first, by="ann", why=f"reason {n}") for n in range(3)] == [
        "candidate",
        "staging",
        "production",
    ]
    with pytest.raises(ConfigError, match="no later stage"):
        promote(run, first)
    promote(run, second, "production", by="bob")
    assert (
        stages_of(run.history(), first.id) == ["candidate", "staging"]
        and relight.open(tmp_path / "run").latest().step == 3
    )
    assert take_back(run, "production", by="bob") == first.id
    moves = promotions(run.view().records, "production")
    assert [(move.id, move.by, move.why) for move in moves] == [
        (first.id, "ann", "reason 2"),
        (second.id, "bob", ""),
        (first.id, "bob", "taken back"),
    ]
    with pytest.raises(CheckpointNotFound):
        take_back(run, "staging")
    with pytest.raises(ConfigError, match="is no stage"):
        promote(run, first, "live")
    assert relight.open(tmp_path / "run").plan_prune(relight.keep(last=1)).going == [
        run.history().live[1].id,
        run.history().live[2].id,
    ]


def test_notes_stay(tmp_path: Path) -> None:
    """Notes are in order with their authors. Empty and too long notes are refused."""
    train(tmp_path / "run", 2)
    run = run_at(tmp_path / "run")
    checkpoint = run.history().live[0]
    write_note(run, checkpoint, "first", by="ann")
    write_note(run, checkpoint, "second \x1b[31m", by="bob")
    assert [(note.text, note.by) for note in notes_of(run.history(), checkpoint.id)] == [
        ("first", "ann"),
        ("second \x1b[31m", "bob"),
    ]
    for text in ("", "  ", "x" * 5000):
        with pytest.raises(ConfigError):
            write_note(run, checkpoint, text)


def test_what_describes_it(tmp_path: Path) -> None:
    """A name by the nearest tag, the parents, the branches, where in the data it stands."""
    train(tmp_path / "run", 3)
    run = run_at(tmp_path / "run")
    first, second, third = run.history().live
    assert name_of(run.history(), "run", third) == "run@2"
    run.tag("good", first.id)
    assert [name_of(run.history(), "run", checkpoint) for checkpoint in (first, second, third)] == [
        "run@good",
        "run@good+1",
        "run@good+2",
    ]
    branch(run, second, "other")
    facts = describe(run.view(), run.history(), "run", run.open(second))
    assert (facts["name"], facts["branches"], facts["run"]) == ("run@good+1", ["other"], "run")
    assert facts["origin"] == [{"id": first.id, "step": 0}] and facts["children"] == [third.id]
    assert facts["data"] == {"loader/position": 7}
    other = run_at(tmp_path / "other")
    facts = describe(other.view(), other.history(), "other", other.open(other.history().live[0]))
    assert (facts["name"], facts["children"]) == ("other@1", [])
