"""``relight.export`` to safetensors: to the bit, renamed, converted, in several files; and what must not be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from outgoing import bits, opened, raw, same, saved, saved_by_ranks, state
from safetensors import safe_open
from safetensors.torch import load_file

import relight
from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, IncompatibleState
from relight.export import Options, execute_export, plan_export
from relight.export.convert import converted
from relight.policy.compact import Compact


def export(checkpoint, path: Path, **options) -> dict[str, torch.Tensor]:
    """Export to one file, and read it with the library."""
    execute_export(plan_export(checkpoint, path, Options(**options)))
    return load_file(path)


def test_what_comes_out_is_what_went_in_to_the_bit(tmp_path: Path) -> None:
    """Each dtype, any bits, shapes without elements and without dimensions.

    The file has nothing else, and nothing is next to it.
    """
    model = state()
    exported = export(saved(tmp_path / "runs", model, optimizer={"step": 3}), tmp_path / "out.safetensors")
    assert exported.keys() == model.keys()
    assert [name for name in model if not same(exported[name], model[name])] == []
    assert sorted(os.listdir(tmp_path)) == ["out.safetensors", "runs"]
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_several_files_have_an_index_as_transformers_writes_it(tmp_path: Path) -> None:
    """Each tensor is in the file that the index names.

    A file exceeds the limit only if it has one tensor. The sizes add up.
    """
    model = {f"h.{index}.weight": bits(torch.float32, 50, 10, seed=index) for index in range(9)} | {
        "big": bits(torch.float16, 5000)
    }
    execute_export(plan_export(saved(tmp_path / "runs", model), tmp_path / "out", Options(shard_bytes=5000)))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in model.values())}
    assert index["weight_map"].keys() == model.keys()
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" for number in range(len(files))]
    assert sorted(os.listdir(tmp_path / "out")) == [*files, "model.safetensors.index.json"]
    for name in files:
        loaded = load_file(tmp_path / "out" / name)
        assert sum(tensor.nbytes for tensor in loaded.values()) <= 5000 or len(loaded) == 1
        assert all(same(loaded[key], model[key]) and index["weight_map"][key] == name for key in loaded)


def test_a_single_shard_is_one_file_without_index(tmp_path: Path) -> None:
    """``from_pretrained`` then expects ``model.safetensors``."""
    execute_export(
        plan_export(saved(tmp_path / "runs", {"a": torch.ones(3)}), tmp_path / "out", Options(shard_bytes=10**9))
    )
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]


@pytest.mark.parametrize("world", [2, 3])
def test_what_ranks_hold_across_is_put_together(tmp_path: Path, world: int) -> None:
    """Tensors cut along their last dimension come out whole; those cut along their first are written as they come."""
    model = {"cut": bits(torch.float32, 70, 90), "row": bits(torch.bfloat16, 999), "cube": bits(torch.float64, 4, 5, 6)}
    exported = export(saved_by_ranks(tmp_path / "runs", model, world), tmp_path / "out.safetensors")
    assert [name for name in model if not same(exported[name], model[name])] == []


def test_names_are_renamed_and_chosen(tmp_path: Path) -> None:
    """Rules apply one after the other; patterns take names and what is below them; a component may be named."""
    checkpoint = saved(
        tmp_path / "runs", {"model.h.0.w": torch.ones(1), "model.h.1.w": torch.ones(2)}, ema={"w": torch.ones(3)}
    )
    rules = ("model.=", r"re:h\.([0-9]+)=blocks.\1", "=net.")
    assert export(checkpoint, tmp_path / "a.safetensors", rename=rules).keys() == {"net.blocks.0.w", "net.blocks.1.w"}
    assert export(checkpoint, tmp_path / "b.safetensors", only=("model.h.0",)).keys() == {"model.h.0.w"}
    assert export(checkpoint, tmp_path / "c.safetensors", only=("model/model.h.1.*",)).keys() == {"model.h.1.w"}
    assert export(checkpoint, tmp_path / "d.safetensors", component="ema").keys() == {"w"}
    assert export(checkpoint, tmp_path / "e.safetensors", everything=True).keys() == {
        "model.model.h.0.w",
        "model.model.h.1.w",
        "ema.w",
    }
    for options, error in [
        (Options(rename=(r"re:h\.[01]=h",)), ConfigError),
        (Options(rename=("re:(=x",)), ConfigError),
        (Options(rename=(r"re:h=\7",)), ConfigError),
        (Options(rename=("nothing",)), ConfigError),
        (Options(component="other"), ConfigError),
        (Options(only=("nothing*",)), CheckpointNotFound),
    ]:
        with pytest.raises(error):
            plan_export(checkpoint, tmp_path / "f.safetensors", options)


@pytest.mark.parametrize("source", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("target", ["float64", "float32", "float16", "bfloat16"])
def test_conversion_is_to_the_nearest_as_torch_has_it(source: str, target: str) -> None:
    """Any bits, converted, are what torch makes of them; what is not a number stays so; finite values that become infinite are counted."""
    values = bits(getattr(torch, source), 1 << 16, seed=1)
    if source == "float64":  # torch rounds twice on the way to bfloat16: see the next test
        values = torch.cat(
            (bits(torch.float32, 1 << 15, seed=2).double(), torch.tensor([1e300, -1e300, 65519.9, 65520.0]))
        )
    out, over = converted(memoryview(bytearray(raw(values))), source, target)
    got = torch.frombuffer(bytearray(out), dtype=getattr(torch, target))
    wanted = values.to(getattr(torch, target))
    assert torch.equal(got.isnan(), wanted.isnan())
    assert same(got[~wanted.isnan()], wanted[~wanted.isnan()])
    assert over == int((wanted.isinf() & values.isfinite()).sum())


def test_doubles_are_rounded_once() -> None:
    """A value a hair above the middle of two bfloat16 goes up, though float32 would have it at the middle, and so down."""
    middle = 1 + 2**-8
    values = torch.tensor(
        [middle, middle + 2**-40, middle - 2**-40, -middle - 2**-40, 1 + 3 * 2**-8 - 2**-40], dtype=torch.float64
    )
    out, _ = converted(memoryview(bytearray(raw(values))), "float64", "bfloat16")
    assert torch.frombuffer(bytearray(out), dtype=torch.bfloat16).tolist() == [
        1.0,
        1 + 2**-7,
        1.0,
        -1 - 2**-7,
        1 + 2**-7,
    ]


def test_dtype_is_for_floats_and_overflow_is_reported(tmp_path: Path) -> None:
    """Integers stay. The report has the number of new infinite values of each tensor."""
    checkpoint = saved(tmp_path / "runs", {"a": torch.tensor([1.0, 1e6, -1e6]), "n": torch.arange(3)})
    report = execute_export(plan_export(checkpoint, tmp_path / "o.safetensors", Options(dtype="float16")))
    exported = load_file(tmp_path / "o.safetensors")
    assert (exported["a"].dtype, exported["n"].dtype) == (torch.float16, torch.int64)
    assert report.overflowed == {"a": 2}


def test_tied_weights_are_written_once_and_named(tmp_path: Path) -> None:
    """Under the first name, with the other name in the file; or under each name."""
    weight = torch.ones(4, 4)
    checkpoint = saved(tmp_path / "runs", {"wte": weight, "lm_head": weight})
    assert export(checkpoint, tmp_path / "a.safetensors").keys() == {"wte"}
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "lm_head": "wte"}
    both = export(checkpoint, tmp_path / "b.safetensors", tied="each")
    assert both.keys() == {"wte", "lm_head"}
    assert same(both["lm_head"], weight)


def test_repeated_dimensions_are_written_out(tmp_path: Path) -> None:
    """A tensor that was expanded is written at its full size."""
    model = {"rep": torch.arange(3.0).expand(4, 3), "column": torch.arange(4.0)[:, None].expand(4, 3)}
    exported = export(saved(tmp_path / "runs", model), tmp_path / "a.safetensors")
    assert all(same(exported[name], tensor) for name, tensor in model.items())


@pytest.mark.parametrize("folder", [False, True])
def test_what_is_there_is_not_replaced_unless_asked(tmp_path: Path, folder: bool) -> None:
    """A file, or weights in a directory, in which other files stay; older shards go with their index."""
    checkpoint = saved(tmp_path / "runs", {"a": torch.ones(300), "b": torch.ones(300)})
    target = tmp_path / ("out" if folder else "out.safetensors")
    execute_export(plan_export(checkpoint, target, Options(shard_bytes=1300 if folder else None)))
    if folder:
        (target / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="there already"):
        plan_export(checkpoint, target)
    execute_export(plan_export(checkpoint, target, Options(overwrite=True, dtype="float16")))
    if folder:
        assert sorted(os.listdir(target)) == ["config.json", "model.safetensors"]
    assert load_file(target / "model.safetensors" if folder else target)["a"].dtype == torch.float16


def test_weights_go_into_a_directory_that_has_other_files(tmp_path: Path) -> None:
    """Such as a model's configuration."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    execute_export(plan_export(saved(tmp_path / "runs", {"a": torch.ones(3)}), tmp_path / "out"))
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]
    with pytest.raises(ConfigError, match="a directory"):
        (tmp_path / "x.safetensors").mkdir()
        plan_export(opened(tmp_path / "runs"), tmp_path / "x.safetensors")


