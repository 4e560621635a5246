"""Arguments of saves and stores are accepted or refused by name. No file is ever written outside the store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from examine import unprintable
from forge import RUN, SEQ, Forge, load, request, write

from relight.catalog import Run, resolve
from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.errors import CheckpointNotFound, ConfigError, Fenced, RelightError, UnsafeContent
from relight.format import encode_tree
from relight.format.names import is_run_name
from relight.layout import Bytes, Item
from relight.log import Log, fold
from relight.save_reason import SaveReason
from relight.store import LocalStore, MemoryStore

KEYS = [
    "../x", "../../etc/x", "/etc/x", "a/../../x", "a/../x", "./x", "a/./x", "a//x", "a/", "/", "..", ".", "a\0b", "\0",
    "a/b/../../../x",
]  # fmt: skip

METADATA: list[tuple[str, dict[str, Any]]] = [
    ("user: NaN", {"user": {"a": float("nan")}}),
    ("user: an object", {"user": {"a": object()}}),
    ("user: a function", {"user": {"a": len}}),
    ("user: a lone surrogate", {"user": {"a": "\ud800"}}),
    ("user: too large an integer", {"user": {"a": 10**30}}),
    ("user: five megabytes", {"user": {"a": "x" * 5_000_000}}),
    ("user: nested 40 deep", {"user": {"a": eval("[" * 40 + "]" * 40)}}),
    ("user: nested 5,000 deep", {"user": {"a": None}}),
    ("reason: a lone surrogate", {"reason": SaveReason("user", "\ud800")}),
    ("environment: bytes that are not text", {"environment": {"argv": [os.fsdecode(b"\xff")]}}),
    ("components: a number", {"components": {"a": 5}}),
    ("exact: a number", {"exact": [1]}),
    ("parents: no id", {"parents": ["../../x"]}),
]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("kind", ["local", "memory"])
def test_no_key_leaves_the_store(kind: str, key: str, tmp_path: Path) -> None:
    """A key with ``..``, an empty part or a zero byte is refused by every operation, and nothing is made."""
    (tmp_path / "store").mkdir()
    store = LocalStore(tmp_path / "store") if kind == "local" else MemoryStore()
    before = sorted(tmp_path.rglob("*"))
    for attempt in (
        lambda: store.put_once(key, b"x"),
        lambda: store.write(key, 1),
        lambda: store.get(key, 10),
        lambda: store.open(key),
        lambda: list(store.list(key)),
        lambda: store.delete(key),
        lambda: store.delete_dir(key),
    ):
        with pytest.raises(UnsafeContent):
            attempt()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("deep", ["", "/log", "/log/more"])
def test_nothing_is_written_through_a_link(deep: str, tmp_path: Path) -> None:
    """A symbolic link between the store's top and a new file is refused, also if its target directory exists."""
    outside = tmp_path / "outside"
    (outside / "log").mkdir(parents=True)
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "evil").symlink_to(outside)
    store = LocalStore(tmp_path / "store")
    for attempt in (
        lambda: store.put_once(f"evil{deep}/x", b"x"),
        lambda: store.write(f"evil{deep}/x", 1),
        lambda: store.delete(f"evil{deep}/x"),
    ):
        with pytest.raises(UnsafeContent):
            attempt()
    assert [path.name for path in outside.rglob("*")] == ["log"]


@pytest.mark.parametrize(("name", "more"), METADATA, ids=lambda value: value if isinstance(value, str) else "")
def test_metadata_that_cannot_be_stored_is_refused_by_name(name: str, more: dict[str, Any]) -> None:
    """A save with metadata that no reader accepts fails with a ``RelightError``, and leaves only the log."""
    if name.endswith("5,000 deep"):
        nested: list[Any] = []
        for _ in range(5000):
            nested = [nested]
        more = {"user": {"a": nested}}
    store = MemoryStore()
    attempt = Attempt.begin(store, RUN)
    with pytest.raises(RelightError):
        attempt.save(request(5, **more))
    assert not attempt.history().live
    assert not [key for key in store._files if "/log/" not in key and key != "relight.json"]
    assert attempt.save(request(6)).step == 6


@pytest.mark.parametrize("value", [(1, 2), {"betas": (0.9, 0.95)}, {1: 2}], ids=str)
def test_tuples_in_metadata_do_not_fail_a_save(value: Any) -> None:
    """Metadata that JSON can represent is saved and never reported as damaged."""
    store = MemoryStore()
    assert Attempt.begin(store, RUN).save(request(5, user={"a": value})).step == 5


@pytest.mark.parametrize(
    "item",
    [
        ("", "uint8", (1,), "value", b"x"),
        ("a\0b", "uint8", (1,), "value", b"x"),
        ("x" * 5000, "uint8", (1,), "value", b"x"),
        ("a", "object", (1,), "value", b"x"),
        ("a", "uint8", (-1,), "value", b"x"),
        ("a", "uint8", (2,), "value", b"x"),
        ("a", "uint8", (2**63, 0), "value", b""),
        ("a", "uint8", (1,) * 65, "value", b"x"),
        ("a", "uint8", (1,), "root", b"x"),
    ],
    ids=lambda item: f"{item[0][:5]!r} {item[1]} {item[2][:2]} {item[3]}",
)
def test_tensors_that_cannot_be_stored_are_refused_by_name(item: tuple[str, str, tuple[int, ...], str, bytes]) -> None:
    """A tensor no reader would take is refused before anything is written."""
    store = MemoryStore()
    attempt = Attempt.begin(store, RUN)
    name, dtype, shape, role, data = item
    with pytest.raises(RelightError):
        attempt.save(
            SaveRequest(SaveInfo(step=1), tree=encode_tree(None), items=[Item(name, dtype, shape, role, Bytes(data))])
        )
    assert not [key for key in store._files if "/log/" not in key and key != "relight.json"]


