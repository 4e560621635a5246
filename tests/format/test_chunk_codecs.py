"""The register of chunk codecs: built-in ones, those of other packages, and what goes wrong with those."""

from __future__ import annotations

import ast
import os
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import relight
from relight.agent.launch import address_of
from relight.catalog import Run
from relight.comm.local_sockets import LocalDirectory
from relight.commit import plugin_codecs
from relight.errors import ConfigError, CorruptCheckpoint, RelightError, UnsafeContent
from relight.format import chunk_codecs
from relight.format.chunk_codecs import (
    BUILT_IN,
    FEATURE,
    ChunkCodec,
    DecodeContext,
    EncodeContext,
    EncodedChunk,
    codec_of,
    plugin,
)
from relight.observe import Event, subscribe
from relight.reader import verify_checkpoint
from relight.store import open_bytes

GOOD = """
import ctypes, os, sys, zlib
from relight.format.chunk_codecs import ChunkCodec, EncodedChunk

class Good(ChunkCodec):
    name, code = "good", 100

    def encode(self, data, context):
        return EncodedChunk(zlib.compress(data, 1))

    def decode(self, stored, into, context):
        into[:] = zlib.decompress(stored)

class Wrong(Good):
    name, code = "wrong", 101

    def decode(self, stored, into, context):
        into[:] = bytes(len(into))

class Raising(Good):
    name, code = "raising", 102

    def encode(self, data, context):
        raise ValueError("no")

class Halves(ChunkCodec):
    name, code, exact, relative_error = "halves", 103, False, 1 / 2048

    def encode(self, data, context):
        import numpy as np
        if context.dtype != "float32" or len(data) % 4:
            return None
        stored = np.frombuffer(data, "<f4").astype("<f2")
        return EncodedChunk(stored.tobytes(), memoryview(stored.astype("<f4").tobytes()))

    def decode(self, stored, into, context):
        import numpy as np
        into[:] = np.frombuffer(stored, "<f2").astype("<f4").tobytes()

class Delta(ChunkCodec):
    name, code, needs_base = "delta", 104, True

    def encode(self, data, context):
        if context.base is None:
            return None
        import numpy as np
        return EncodedChunk(zlib.compress((np.frombuffer(data, "u1") ^ np.frombuffer(context.base, "u1")).tobytes(), 1))

    def decode(self, stored, into, context):
        import numpy as np
        into[:] = (np.frombuffer(into, "u1") ^ np.frombuffer(zlib.decompress(stored), "u1")).tobytes()

class Writing(Good):
    name, code = "writing", 106

    def encode(self, data, context):
        data[0] = 1
        return EncodedChunk(zlib.compress(data, 1))

class Hungry(Good):
    name, code = "hungry", 108

    def encode(self, data, context):
        raise MemoryError

IN_AGENT = "relight.agent.server" in sys.orig_argv

class Segfault(Good):
    name, code = "segfault", 109

    def encode(self, data, context):
        if IN_AGENT:
            ctypes.string_at(0)
        return super().encode(data, context)

class Exit(Good):
    name, code = "exit", 110

    def encode(self, data, context):
        if IN_AGENT:
            os._exit(7)
        return super().encode(data, context)

class Empty(Good):
    name, code = "empty", 107

    def encode(self, data, context):
        return EncodedChunk(b"")

class Twin(Good):
    name, code = "twin", 100

class Low(Good):
    name, code = "low", 3

class Alias(Good):
    name, code = "other", 105
"""
ENTRIES = "good Good;wrong Wrong;raising Raising;halves Halves;delta Delta;writing Writing;empty Empty;hungry Hungry;segfault Segfault;exit Exit;twin Twin;low Low;alias Alias;absent Absent"