def test_a_damaged_chunk_ends_it_and_nothing_is_there(tmp_path: Path) -> None:
    """The error names it. Neither the target nor a temporary is left."""
    checkpoint = saved(tmp_path / "runs", {"a": bits(torch.float32, 900_000)})
    pack = next((tmp_path / "runs").rglob("pack-*.safetensors"))
    data = bytearray(pack.read_bytes())
    data[-9] ^= 4
    pack.write_bytes(data)
    with pytest.raises(CorruptCheckpoint):
        execute_export(plan_export(checkpoint, tmp_path / "out.safetensors"))
    assert os.listdir(tmp_path) == ["runs"]


@pytest.mark.crash
def test_a_killed_export_leaves_no_target_and_the_next_one_takes_the_rest_away(tmp_path: Path) -> None:
    """SIGKILL during an export: the target does not exist. The next export creates it and leaves no temporary."""
    model = {"a": bits(torch.float32, 900_000)}
    checkpoint = saved(tmp_path / "runs", model)
    script = (
        "import os, sys; sys.path.insert(0, sys.argv[3]); import relight.export.execute as one; from outgoing import opened; from pathlib import Path\n"
        "from relight.export import plan_export\n"
        "one.read_tensors = lambda *a, **k: os.kill(os.getpid(), 9)\n"
        "one.execute_export(plan_export(opened(Path(sys.argv[1])), sys.argv[2]))\n"
    )
    target = tmp_path / "out.safetensors"
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "runs", target, Path(__file__).parent], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [name for name in os.listdir(tmp_path) if name != "runs"][0].startswith(".out.safetensors.exporting-")
    assert same(export(checkpoint, target)["a"], model["a"])
    assert sorted(os.listdir(tmp_path)) == ["out.safetensors", "runs"]