@pytest.mark.parametrize("step", [-1, 10**16, 2**63])
def test_a_step_out_of_range_is_refused(step: int) -> None:
    """Steps are 0 to 10^15."""
    with pytest.raises(RelightError):
        Attempt.begin(MemoryStore(), RUN).save(SaveRequest(SaveInfo(step=step), tree=encode_tree(None), items=[]))


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "/etc",
        "a/b",
        "a\0b",
        "-rf",
        ".x",
        "log",
        "a" * 201,
        "é" * 101,
        "a\n",
        "\x1b[31m",
        " a",
        "\ud800",
    ],
)
def test_no_run_is_named_so(name: str) -> None:
    """A run's name is possible, or refused before the store is touched."""
    store = MemoryStore()
    for attempt in (lambda: Attempt.begin(store, name), lambda: Run(store, name)):
        with pytest.raises(RelightError) as caught:
            attempt()
        assert not unprintable(caught.value.what)
    assert not [key for key in store._files if key != "relight.json"]


@pytest.mark.parametrize("name", ["é", "a\\b", "%2e", "a b", "x\u202ey", "%2e%2e%2f", "a" * 200])
def test_odd_names_never_leave_their_directory(name: str) -> None:
    """A run with an odd name has one ASCII directory in the store. Messages about the run are printable."""
    store = MemoryStore()
    Attempt.begin(store, name)
    (top,) = {key.split("/")[0] for key in store._files if key != "relight.json"}
    assert top.isascii() and is_run_name(top) and Run(store, name).name == top
    assert not unprintable(RelightError(f"run {top!r}").what)


@pytest.mark.parametrize(
    "which",
    ["", "../../x", "/etc/passwd", "\0", "\x1b[31m\n", "x" * 100_000, "c", -1, 10**30, "٣", "Latest", "best\n"],
    ids=repr,
)
def test_no_name_of_a_checkpoint_is_taken_literally(which: Any) -> None:
    """A name is compared, never opened. An absent name is reported in printable characters."""
    history = Run(load(Forge().files), RUN).history()
    with pytest.raises((CheckpointNotFound, ConfigError)) as caught:
        resolve(history, which)
    assert not unprintable(caught.value.what)


@pytest.mark.parametrize(
    "tag", ["", "../x", "/x", "a/../b", "latest", "best", "12", "a\n", "\x1b[31m", "x" * 129, "é", "-x"]
)
def test_no_tag_is_named_so(tag: str) -> None:
    """A tag's name is plain, or refused before anything is appended."""
    store = load(Forge().files)
    before = dict(store._files)
    with pytest.raises(RelightError):
        Run(store, RUN).tag(tag, "c" * 10)
    assert store._files == before


def test_a_fenced_attempt_prints_no_escapes() -> None:
    """The error names the newest attempt in printable characters, whatever the record contains."""
    store = load(Forge().files)
    attempt = Attempt.begin(store, RUN)
    forge = Forge({key: bytes(data) for key, data in store._files.items()})
    forge.append(lambda record: record.update(epoch=4, writer="\x1b[31m\nfake"), SEQ["fence"])
    store._files.update(forge.files)
    with pytest.raises(Fenced) as caught:
        attempt.save(request(40))
    assert not unprintable(caught.value.hint)


def test_a_store_that_lost_its_record_gets_the_same_one_again(tmp_path: Path) -> None:
    """A missing relight.json is created again with the id of the records, also for a new run. No run is lost by it."""
    forge = Forge()
    del forge.files["relight.json"]
    write(forge.files, tmp_path)
    store = LocalStore(tmp_path)
    Attempt.begin(store, "other").save(request(1))
    assert [checkpoint.id[0] for checkpoint in Run(store, RUN).history().live] == ["a", "b", "c"]
    Attempt.begin(store, RUN).save(request(40))
    assert len(Run(store, RUN).history().live) == 4
    assert Run(store, RUN).view().store_id == Run(store, "other").view().store_id == forge.payload(0)["store"]


def test_a_run_of_another_store_continues_under_its_own_id() -> None:
    """If relight.json is another store's, as after a move, a new attempt appends under the store id of the records."""
    forge = Forge()
    before = [checkpoint.id for checkpoint in fold(Log(load(forge.files), RUN).read()).live]
    forge.store_record(lambda record: record.update(id="e" * 32))
    store = load(forge.files)
    Attempt.begin(store, RUN)
    view = Log(store, RUN).read()
    assert [checkpoint.id for checkpoint in fold(view).live] == before and not view.faults
    assert view.records[-1].store == view.store_id == forge.payload(0)["store"] != "e" * 32