@pytest.fixture
def codecs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a package with several codecs for this process."""
    info = tmp_path / "package" / "some_codecs-1.0.dist-info"
    info.mkdir(parents=True)
    (tmp_path / "package" / "some_codecs.py").write_text(GOOD)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-codecs\nVersion: 1.0\n")
    lines = [f"{name} = some_codecs:{kind}" for name, kind in (entry.split() for entry in ENTRIES.split(";"))]
    (info / "entry_points.txt").write_text("[relight.codecs]\n" + "\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path / "package"))
    chunk_codecs._plugins.cache_clear()
    yield
    chunk_codecs._plugins.cache_clear()
    sys.modules.pop("some_codecs", None)


def table(seed: int = 0) -> torch.nn.Linear:
    """Return a module with compressible weights."""
    torch.manual_seed(seed)
    module = torch.nn.Linear(512, 512)
    with torch.no_grad():
        module.weight[64:] = 0.0
    return module


def save(path: Path, module: torch.nn.Module, step: int = 0, **rules: object) -> relight.Save:
    """Save once, in this process."""
    compact = relight.Compact(**rules)  # type: ignore[arg-type]
    with relight.Checkpointer(path, model=module, save=None, compact=compact, background=False) as ckpt:
        ckpt.restore()
        saved = ckpt.save(step)
    return saved


def codecs_of(path: Path) -> set[str]:
    """Return the codecs of the newest checkpoint's chunks."""
    run = Run(open_bytes(str(path.parent)), path.name)
    packs = [pack for part in run.open(run.history().live[-1]).parts for pack in part.packs]
    return {piece.codec.name for pack in packs if pack.stored is not None for piece in pack.stored.pieces}


def test_each_built_in_codec_is_found_by_its_code() -> None:
    """Code and base lead to one codec. Names are unique. Only planes and deltas share a code."""
    assert all(codec_of(codec.code, codec.needs_base) is codec for codec in BUILT_IN)
    assert len({codec.name for codec in BUILT_IN}) == 5
    assert codec_of(False) is BUILT_IN[0] and codec_of(True) is BUILT_IN[1] and codec_of(True, True) is BUILT_IN[2]


@pytest.mark.parametrize(
    ("code", "base"), [(0, True), (2, True), (3, True), (4, False), (15, False), (77, False), (255, False), (-1, False)]
)
def test_other_codes_are_refused(code: int, base: bool) -> None:
    """A code without a codec, and a base where none belongs, are refused."""
    with pytest.raises(UnsafeContent):
        codec_of(code, base)


def test_a_chunk_comes_back_from_an_installed_codec(codecs: None, tmp_path: Path) -> None:
    """The run's tensors are stored by the named codec, the root names it, and every byte verifies."""
    path, module = tmp_path / "runs/demo", table()
    assert save(path, module, plugin_codecs={"model/*": "good"}).error is None
    assert "good" in codecs_of(path)
    run = Run(open_bytes(str(path.parent)), path.name)
    newest = run.history().live[-1]
    assert FEATURE + "good" in run.open(newest).root.features and run.open(newest).root.exact == []
    assert verify_checkpoint(run.store, run.view(), newest) == []
    again = table(1)
    with relight.Checkpointer(path, model=again, save=None, background=False) as ckpt:
        assert ckpt.restore() == 1
    assert torch.equal(again.weight, module.weight)


def test_a_codec_with_a_base_stores_differences(codecs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A background save stores differences from the save before, coded in the agent by the codec of the package."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'package'}:{os.environ.get('PYTHONPATH', '')}")
    path, module = tmp_path / "runs/demo", table()
    compact = relight.Compact(plugin_codecs={"model/*": "delta"}, full_every=8, codecs="always")
    with relight.Checkpointer(path, model=module, save=None, compact=compact, background=True) as ckpt:
        for step in range(4):
            with torch.no_grad():
                module.weight[:64] += 1e-3
            ckpt.save(step).wait()
    assert "delta" in codecs_of(path)
    again = table(1)
    with relight.Checkpointer(path, model=again, save=None, background=False) as ckpt:
        ckpt.restore()
    assert torch.equal(again.weight, module.weight)