def test_an_export_that_is_under_way_is_left_alone(tmp_path: Path) -> None:
    """What another process holds a lock on is not taken away, and nothing that an export did not name."""
    (tmp_path / ".o.safetensors.exporting-my-notes").mkdir()
    checkpoint = saved(tmp_path / "runs", {"a": torch.ones(3)})
    import fcntl

    (tmp_path / ".o.safetensors.exporting-0123456789abcdef").mkdir()
    locked = os.open(tmp_path / ".o.safetensors.exporting-0123456789abcdef", os.O_RDONLY)
    fcntl.flock(locked, fcntl.LOCK_EX)
    export(checkpoint, tmp_path / "o.safetensors")
    assert (tmp_path / ".o.safetensors.exporting-0123456789abcdef").is_dir()
    os.close(locked)
    export(checkpoint, tmp_path / "o.safetensors", overwrite=True)
    assert not (tmp_path / ".o.safetensors.exporting-0123456789abcdef").exists()
    assert (tmp_path / ".o.safetensors.exporting-my-notes").is_dir()


def test_compact_and_encrypted_checkpoints_go_out_alike(tmp_path: Path) -> None:
    """What is coded, a difference to an earlier one, or encrypted, comes out as it went in."""
    from relight.keys import write_key_file

    write_key_file(str(tmp_path / "key"))
    model = {"w": torch.randn(40_000), "m": torch.zeros(30_000)}
    with relight.Checkpointer(
        tmp_path / "runs" / "run", model=dict(model), compact=Compact(), encrypt=f"file:{tmp_path / 'key'}"
    ) as ckpt:
        ckpt.save(1, block=True)
    os.environ["RELIGHT_KEY"] = f"file:{tmp_path / 'key'}"
    try:
        exported = export(opened(tmp_path / "runs"), tmp_path / "o.safetensors")
    finally:
        del os.environ["RELIGHT_KEY"]
    assert all(same(exported[name], tensor) for name, tensor in model.items())


def test_what_safetensors_has_no_name_for_is_refused(tmp_path: Path) -> None:
    """Before anything is written; the error names the tensor and a way out."""
    checkpoint = saved(tmp_path / "runs", {"c": torch.ones(2, dtype=torch.complex128)})
    with pytest.raises(IncompatibleState, match="complex128"):
        plan_export(checkpoint, tmp_path / "o.safetensors")


@pytest.mark.parametrize("target", ["out.safetensors", "out"])
def test_a_target_that_appears_during_the_export_is_not_replaced(tmp_path: Path, target: str) -> None:
    """Without ``--overwrite``, a file that another process writes meanwhile stays."""
    checkpoint = saved(tmp_path / "runs", state())
    file = tmp_path / target / "model.safetensors" if target == "out" else tmp_path / target

    def write(length: int) -> None:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"another export")

    with pytest.raises(ConfigError, match="is there already"):
        execute_export(plan_export(checkpoint, tmp_path / target, Options()), write)
    assert file.read_bytes() == b"another export"
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []
