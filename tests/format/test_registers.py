"""The registers of NOTE topics and of root keys: each entry is complete, and nothing bypasses them."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import msgspec
import pytest

import relight
from relight.format.records import FenceBody, NoteBody
from relight.format.root_keys import MICRO_STEP, RANKS, ROOT_KEYS
from relight.format.topics import COPIED, HOLD, ROLLED_BACK, TOPICS, CopiedNote, HoldNote, RollbackNote

SRC = Path(relight.__file__).parent
MADE_HERE = {"format/topics.py", "format/records.py"}
"""Files that may construct a NOTE."""


@functools.cache
def sources() -> dict[str, ast.Module]:
    """Return the syntax tree of each file, by its path below ``relight``. Proofs write NOTEs of their own."""
    files = [file for file in SRC.rglob("*.py") if "testing" not in file.parts]
    return {str(file.relative_to(SRC)): ast.parse(file.read_text()) for file in files}


def test_no_module_writes_or_compares_a_topic_by_itself() -> None:
    """Only the register constructs NOTEs, and no module compares a topic with a string."""
    wrong = []
    for name, tree in sources().items():
        for node in ast.walk(tree):
            is_made = (
                isinstance(node, ast.Call) and getattr(node.func, "id", "") == "NoteBody" and name not in MADE_HERE
            )
            is_compared = (
                isinstance(node, ast.Compare)
                and any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in node.comparators)
                and getattr(node.left, "attr", "") == "topic"
            )
            if is_made or is_compared:
                wrong.append(f"{name}:{node.lineno}")
    assert not wrong, f"use a Topic of format/topics.py: {wrong}"


@pytest.mark.parametrize("entry", [*TOPICS.values(), *ROOT_KEYS.values()], ids=repr)
def test_the_named_modules_exist_and_use_the_entry(entry: object) -> None:
    """Each entry names the modules that write and read it; each of them uses its constant."""
    register = "topics" if entry in TOPICS.values() else "root_keys"
    text = (SRC / "format" / f"{register}.py").read_text()
    [constant] = re.findall(
        rf'^([A-Z_]+) = (?:Topic|RootKey)\(\s*"{re.escape(entry.name.removeprefix("relight."))}"', text, re.M
    )  # type: ignore[attr-defined]
    for module in {*entry.written_by, *entry.read_by}:  # type: ignore[attr-defined]
        file = SRC / f"{module.replace('.', '/')}.py"
        assert re.search(rf"\b{constant}\b", file.read_text()), f"{module} does not use {constant}"
    users = {
        name.removesuffix(".py").replace("/", ".")
        for name, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and node.module == f"relight.format.{register}"
        and any(alias.name == constant for alias in node.names)
    }
    assert users == {*entry.written_by, *entry.read_by}  # type: ignore[attr-defined]


def test_no_root_key_is_spelled_outside_the_register() -> None:
    """No other module contains the name of a root key as a string."""
    wrong = [
        f"{name}:{node.lineno}"
        for name, tree in sources().items()
        for node in ast.walk(tree)
        if name != "format/root_keys.py" and isinstance(node, ast.Constant) and node.value in ROOT_KEYS
    ]
    assert not wrong


def test_a_body_survives_writing_and_reading() -> None:
    """A body comes back equal. The record has no field with the value None."""
    note = COPIED.note(CopiedNote(tier="cold", id="abc"))
    assert note.data == {"tier": "cold", "id": "abc"} and COPIED.read(note) == CopiedNote(tier="cold", id="abc")
    assert HOLD.note(HoldNote(id="abc")).data == {"id": "abc", "why": ""}


@pytest.mark.parametrize(
    "data", [{}, {"before": "3"}, {"before": True}, {"before": 3, "skip": 4}, {"before": None}], ids=str
)
def test_a_body_that_does_not_fit_is_ignored(data: dict[str, str | int | float | bool | None]) -> None:
    """A NOTE with missing fields or values of other types has no body, and another record has none either."""
    assert ROLLED_BACK.read(NoteBody(topic="rolled back", data=data)) is None
    assert ROLLED_BACK.read(FenceBody(attempt="a", reason="start")) is None


def test_unknown_fields_of_a_newer_version_are_ignored() -> None:
    """A field that this version does not know does not make the others unreadable."""
    assert ROLLED_BACK.read(NoteBody(topic="rolled back", data={"before": 3, "new": 1})) == RollbackNote(before=3)


def test_root_keys_of_another_type_are_ignored() -> None:
    """A root is data: a value of another type is no value."""
    assert RANKS.read({"relight.ranks": "4"}) is None and RANKS.read({}) is None
    assert MICRO_STEP.read(MICRO_STEP.field(7)) == 7


def test_structs_of_topics_tolerate_additions() -> None:
    """No body type forbids unknown fields: a newer version may add some."""
    assert not any(
        topic.kind.__struct_config__.forbid_unknown_fields
        for topic in TOPICS.values()
        if isinstance(topic.kind, type) and issubclass(topic.kind, msgspec.Struct)
    )