def test_an_inexact_codec_is_recorded_as_such(codecs: None, tmp_path: Path) -> None:
    """The root names what is not exact and the largest error, the COMMIT the same error."""
    path = tmp_path / "runs/demo"
    save(path, table(), plugin_codecs={"model/*": "halves"})
    assert "halves" in codecs_of(path)
    run = Run(open_bytes(str(path.parent)), path.name)
    newest = run.history().live[-1]
    assert run.open(newest).root.exact == ["model/* is stored as halves"]
    assert newest.body.lossy == pytest.approx(1 / 2048)
    assert verify_checkpoint(run.store, run.view(), newest) == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("wrong", "what it decodes is not"),
        ("raising", "ValueError: no"),
        ("writing", "TypeError"),
        ("hungry", "MemoryError"),
    ],
)
def test_a_faulty_codec_costs_nothing_but_its_gain(codecs: None, tmp_path: Path, name: str, why: str) -> None:
    """What a codec encoded is decoded and compared before it is stored. Without it, the chunk is stored as usual, and one event reports it."""
    path, module, seen = tmp_path / "runs/demo", table(), list[Event]()
    plugin_codecs.REPORTED.discard(name)
    undo = subscribe(seen.append)
    assert save(path, module, plugin_codecs={"model/*": name}).error is None
    undo()
    [event] = [event for event in seen if event.name == "codec.failed"]
    assert event.fields["codec"] == name and why in event.fields["error"]
    assert name not in codecs_of(path)
    again = table(1)
    with relight.Checkpointer(path, model=again, save=None, background=False) as ckpt:
        ckpt.restore()
    assert torch.equal(again.weight, module.weight)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nothing", "no installed package"),
        ("twin", "is also that of codec"),
        ("low", "its code is 3"),
        ("alias", "is called alias"),
        ("absent", "AttributeError"),
        ("planes", "no installed package"),
    ],
)
def test_a_codec_that_cannot_be_used_is_refused_when_it_is_named(codecs: None, name: str, why: str) -> None:
    """The settings name the codec and the reason. Other codecs of the same package are usable."""
    with pytest.raises(ConfigError, match=why):
        relight.Compact(plugin_codecs={"model/*": name})
    assert plugin("good").code == 100


def test_a_missing_codec_is_no_damage(codecs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader without the package refuses: no restore falls back to an older checkpoint, and no tool records damage."""
    path = tmp_path / "runs/demo"
    save(path, table())
    save(path, table(), 1, plugin_codecs={"model/*": "good"})
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not entry.endswith("package")])
    chunk_codecs._plugins.cache_clear()
    run = Run(open_bytes(str(path.parent)), path.name)
    [finding] = verify_checkpoint(run.store, run.view(), run.history().live[-1])
    assert finding.is_unknown and "good" in finding.detail
    with (
        pytest.raises(ConfigError, match="codecs that are not installed: good"),
        relight.Checkpointer(path, model=table(1), save=None, background=False) as ckpt,
    ):
        ckpt.restore()


def test_what_a_codec_raises_while_reading_is_an_error_of_relight(codecs: None) -> None:
    """A codec that raises anything for stored bytes gives a ``CorruptCheckpoint`` that names it."""
    context = DecodeContext(False, lambda offset, into: None, lambda: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(CorruptCheckpoint, match="codec good cannot decode"):
        plugin("good").decode(memoryview(b"nonsense"), memoryview(bytearray(8)), context)


def test_a_result_that_is_not_smaller_is_not_used(codecs: None) -> None:
    """The writer then stores the chunk as usual."""
    data = memoryview(bytearray(torch.randint(0, 256, (4096,), dtype=torch.uint8).numpy().tobytes()))
    assert len(zlib.compress(data, 1)) >= len(data)
    assert plugin("good").encode(data, EncodeContext("uint8", zlib.compress, None)) is None  # type: ignore[arg-type]
    assert isinstance(plugin("good"), ChunkCodec) and EncodedChunk(b"x").decoded is None


def test_an_empty_result_is_not_used(codecs: None) -> None:
    """A location has at least one byte, so a codec that returns none does not apply."""
    data = memoryview(bytearray(4096))
    assert plugin("empty").encode(data, EncodeContext("uint8", zlib.compress, None)) is None  # type: ignore[arg-type]


def test_a_failing_codec_is_reported_by_the_trainer(
    codecs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a background save the codec fails in the agent. The trainer emits the event."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'package'}:{os.environ.get('PYTHONPATH', '')}")
    seen = list[Event]()
    undo = subscribe(seen.append)
    compact = relight.Compact(plugin_codecs={"model/*": "raising"})
    with relight.Checkpointer(
        tmp_path / "runs/demo", model=table(), save=None, compact=compact, background=True
    ) as ckpt:
        ckpt.save(0).wait()
    undo()
    assert ["raising"] == [event.fields["codec"] for event in seen if event.name == "codec.failed"]


@pytest.mark.parametrize("name", ["segfault", "exit"])
def test_a_codec_that_ends_the_agent_is_named_and_not_used_again(
    codecs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The error of the save names the codec. The next agent stores chunks without it, and reports that. No file is left."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'package'}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(plugin_codecs, "NOTES", plugin_codecs.CodecNotes())
    path, module, seen = tmp_path / "runs/demo", table(), list[Event]()
    undo = subscribe(seen.append)
    compact = relight.Compact(plugin_codecs={"model/*": name, "optimizer/*": "good"})
    with relight.Checkpointer(path, model=module, save=None, compact=compact, background=True) as ckpt:
        first = ckpt.save(0, block=False)
        with pytest.raises(RelightError, match=f"codec {name} was running") as failed:
            first.wait()
        assert "plugin_codecs" in failed.value.hint
        notes = f"{address_of(str(path.parent), path.name)}{plugin_codecs.SUFFIX}"
        with LocalDirectory() as directory:
            assert notes in os.listdir(directory.fd)
        assert ckpt.save(1).error is None
        assert plugin_codecs.NOTES.has_ended(plugin(name).code), "saves that the trainer writes do without it, too"
    undo()
    [event] = [event for event in seen if event.name == "codec.failed"]
    assert event.fields["codec"] == name and "was running when an agent" in event.fields["error"]
    assert name not in codecs_of(path)
    ends = time.monotonic() + 20
    with LocalDirectory() as directory:
        while notes in os.listdir(directory.fd) and time.monotonic() < ends:
            time.sleep(0.02)
        assert notes not in os.listdir(directory.fd)


def test_notes_of_running_codecs(codecs: None, tmp_path: Path) -> None:
    """Calls are counted. Those that run when the process ends count against the codec: here, and in the next process."""
    path, notes = str(tmp_path / "notes"), plugin_codecs.CodecNotes()
    notes.keep_in(path)
    assert not os.path.exists(path), "most agents never run a codec of another package"
    with notes.calling(100), notes.calling(100), notes.calling(101):
        assert Path(path).read_bytes()[100:102] == b"\x02\x01"
    assert not any(Path(path).read_bytes())
    with notes.calling(100):  # the process ends here
        later = plugin_codecs.CodecNotes()
        later.keep_in(path)
        assert later.has_ended(100) and not later.has_ended(101)
        with later.calling(100):
            assert Path(path).read_bytes()[100] == plugin_codecs.ENDED
    later.remove()
    assert not os.path.exists(path)


def test_notes_are_no_condition_of_a_save(tmp_path: Path) -> None:
    """A directory that is gone, or a file of another form, stops no save."""
    (tmp_path / "short").write_bytes(b"\0" * 100 + b"\1")
    for name, ended in (("gone/notes", False), ("short", True)):
        notes = plugin_codecs.CodecNotes()
        notes.keep_in(str(tmp_path / name))
        with notes.calling(101):
            assert notes.has_ended(100) is ended
        notes.remove()
    assert plugin_codecs.ended_with(str(tmp_path / "gone")) == []


@pytest.mark.parametrize("background", [False, True])
def test_a_pattern_without_a_tensor_is_reported_once(tmp_path: Path, background: bool) -> None:
    """A misspelt pattern would store tensors as if there were no setting. Patterns with a tensor are not reported."""
    seen = list[Event]()
    undo = subscribe(seen.append)
    compact = relight.Compact(lossy={"modle/*": "bfloat16", "model/*": "bfloat16"}, max_error={"nothing": 0.1})
    with relight.Checkpointer(
        tmp_path / "runs/demo", model=table(), save=None, compact=compact, background=background
    ) as ckpt:
        for step in range(2):
            ckpt.save(step).wait()
    undo()
    unmatched = [event.fields["pattern"] for event in seen if event.name == "compact.unmatched"]
    assert sorted(unmatched) == ["modle/*", "nothing"]


def test_no_other_module_knows_a_codec_by_its_number() -> None:
    """Outside of the register no module compares a location's code with a number."""
    wrong = []
    for file in (Path(relight.__file__).parent).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            left = getattr(node, "left", None) if isinstance(node, ast.Compare) else None
            numbers = [
                side
                for side in getattr(node, "comparators", [])
                if isinstance(side, ast.Constant) and type(side.value) is int
            ]
            if (
                isinstance(left, ast.Attribute)
                and left.attr == "coded"
                and numbers
                and file.name != "chunk_locations.py"
            ):
                wrong.append(f"{file.name}:{node.lineno}")
    assert not wrong
